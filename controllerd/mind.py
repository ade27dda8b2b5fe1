"""All that the controller decides, as one pure machine: facts and wishes in, commands out; no I/O, no clock of its own.

`look` is called at every change and a few times a second. It puts together the state machine (`states`), the gates
(`gates`), the triggers (`triggers`), the recycle's phases (`recycle`) and the patience (`endurance`); `controller`
carries out what it says. Simulators and model checkers drive it with clocks and peers of their own.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from controllerd import triggers
from controllerd.endurance import Endurance
from controllerd.facts import Facts
from controllerd.gates import Memory, Readiness, assess
from controllerd.happening import Happening
from controllerd.recycle import Deadlines, Phase, Procedure, RecycleRecord, Tell
from controllerd.recycle_timer import ErrorBackoff, RecycleTimer
from controllerd.states import Action, Event, State, step
from tie.daemon.config import ControllerConfig

MOVING = frozenset({State.DRAINING, State.RECYCLING})
_ON_ITS_WAY = frozenset({"engine-starting", "canary-pending", "warming"})  # what every runtime says while it starts


@dataclass(frozen=True, slots=True)
class Warm:
    """The runtime's prefix pool is to be warmed; when it is, `Mind.warmed` is called."""

    instance: str


@dataclass(frozen=True, slots=True)
class EndOwner:
    """The model owner is to be asked to end: it starts anew, and with it the runtime. Then `Mind.owner_asked`."""


Command = Tell | Warm | EndOwner


