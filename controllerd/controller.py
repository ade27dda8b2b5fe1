"""Drives the node: looks at the peers, decides by the table, acts.

Everything that decides is pure and lives elsewhere (`states`, `gates`, `triggers`); this module feeds it with facts and
carries out what it says. It looks at every ring of the bell and at least every `_LOOK_S`.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from controllerd import triggers
from controllerd.attachment import Attachment, Report
from controllerd.facts import Facts, Gpu, Owner, Runtime, gpu_of, owner_of, runtime_of
from controllerd.gates import Memory, Readiness, assess
from controllerd.peers import GpuPeer, OwnerPeer, ProbePeer
from controllerd.recycle import Deadlines, Procedure, RecycleRecord
from controllerd.recycle_timer import ErrorBackoff, RecycleTimer
from controllerd.signals import Bell
from controllerd.states import Action, Event, State, step
from tie.daemon import log
from tie.daemon.config import NodeConfig
from tie.daemon.errors import PeerDiedError, PeerError
from tie.daemon.notify import notify
from tie.proto import cloudboard_pb2

_LOOK_S = 0.25
_WARM_RETRY_S = 1.0
_EVENTS = 32
_MOVING = frozenset({State.DRAINING, State.RECYCLING})

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


@dataclass(frozen=True, slots=True)
class Transition:
    """One change of state, for the operator's short history."""

    at: float
    before: State
    after: State
    reason: str


