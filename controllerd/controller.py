"""Drives the node: watches the peers, asks the `mind` what to do at every change, and does it.

Everything that decides is pure and lives in `mind`. This module feeds it with facts at every ring of the bell and at
least every `_LOOK_S`, carries out its commands, and says to CloudBoard, the log and the journal what became of it.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from controllerd.attachment import Attachment, Report
from controllerd.facts import Facts, Gpu, Owner, Runtime, gpu_of, owner_of, runtime_of
from controllerd.journal import Journal
from controllerd.mind import Command, EndOwner, Happening, Mind, Warm
from controllerd.peers import GpuPeer, OwnerPeer, ProbePeer
from controllerd.recycle import RecycleRecord, Tell
from controllerd.recycle_timer import RecycleTimer
from controllerd.signals import Bell
from controllerd.states import State
from tie.daemon import log
from tie.daemon.config import NodeConfig
from tie.daemon.errors import PeerDiedError, PeerError
from tie.daemon.notify import notify
from tie.proto import cloudboard_pb2

_LOOK_S = 0.25
_SHOWN_S = 0.01  # each state lasts so long at least, for whoever watches
_WARM_RETRY_S = 1.0
_SUMMARY_CHARACTERS = 512
_CALL_TIMEOUT_S = 5.0

_REPORTED = {
    State.INITIALIZING: cloudboard_pb2.STATE_INITIALIZING,
    State.AVAILABLE: cloudboard_pb2.STATE_AVAILABLE,
    State.DRAINING: cloudboard_pb2.STATE_BUSY,
    State.RECYCLING: cloudboard_pb2.STATE_BUSY,
    State.ERROR: cloudboard_pb2.STATE_ERROR,
    State.MAINTENANCE: cloudboard_pb2.STATE_BUSY,
}


def boottime() -> float:
    """Seconds since boot, time asleep included: a suspended machine still holds what it served."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Controller:
    """The node's supervisor.

    Args:
        config: the node's configuration.
        clock: monotonic seconds.
        timer: counts down a runtime's life; built from `config` unless given.

    Attributes:
        mind: what has been decided, and why.
        journal: what has happened.
    """

    def __init__(
        self, config: NodeConfig, clock: Callable[[], float] = boottime, timer: RecycleTimer | None = None
    ) -> None:
        sockets = config.sockets
        heartbeat = config.controller.heartbeat_s
        self.config = config
        self.clock = clock
        self.bell = Bell()
        self.journal = Journal(sockets.control.with_name("events.json"), clock)
        self.mind = Mind(config.controller, clock(), self._happened, timer)
        self.probe: ProbePeer[Runtime] = ProbePeer("probe", sockets.probe, heartbeat, runtime_of, self.bell)
        self.gpu: GpuPeer[Gpu] = GpuPeer(
            "gpuhealthd",
            sockets.gpuhealth,
            heartbeat,
            lambda message: gpu_of(message, config.gpuhealth.stale_after_s),
            self.bell,
        )
        self.owner: OwnerPeer[Owner] = OwnerPeer("owner", sockets.owner_control, heartbeat, owner_of, self.bell)
        self.cloudboard = Attachment(sockets.node, config.node_id, heartbeat, self.bell)
        self._known: dict[str, bool] = {}  # which peers were connected at the last look
        self._gpu_said: tuple[str, ...] | None = None
        self._failing: set[type[Command]] = set()
        self._tasks = asyncio.TaskGroup()
        self._flag: Path = sockets.control.parent / "maintenance"

    # ---- what operators ask for ----

    def request_recycle(self, reason: str, drain_s: float | None = None) -> RecycleRecord:
        """Starts a recycle, or joins the one that is under way."""
        record = self.mind.request_recycle(self.clock(), reason, drain_s)
        self._report()
        self.bell.ring()
        return record

    def set_maintenance(self, *, on: bool) -> None:
        """Withdraws the node until switched off again. Survives a restart of the controller, not one of the machine."""
        if on:
            self._flag.touch()
        else:
            self._flag.unlink(missing_ok=True)
        self.mind.set_maintenance(self.clock(), on=on)
        self._report()
        self.bell.ring()

    async def warm_now(self, timeout: float) -> None:
        """Warms the present runtime again.

        Raises:
            PeerError: it is not there, or did not finish.
        """
        runtime = self.probe.facts
        if runtime is None:
            raise PeerDiedError("no runtime to warm")
        await self.probe.warm(timeout)
        self.mind.warmed(runtime.instance_id, done=True)
        self.bell.ring()

    # ---- the loop ----

    async def run(self) -> None:
        """Supervises for ever; cancel to end."""
        async with self._tasks as group:  # a bug in any of them ends the daemon, and systemd starts it afresh
            for peer in (self.probe, self.gpu, self.owner, self.cloudboard):
                group.create_task(peer.run())
            if self._flag.exists():
                # Whether the runtime was already recycled for it is not known: once too often is safe.
                self.set_maintenance(on=True)
            while True:
                before = self.mind.state
                self._look()
                if self.mind.state is before:
                    await self.bell.wait(_LOOK_S)
                else:
                    await asyncio.sleep(_SHOWN_S)

    def _look(self) -> None:
        cloudboard = self.cloudboard
        self._notice_peers()
        facts = Facts(
            self.probe.facts,
            self.gpu.facts,
            self.owner.facts,
            cloudboard.attached,
            busy_acknowledged=cloudboard.in_force == cloudboard_pb2.STATE_BUSY,
            in_flight=cloudboard.in_flight,
        )
        for command in self.mind.look(self.clock(), facts):
            self._tasks.create_task(self._carry_out(command))
        self._report()

    async def _carry_out(self, command: Command) -> None:
        try:
            match command:
                case Tell(reason, drain_s):
                    await self._tell(reason, drain_s)
                case Warm(instance):
                    await self._warm(instance)
                case EndOwner():
                    await self._end_owner()
        except PeerError as error:
            if type(command) not in self._failing:  # it is tried again and again
                log.failure("command.failed", error, action=type(command).__name__.lower())
            self._failing.add(type(command))
        else:
            self._failing.discard(type(command))
        self.bell.ring()

    async def _tell(self, reason: str, drain_s: float) -> None:
        heard = False
        try:
            await self.probe.recycle(reason, drain_s, _CALL_TIMEOUT_S)
            heard = True
        finally:
            self.mind.told(self.clock(), heard=heard)

    async def _end_owner(self) -> None:
        heard = False
        try:
            await self.owner.shut_down(_CALL_TIMEOUT_S)
            heard = True
        finally:
            self.mind.owner_asked(heard=heard)

    async def _warm(self, instance: str) -> None:
        began, done = self.clock(), False
        try:
            await self.probe.warm(self.config.controller.fresh_runtime_deadline_s)
            done = True
            log.event("warm.done", instance_id=instance, elapsed_s=round(self.clock() - began, 3))
        except PeerError as error:
            log.failure("warm.failed", error, instance_id=instance)
            await asyncio.sleep(_WARM_RETRY_S)
        finally:
            self.mind.warmed(instance, done=done)

    # ---- what is said about it ----

    def _notice_peers(self) -> None:
        """Notes which peers came and went, and what the hardware's judge says."""
        for name, connected in (
            ("probe", self.probe.connected),
            ("gpuhealthd", self.gpu.connected),
            ("owner", self.owner.connected),
            ("cloudboard", self.cloudboard.attached),
        ):
            if self._known.setdefault(name, False) != connected:
                self._known[name] = connected
                self._happened(Happening("peer", "connected" if connected else "gone", after=name))
        message = self.gpu.message
        said = tuple(message.reasons) if message is not None and self.gpu.connected else None
        if said is not None and said != self._gpu_said:
            if said or self._gpu_said:
                self._happened(Happening("gpu", said[0] if said else "healthy", more=said))
            self._gpu_said = said

    def _happened(self, happening: Happening) -> None:
        self.journal.add(happening)
        reason = ",".join((happening.code, *happening.more))[:160]
        match happening.kind:
            case "state":
                before, after = happening.before, happening.after
                log.event("node.transition", reason=happening.code, from_state=before, to_state=after)
                notify(f"STATUS={after} ({happening.code})")
            case "runtime":
                log.event("runtime.seen", instance_id=happening.after)
            case "recycled":
                log.event(
                    "recycle.finished",
                    status=happening.code,
                    instance_id=happening.after,
                    elapsed_s=round(self.mind.recycle.elapsed_s(self.clock()), 3) if self.mind.recycle else None,
                )
            case "given-up":
                log.event("node.given-up", reason=reason, action="call-somebody")
            case "peer":
                pass  # who watches the peer has said so, and what was wrong
            case "recycle":
                log.event("node.recycle", reason=reason)
            case "gpu":
                log.event("node.gpu", reason=reason)
            case "owner":
                log.event("node.owner", reason=reason)
            case "maintenance":
                log.event("node.maintenance", reason=reason)
            case _:
                raise ValueError(happening.kind)
        self.bell.ring()

    def _report(self) -> None:
        runtime = self.probe.facts
        self.cloudboard.report(
            Report(
                _REPORTED[self.mind.state],
                model=runtime.model if runtime else "",
                release=runtime.release if runtime else "",
                summary=summary(self.mind.reasons),
            )
        )


def summary(reasons: tuple[str, ...]) -> str:
    """The first of the reasons, as many as CloudBoard takes."""
    text = ""
    for reason in reasons:
        longer = f"{text},{reason}" if text else reason
        if len(longer) > _SUMMARY_CHARACTERS:
            break
        text = longer
    return text
