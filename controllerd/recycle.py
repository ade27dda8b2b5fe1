"""One recycle, from "busy" until the old runtime has let go. Pure: the clock and the peers are passed in.

    ANNOUNCING   until CloudBoard acknowledges "busy": no new request is on its way to this node. If CloudBoard is gone,
                 none can come either, and the recycle goes on after its deadline.
    EMPTYING     until what CloudBoard still has in flight here has ended, within the drain deadline: a request whose
                 app has not yet submitted it to the runtime would be refused by a runtime that drains.
    IDENTIFYING  until it is known who is to go: without that, nobody could say later that somebody else came.
    TELLING      until the probe has been told to recycle, with what is left of the deadline; the runtime drains what
                 remains.
    LEAVING      until the old runtime is gone, or another has taken its place, or its time is up.

Each phase ends by its condition or its deadline, and the next begins at once. What follows is waiting for a fresh
runtime, and the state machine's.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from controllerd.facts import Facts, Runtime

_RETRY_S: Final = 0.25
_MARGIN_S: Final = 2.0  # beyond the drain deadline: the runtime cuts what is left, and ends
_LEAST_S: Final = 0.001  # a runtime that is told late still gets a moment to end its streams properly


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long each part may take, in seconds."""

    busy_ack_s: float
    drain_s: float
    fresh_s: float


@dataclass(slots=True)
class RecycleRecord:
    """A recycle and what came of it.

    Attributes:
        reason: "timer", "operator", "error", "owner", "asset" or "maintenance".
        began: on the controller's clock.
        old_instance: the runtime to go; empty when none was ever seen.
        new_instance: the one that took its place; empty until then.
        ended: when, on the same clock; None while under way.
        error: a stable code when it ended without success.
        word: an operator's own, as it was given.
        cut: requests that had not ended when their time was up, as CloudBoard knew them; where CloudBoard was gone, as
            the runtime told.
    """

    reason: str
    began: float
    old_instance: str = ""
    new_instance: str = ""
    ended: float | None = None
    error: str = ""
    word: str = ""
    cut: int = 0

    @property
    def finished(self) -> bool:
        """Whether it has ended, one way or the other."""
        return self.ended is not None

    def elapsed_s(self, now: float) -> float:
        """How long it has taken, or takes already."""
        return (now if self.ended is None else self.ended) - self.began


class Phase(IntEnum):
    """In the order in which they come."""

    ANNOUNCING = 1
    EMPTYING = 2
    IDENTIFYING = 3
    TELLING = 4
    LEAVING = 5
    DONE = 6


@dataclass(frozen=True, slots=True)
class Tell:
    """The probe is to be told now; what came of it goes to `Procedure.told`."""

    reason: str
    drain_s: float


class Procedure:
    """Carries one recycle through its phases.

    Args:
        record: `old_instance` is set here when it was not known before.
        drain_s: what running requests get, in all.
        deadlines: of the phases.

    Attributes:
        phase: where it is.
    """

    def __init__(self, record: RecycleRecord, drain_s: float, deadlines: Deadlines) -> None:
        self.record = record
        self.phase = Phase.ANNOUNCING
        self._drain_s = drain_s
        self._deadlines = deadlines
        self._until = record.began + deadlines.busy_ack_s  # the phase's deadline
        self._drained_by = self._until + drain_s
        self._next_try: float | None = record.began  # None while the probe is being told

    @property
    def stale(self) -> str | None:
        """The runtime that is to go, once it is known."""
        return self.record.old_instance if self.phase >= Phase.TELLING else None

    def advance(self, now: float, facts: Facts) -> Tell | None:
        """Goes as far as it can.

        Returns:
            What has to be done now, if anything.
        """
        if self.phase is Phase.ANNOUNCING and (facts.busy_acknowledged or now >= self._until):
            self._drained_by = now + self._drain_s
            self._enter(Phase.EMPTYING, self._drained_by)
        if self.phase is Phase.EMPTYING and now >= self._until:
            self.record.cut = facts.in_flight
        if self.phase is Phase.EMPTYING and (not facts.cloudboard or facts.in_flight == 0 or now >= self._until):
            self._enter(Phase.IDENTIFYING, now + self._deadlines.fresh_s)
        if self.phase is Phase.IDENTIFYING:
            if not self.record.old_instance and facts.runtime is not None:
                self.record.old_instance = facts.runtime.instance_id
            if self.record.old_instance or now >= self._until:
                self._enter(Phase.TELLING, self._until)
        if self.phase is Phase.TELLING:
            if not self._going(facts.runtime) and now < self._until:
                if self._next_try is None or now < self._next_try:
                    return None
                self._next_try = None
                return Tell(self.record.reason, max(_LEAST_S, self._drained_by - now))
            self._leave(now)
        if self.phase is Phase.LEAVING and not facts.cloudboard and now >= self._drained_by:
            remaining = 0 if facts.runtime is None or self._gone(facts.runtime) else facts.runtime.running
            self.record.cut = max(self.record.cut, remaining)
        if self.phase is Phase.LEAVING and (self._gone(facts.runtime) or now >= self._until):
            self.phase = Phase.DONE
        return None

    def told(self, now: float, *, heard: bool) -> None:
        """Whether the probe has heard what it was told; if not, it is told again."""
        if self.phase is not Phase.TELLING:
            return
        if heard:
            self._leave(now)
        else:
            self._next_try = now + _RETRY_S

    def _enter(self, phase: Phase, until: float) -> None:
        self.phase, self._until = phase, until

    def _leave(self, now: float) -> None:
        self._enter(Phase.LEAVING, max(now, self._drained_by) + _MARGIN_S)

    def _going(self, runtime: Runtime | None) -> bool:
        """Whether the old runtime need not be told: another is there, or it is on its way out."""
        return runtime is not None and (runtime.instance_id != self.record.old_instance or runtime.state == "recycling")

    def _gone(self, runtime: Runtime | None) -> bool:
        return runtime is None or runtime.instance_id != self.record.old_instance