class Controller:
    """The node's supervisor.

    Args:
        config: the node's configuration.
        clock: monotonic seconds.
        timer: counts down a runtime's life; built from `config` unless given.
    """

    def __init__(
        self, config: NodeConfig, clock: Callable[[], float] = boottime, timer: RecycleTimer | None = None
    ) -> None:
        settings = config.controller
        sockets = config.sockets
        heartbeat = settings.heartbeat_s
        self.config = config
        self.bell = Bell()
        self.clock = clock
        self.state = State.INITIALIZING
        self.since = clock()
        self.memory = Memory()
        self.readiness = Readiness(("starting",), broken="", fresh=False)
        self.timer = timer or RecycleTimer(settings.recycle_interval_s, settings.recycle_jitter)
        self.recycles: dict[str, int] = {}
        self.recycle: RecycleRecord | None = None  # the one under way, or the last
        self.last_recycle_s = 0.0
        self.history: deque[Transition] = deque(maxlen=_EVENTS)
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
        self._triggers = triggers.Triggers(
            self.timer,
            ErrorBackoff(settings.error_backoff_s),
            triggers.Patience(settings.error_grace_s, settings.fresh_runtime_deadline_s),
        )
        self._deadlines = Deadlines(
            settings.busy_ack_deadline_s, settings.drain_deadline_s, settings.fresh_runtime_deadline_s
        )
        self._tasks = asyncio.TaskGroup()
        self._warming: asyncio.Task[None] | None = None
        self._instance = ""  # the runtime seen last
        self._owner_of_instance = ""  # the owner whose weights it holds
        self._flag: Path = sockets.control.parent / "maintenance"

    # ---- what operators ask for ----

    @property
    def moving(self) -> bool:
        """Whether a recycle is under way."""
        return self.state in _MOVING

    def request_recycle(self, reason: str, drain_s: float | None = None) -> RecycleRecord:
        """Starts a recycle, or joins the one that is under way."""
        if not self.moving or self.recycle is None:
            self._begin(Event.RECYCLE, reason, drain_s)
        assert self.recycle is not None  # noqa: S101 (set by every way into a moving state)
        return self.recycle

    def set_maintenance(self, *, on: bool) -> None:
        """Withdraws the node until switched off again. Survives a restart of the controller, not one of the machine."""
        if on == self.memory.maintenance:
            return
        self.memory = replace(self.memory, maintenance=on)
        if on:
            self._flag.touch()
            self._begin(Event.MAINTENANCE_ON, triggers.MAINTENANCE, None)
        else:
            self._flag.unlink(missing_ok=True)
            self._apply(Event.MAINTENANCE_OFF, "operator")
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
        self.memory = replace(self.memory, warmed_instance=runtime.instance_id)
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
                if not self.look():
                    await self.bell.wait(_LOOK_S)
                await asyncio.sleep(0)

    def look(self) -> bool:
        """One look at the facts, and what follows from it.

        Returns:
            Whether the state changed; another look is then due at once.
        """
        before = self.state
        facts = Facts(self.probe.facts, self.gpu.facts, self.owner.facts, self.cloudboard.attached)
        self._notice(facts)
        self.readiness = assess(facts, self.memory)
        self._warm_if_needed(facts)
        reason = self._triggers.wanted(self.state, self.clock() - self.since, facts, self.memory, self.clock())
        if reason is not None:
            self._begin(Event.RECYCLE, reason, None)
        elif self.readiness.ready:
            self._apply(Event.READY, "ready")
        elif self.memory.maintenance and self.readiness.fresh:
            self._apply(Event.RESTED, "maintenance")
        elif self.readiness.broken:
            self._apply(Event.BROKEN, self.readiness.broken)
        else:
            self._apply(Event.LOST, self.readiness.reasons[0])
        if self.state is State.RECYCLING and self.clock() - self.since >= self._deadlines.fresh_s:
            self.memory = replace(self.memory, overdue=True)
            self._triggers.failed(self.clock())
            self._apply(Event.OVERDUE, "fresh-runtime-deadline")
        self._report()
        return self.state is not before

    def _notice(self, facts: Facts) -> None:
        """Learns who the runtime is and whose weights it holds."""
        runtime, owner = facts.runtime, facts.owner
        if runtime is None or not runtime.instance_id:
            return
        if runtime.instance_id != self._instance:
            self._instance = runtime.instance_id
            self._owner_of_instance = ""
            self.timer.start(self.clock(), runtime.uptime_s)
            self.memory = replace(self.memory, owner_changed=False)
            log.event("runtime.seen", instance_id=runtime.instance_id, age_s=round(runtime.uptime_s, 1))
        if not runtime.ready:
            return
        if runtime.warmed and self.memory.warmed_instance != runtime.instance_id:
            # Warmed under an earlier controller: adopted as it is.
            self.memory = replace(self.memory, warmed_instance=runtime.instance_id)
        if owner is not None and owner.state == "ready":
            self._owner_of_instance = self._owner_of_instance or owner.instance
            changed = owner.instance != self._owner_of_instance or (
                runtime.owner_generation not in {0, owner.generation}  # 0: the runtime does not say
            )
            self.memory = replace(self.memory, owner_changed=changed)

    def _warm_if_needed(self, facts: Facts) -> None:
        runtime = facts.runtime
        if runtime is None or not self.readiness.fresh or self.state is State.DRAINING:
            return
        if runtime.instance_id != self.memory.warmed_instance and (self._warming is None or self._warming.done()):
            self._warming = self._tasks.create_task(self._warm(runtime.instance_id))

    async def _warm(self, instance: str) -> None:
        began = self.clock()
        try:
            await self.probe.warm(self._deadlines.fresh_s)
        except PeerError as error:
            log.failure("warm.failed", error, instance_id=instance)
            await asyncio.sleep(_WARM_RETRY_S)
            return
        log.event("warm.done", instance_id=instance, elapsed_s=round(self.clock() - began, 3))
        self.memory = replace(self.memory, warmed_instance=instance)
        self.bell.ring()

    def _begin(self, event: Event, reason: str, drain_s: float | None) -> None:
        """Starts a recycle where the state allows one."""
        if Action.RECYCLE not in step(self.state, event)[1]:
            return
        recycle = self.recycle = RecycleRecord(reason, self.clock(), self._instance)
        self.recycles[reason] = self.recycles.get(reason, 0) + 1
        self.memory = replace(self.memory, overdue=False)
        self._apply(event, reason)
        drain = self._deadlines.drain_s if drain_s is None else drain_s
        self._tasks.create_task(self._carry_out(recycle, drain))

    async def _carry_out(self, recycle: RecycleRecord, drain_s: float) -> None:
        def stale(instance: str) -> None:
            self.memory = replace(self.memory, stale_instance=instance or None)

        procedure = Procedure(self.probe, self.cloudboard, self.bell, self._deadlines)
        await procedure.run(recycle, drain_s, stale)
        self._apply(Event.DRAINED, recycle.reason)

    def _apply(self, event: Event, reason: str) -> None:
        """Puts one event through the table and carries out what is not a recycle."""
        before, (after, _) = self.state, step(self.state, event)
        if after is before:
            return
        self.state, now = after, self.clock()
        self.since = now
        self.history.append(Transition(now, before, after, reason))
        log.event("node.transition", from_state=before.name.lower(), to_state=after.name.lower(), reason=reason)
        notify(f"STATUS={after.name.lower()} ({reason})")
        if before in _MOVING and after not in _MOVING:
            self._finish(after, reason, now)
        self._report()
        self.bell.ring()

    def _finish(self, after: State, reason: str, now: float) -> None:
        recycle = self.recycle
        if recycle is None:
            return
        recycle.ended = now
        if after is State.ERROR:
            recycle.error = reason
        else:
            recycle.new_instance = self._instance
            self.last_recycle_s = now - recycle.began
            self.memory = replace(self.memory, overdue=False)
        log.event(
            "recycle.finished",
            reason=recycle.reason,
            instance_id=recycle.new_instance,
            elapsed_s=round(now - recycle.began, 3),
            status=recycle.error or "ok",
        )

    def _report(self) -> None:
        runtime = self.probe.facts
        self.cloudboard.report(
            Report(
                _REPORTED[self.state],
                model=runtime.model if runtime else "",
                release=runtime.release if runtime else "",
                summary=",".join(self.readiness.reasons) if self.state is not State.AVAILABLE else "",
            )
        )
