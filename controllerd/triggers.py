"""When a recycle is wanted, and why. A recycle is wanted only where it can help.

- The timer: always, once for each runtime.
- The owner is another one than the runtime attached to: the runtime has to attach again.
- The runtime says that it has failed: at once; after the grace where only a canary failed, for the next one may pass.
- A runtime that was to go and did not, or that does not come up: again.
- The hardware is unavailable: once, after the grace; letting go of a GPU is what its reset needs, and twice is no help.
- The hardware's action is a recycle: once for each time it is asked.
  A recycle that is wanted for another of these reasons serves both as well.
- A peer that is merely gone (gpuhealthd, owner, CloudBoard) is no reason: it comes back by itself.

Error recycles keep apart by `ErrorBackoff`.
"""

from dataclasses import dataclass

from controllerd.facts import Facts
from controllerd.gates import Memory
from controllerd.recycle_timer import ErrorBackoff, RecycleTimer
from controllerd.states import State

TIMER, OPERATOR, ERROR, OWNER, ASSET, MAINTENANCE = "timer", "operator", "error", "owner", "asset", "maintenance"
_RESTING = frozenset({State.DRAINING, State.RECYCLING, State.MAINTENANCE})


@dataclass(frozen=True, slots=True)
class Patience:
    """How long an error may last before a recycle is tried.

    Attributes:
        grace_s: for hardware, and for a canary that failed.
        runtime_s: for a runtime that is there and does not become ready.
    """

    grace_s: float
    runtime_s: float


class Triggers:
    """Decides at each look whether a recycle is wanted now."""

    def __init__(self, timer: RecycleTimer, backoff: ErrorBackoff, patience: Patience) -> None:
        self._timer = timer
        self._backoff = backoff
        self._patience = patience
        self._gpu_tried = False
        self._advice_taken = False

    def failed(self, now: float) -> None:
        """A recycle brought no fresh runtime: the next try waits."""
        self._backoff.spend(now)

    def began(self, now: float, reason: str, facts: Facts) -> None:
        """A recycle that was wanted begins: the next one for an error waits, and the hardware has what it asked for."""
        if reason != TIMER:
            self._backoff.spend(now)
        if facts.gpu is not None:
            self._advice_taken |= facts.gpu.advises_recycle
            self._gpu_tried |= not facts.gpu.fit and not facts.gpu.starting

    def notice(self, facts: Facts) -> None:
        """Hardware that is well, or asks for nothing, may ask anew."""
        if facts.gpu is not None:
            self._gpu_tried &= not facts.gpu.fit
            self._advice_taken &= facts.gpu.advises_recycle

    def wanted(self, state: State, state_age_s: float, facts: Facts, memory: Memory, now: float) -> str | None:
        """The reason for a recycle that should start now, or None. Asking changes nothing."""
        # Without the probe nobody can be asked; a runtime that died comes back fresh by itself.
        if state in _RESTING or facts.runtime is None:
            return None
        if self._timer.due(now) and facts.runtime.instance_id != memory.stale_instance:
            return TIMER
        if not self._backoff.allows(now):
            return None
        return self._error(state, state_age_s, facts, memory)

    def _error(self, state: State, state_age_s: float, facts: Facts, memory: Memory) -> str | None:
        runtime, gpu, owner = facts.runtime, facts.gpu, facts.owner
        if memory.owner_changed and owner is not None and owner.state == "ready":
            return OWNER
        if gpu is not None and gpu.advises_recycle and not self._advice_taken:
            return ERROR
        if state is not State.ERROR or runtime is None:
            return None
        patient = state_age_s < self._patience.grace_s
        if runtime.instance_id == memory.stale_instance or (runtime.in_error and not (runtime.may_heal and patient)):
            return ERROR
        if not runtime.ready and state_age_s >= self._patience.runtime_s:
            return ERROR
        unfit = gpu is not None and not gpu.fit and not gpu.starting
        if unfit and not self._gpu_tried and not patient:
            return ERROR
        return None
