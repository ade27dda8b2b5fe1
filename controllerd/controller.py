"""Drives the node: watches the peers, asks the `mind` what to do at every change, and does it.

Everything that decides is pure and lives in `mind`. This module feeds it with facts at every ring of the bell and at
least every `_LOOK_S`, carries out its commands, and says to CloudBoard, the log and the journal what became of it.
"""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from controllerd.attachment import Attachment, Report
from controllerd.chronicle import Chronicle
from controllerd.clock import Wakefulness, boottime
from controllerd.facts import Facts, Gpu, Owner, Runtime, gpu_of, owner_of, runtime_of, store_of
from controllerd.journal import MAX_WORD, NAME, Journal
from controllerd.mind import Command, EndOwner, Mind, Warm
from controllerd.peers import GpuPeer, OwnerPeer, ProbePeer, StorePeer
from controllerd.recycle import RecycleRecord, Tell
from controllerd.recycle_timer import RecycleTimer
from controllerd.signals import Bell, Watching
from controllerd.states import State
from controllerd.triggers import ASSET, MAINTENANCE
from controllerd.witness import Seen, Witness
from tie.daemon import log
from tie.daemon.config import NodeConfig
from tie.daemon.errors import PeerDiedError, PeerError
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


class Controller:
    """The node's supervisor.

    Args:
        config: the node's configuration.
        clock: monotonic seconds.
        timer: counts down a runtime's life; built from `config` unless given.

    Attributes:
        mind: what has been decided, and why.
        journal: what has happened.
        witness: sees what is around.
    """

    def __init__(
        self, config: NodeConfig, clock: Callable[[], float] = boottime, timer: RecycleTimer | None = None
    ) -> None:
        sockets = config.sockets
        self.config = config
        self.clock = clock
        self.bell = Bell()
        self.journal = Journal(sockets.control.with_name(NAME), clock)
        wake, tell = Wakefulness(clock), Chronicle(self.journal, self.bell)
        self.witness = Witness(tell, clock, wake, sockets.control.parent)
        self.mind = Mind(config.controller, clock(), tell, timer)
        watching = Watching(config.controller.heartbeat_s, self.bell, wake)
        self.probe: ProbePeer[Runtime] = ProbePeer("probe", sockets.probe, runtime_of, watching)
        self.gpu: GpuPeer[Gpu] = GpuPeer(
            "gpuhealthd",
            sockets.gpuhealth,
            lambda message: gpu_of(message, config.gpuhealth.stale_after_s),
            watching,
        )
        self.owner: OwnerPeer[Owner] = OwnerPeer("owner", sockets.owner_control, owner_of, watching)
        self.store: StorePeer[str] = StorePeer("store", sockets.store_control, store_of, watching)
        self.cloudboard = Attachment(sockets.node, config.node_id, watching)
        self._failing: set[type[Command]] = set()
        self._tasks = asyncio.TaskGroup()
        self._flag: Path = sockets.control.parent / "maintenance"

    # ---- what operators ask for ----

    def request_recycle(self, reason: str, drain_s: float | None = None, word: str = "") -> RecycleRecord:
        """Starts a recycle, or joins the one that is under way."""
        record = self.mind.request_recycle(self.clock(), reason, drain_s, word)
        self._report()
        self.bell.ring()
        return record

    def set_maintenance(self, *, on: bool, reason: str = MAINTENANCE, word: str = "") -> None:
        """Withdraws the node until switched off again. Survives a restart of the controller, not one of the machine."""
        if on:
            self._flag.touch()
            if not self.mind.memory.maintenance:  # else the one that switched it on has said why
                with contextlib.suppress(OSError):  # a full disk costs the words
                    self._flag.write_text(f"{reason}\n{word}")
        else:
            self._flag.unlink(missing_ok=True)
        self.mind.set_maintenance(self.clock(), on=on, reason=reason, word=word)
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
        self.witness.begin(self.journal, self.mind)
        async with self._tasks as group:  # a bug in any of them ends the daemon, and systemd starts it afresh
            for peer in (self.probe, self.gpu, self.owner, self.store, self.cloudboard):
                group.create_task(peer.run())
            if self._flag.exists():
                # Whether the runtime was already recycled for it is not known: once too often is safe.
                reason, word = self._noted()
                self.set_maintenance(on=True, reason=reason, word=word)
            while True:
                before = self.mind.state
                self._look()
                if self.mind.state is before:
                    await self.bell.wait(_LOOK_S)
                else:
                    await asyncio.sleep(_SHOWN_S)

    def _noted(self) -> tuple[str, str]:
        """Why maintenance was switched on under an earlier controller, and an operator's word for it."""
        with contextlib.suppress(OSError, UnicodeDecodeError), self._flag.open() as file:
            reason, _, word = file.read(2 * MAX_WORD).partition("\n")
            if word.isprintable():
                return ASSET if reason == ASSET else MAINTENANCE, word[:MAX_WORD]
        return MAINTENANCE, ""

    def _look(self) -> None:
        cloudboard = self.cloudboard
        peers: dict[str, Seen] = {peer.name: peer for peer in (self.probe, self.gpu, self.owner, self.store)}
        peers["cloudboard"] = cloudboard
        keys = (cloudboard.keys, cloudboard.key_id)
        self.witness.look(peers, self.gpu, self.store.facts, keys, moving=self.mind.moving)
        facts = Facts(
            self.probe.facts,
            self.gpu.facts,
            self.owner.facts,
            cloudboard.attached,
            busy_acknowledged=cloudboard.in_force == cloudboard_pb2.STATE_BUSY,
            in_flight=cloudboard.in_flight,
            keys=cloudboard.keys != "silent",
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

    # ---- what CloudBoard hears of it ----

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