class Mind:
    """One node's.

    Args:
        settings: the node's.
        now: the clock, seconds.
        tell: hears of what happens.
        timer: counts down a runtime's life; built from `settings` unless given.
    """

    def __init__(
        self,
        settings: ControllerConfig,
        now: float,
        tell: Callable[[Happening], None],
        timer: RecycleTimer | None = None,
    ) -> None:
        self.state = State.INITIALIZING
        self.since = now
        self.memory = Memory()
        self.readiness = Readiness(("starting",), broken="", fresh=False)
        self.timer = timer or RecycleTimer(settings.recycle_interval_s, settings.recycle_jitter)
        self.endurance = Endurance(settings.error_attempts, settings.give_up_s)
        self.recycles: dict[str, int] = {}
        self.recycle: RecycleRecord | None = None  # the one under way, or the last
        self.procedure: Procedure | None = None
        self.last_recycle_s = 0.0
        self.word = ""  # an operator's, for the maintenance
        self._tell = tell
        self._triggers = triggers.Triggers(
            self.timer,
            ErrorBackoff(settings.error_backoff_s),
            triggers.Patience(settings.error_grace_s, settings.fresh_runtime_deadline_s),
        )
        self._deadlines = Deadlines(
            settings.busy_ack_deadline_s, settings.drain_deadline_s, settings.fresh_runtime_deadline_s
        )
        self._instance = ""  # the runtime seen last
        self._owner_of_instance = ""  # the owner whose weights it holds
        self._warming = ""
        self._in_flight = 0
        self._said: tuple[str, ...] = ()  # what is wrong with the runtime, in its probe's words
        self._settling = False

    @property
    def moving(self) -> bool:
        """Whether a recycle is under way."""
        return self.state in MOVING

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the node is not available; empty when it is."""
        if self.state is State.AVAILABLE:
            return ()
        reasons = self.readiness.reasons or (() if self.moving else ("settling",))
        return (*reasons, "given-up") if self.endurance.given_up else reasons

    # ---- wishes, and what became of commands ----

    def request_recycle(self, now: float, reason: str, drain_s: float | None = None, word: str = "") -> RecycleRecord:
        """Starts a recycle that somebody asks for, or joins the one under way; all counts begin anew."""
        self.endurance.begin_anew()
        if not self.moving or self.recycle is None:
            self._begin(now, Event.RECYCLE, reason, drain_s, word)
        else:
            self._tell(Happening("joined", reason, word=word))
        assert self.recycle is not None  # noqa: S101 (set by every way into a moving state)
        return self.recycle

    def set_maintenance(self, now: float, *, on: bool, reason: str = triggers.MAINTENANCE, word: str = "") -> None:
        """Withdraws the node until switched off again, for an operator or for an exchange of its bundle."""
        if on == self.memory.maintenance:
            return
        self.memory = replace(self.memory, maintenance=on)
        self.word = word if on else ""
        self._tell(Happening("maintenance", "on" if on else "off", before=reason, word=word))
        if on:
            self._begin(now, Event.MAINTENANCE_ON, reason, None)
        else:
            self._apply(now, Event.MAINTENANCE_OFF, triggers.ASSET if reason == triggers.ASSET else triggers.OPERATOR)

    def told(self, now: float, *, heard: bool) -> None:
        """What became of `Tell`."""
        if self.procedure is not None:
            self.procedure.told(now, heard=heard)

    def warmed(self, instance: str, *, done: bool) -> None:
        """What became of `Warm`."""
        self._warming = ""
        if done:
            self.memory = replace(self.memory, warmed_instance=instance)

    def owner_asked(self, *, heard: bool) -> None:
        """What became of `EndOwner`; where the owner has not heard, the next recycle for an error asks again."""
        if heard:
            self.endurance.owner_asked()
            self._tell(Happening("owner", "asked-to-end", more=self.readiness.reasons))

    # ---- the look ----

    def look(self, now: float, facts: Facts) -> list[Command]:
        """One look at the facts, and what has to be done.

        The state changes once at most, so that everybody sees each: where it did, look again at once.
        """
        commands: list[Command] = []
        self._in_flight = facts.in_flight or (0 if facts.cloudboard else self._in_flight)
        self._notice(now, facts)
        self.readiness = assess(facts, self.memory)
        self._warm_if_needed(facts, commands)
        if self.procedure is not None:
            self._go_on(now, facts, self.procedure, commands)
        else:
            self._decide(now, facts, commands)
        self._settling = self.state is not State.AVAILABLE and self.readiness.ready
        excused = self.memory.maintenance
        if self.endurance.watch(now, available=self.state is State.AVAILABLE, excused=excused):
            self._tell(Happening("given-up", "away-too-long", more=self.readiness.reasons))
        return commands

    def _decide(self, now: float, facts: Facts, commands: list[Command]) -> None:
        self._triggers.notice(facts)
        wanted = self._triggers.wanted(self.state, now - self.since, facts, self.memory, now)
        steady = self.endurance.steady(now, ready=self.readiness.ready)
        if wanted is not None and self._may(wanted, commands):
            self._triggers.began(now, wanted, facts)
            self._begin(now, Event.RECYCLE, wanted, None)
        elif self.readiness.ready:
            if steady:
                self._apply(now, Event.READY, "ready")
            elif not self._settling:
                self._tell(Happening("settling", "hold", seconds=self.endurance.hold_s))
        elif self.memory.maintenance and self.readiness.fresh:
            self._apply(now, Event.RESTED, "maintenance")
        elif self.state is State.RECYCLING and now - self.since >= self._deadlines.fresh_s:
            self.memory = replace(self.memory, overdue=True)
            self._triggers.failed(now)
            self._apply(now, Event.OVERDUE, "fresh-runtime-deadline")
        elif self.readiness.broken:
            self._apply(now, Event.BROKEN, self.readiness.broken)
        else:
            self._apply(now, Event.LOST, self.readiness.reasons[0])

    def _may(self, reason: str, commands: list[Command]) -> bool:
        """Whether a recycle for this reason may begin; where too many have, takes the next step of the ladder."""
        if reason != triggers.ERROR:
            return True
        if self.endurance.given_up:
            return False
        if self.endurance.exhausted():
            if self.endurance.climb() == "give-up":
                self._tell(Happening("given-up", "recycles-in-vain", more=self.readiness.reasons))
                return False
            commands.append(EndOwner())
        self.endurance.tried()
        return True

    def _go_on(self, now: float, facts: Facts, procedure: Procedure, commands: list[Command]) -> None:
        tell = procedure.advance(now, facts)
        if procedure.stale is not None:
            self.memory = replace(self.memory, stale_instance=procedure.stale or None)
        if tell is not None:
            commands.append(tell)
        if procedure.phase is Phase.DONE:
            self.procedure = None
            if procedure.record.cut:
                self._tell(Happening("cut", "deadline", count=procedure.record.cut))
            self._apply(now, Event.DRAINED, procedure.record.reason)

    def _notice(self, now: float, facts: Facts) -> None:
        """Learns who the runtime is and whose weights it holds."""
        runtime, owner = facts.runtime, facts.owner
        if runtime is None or not runtime.instance_id:
            return
        if runtime.instance_id != self._instance:
            self._tell(Happening("runtime", "seen", self._instance, runtime.instance_id))
            self._instance = runtime.instance_id
            self._owner_of_instance = ""
            self.timer.start(now, runtime.uptime_s)
            self.memory = replace(self.memory, owner_changed=False)
        said = tuple(code for code in runtime.why if code not in _ON_ITS_WAY)
        if said != self._said:
            self._said = said
            if said:
                code = "in-error" if runtime.in_error else "starting"
                self._tell(Happening("runtime", code, after=runtime.instance_id, more=said))
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
            if changed != self.memory.owner_changed:
                self.memory = replace(self.memory, owner_changed=changed)

    def _warm_if_needed(self, facts: Facts, commands: list[Command]) -> None:
        runtime = facts.runtime
        if runtime is None or not self.readiness.fresh or self.state is State.DRAINING or self._warming:
            return
        if runtime.instance_id != self.memory.warmed_instance:
            self._warming = runtime.instance_id
            commands.append(Warm(runtime.instance_id))

    def _begin(self, now: float, event: Event, reason: str, drain_s: float | None, word: str = "") -> None:
        """Starts a recycle where the state allows one."""
        if Action.RECYCLE not in step(self.state, event)[1]:
            return
        drain = self._deadlines.drain_s if drain_s is None else drain_s
        self.recycle = RecycleRecord(reason, now, self._instance, word=word)
        self.recycles[reason] = self.recycles.get(reason, 0) + 1
        self.memory = replace(self.memory, overdue=False)
        more = self.readiness.reasons
        self._tell(Happening("recycle", reason, before=self._instance, more=more, word=word, seconds=drain))
        self._apply(now, event, reason)
        self.procedure = Procedure(self.recycle, drain, self._deadlines)

    def _apply(self, now: float, event: Event, reason: str) -> None:
        """Puts one event through the table."""
        before, (after, _) = self.state, step(self.state, event)
        if after is before:
            return
        self.state, self.since = after, now
        if after is State.AVAILABLE:
            self.endurance.available(now)
        elif before is State.AVAILABLE:
            if after is State.ERROR:
                self.endurance.lost(now)
            else:
                self.endurance.withdrawn()
        if before in MOVING and after not in MOVING:
            self._finish(now, after, reason)
        more = () if after is State.AVAILABLE else self.readiness.reasons
        lost = self._in_flight if before is State.AVAILABLE and after is State.ERROR else 0
        self._tell(Happening("state", reason, before.name.lower(), after.name.lower(), more, count=lost))

    def _finish(self, now: float, after: State, reason: str) -> None:
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
        code, took = recycle.error or "ok", now - recycle.began
        self._tell(Happening("recycled", code, recycle.old_instance, recycle.new_instance, seconds=took))
