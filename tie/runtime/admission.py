"""Who gets blocks, and who loses them for it: rules 4, 5 and 6 of the scheduler. Pure."""

from collections.abc import Sequence as Several
from dataclasses import dataclass

from tie.runtime.queues import OVERTAKES, Fit, Queues
from tie.runtime.residency import Copy, Residency, favour
from tie.runtime.sequence import Phase, Priority, Sequence

BATCH_SHARE = 8
LONG_PROMPTS = 2


@dataclass(frozen=True, slots=True)
class Limits:
    """The scheduler's bounds.

    Attributes:
        step_tokens: tokens computed in one step, at least `max_running + 1`, so that every decode fits.
        max_running: sequences that hold blocks, canaries aside.
        max_waiting: sequences that may exist beyond those, canaries aside; more are refused as "busy".
    """

    step_tokens: int
    max_running: int
    max_waiting: int

    def __post_init__(self) -> None:
        if self.max_running < 1 or self.max_waiting < 0 or self.step_tokens <= self.max_running:
            raise ValueError("step_tokens must exceed max_running, which must be positive")


class Admission:
    """Moves sequences between the queues and the running.

    Args:
        limits: the scheduler's.
        queues: who waits.
        residency: who runs.
    """

    def __init__(self, limits: Limits, queues: Queues, residency: Residency) -> None:
        self._limits = limits
        self._queues = queues
        self._residency = residency
        self._fit = Fit(blocked=self._blocked, fits=self._fits, short=self._short)
        self._since_batch = 0  # interactive admissions since the last batch one by right, while batch wanted one
        self._evicted: list[Sequence] = []
        self._copies: list[Copy] = []
        self._long: dict[Priority, int] = {}

    def update(self) -> tuple[list[Sequence], list[Copy]]:
        """Grows and admits for one step.

        Returns:
            Those who lost their blocks, and the blocks to copy.
        """
        self._evicted, self._copies = [], []
        for sequence in sorted(self._residency.running, key=favour):
            while sequence.phase is Phase.RUNNING and not self._residency.grow(sequence, sequence.length):
                self._evict(self._residency.running)
        self._long = dict.fromkeys(Priority, 0)
        for sequence in self._residency.running:
            self._count_long(sequence)
        while (admitted := self._next()) is not None:
            self._queues.remove(admitted)
            self._copies += self._residency.admit(admitted)
            self._count_long(admitted)
        return self._evicted, self._copies

    def _next(self) -> Sequence | None:
        """Whom to admit now; makes room for it."""
        canary = self._queues.first(Priority.CANARY, self._fit)
        if canary and not any(entry.priority is Priority.CANARY for entry in self._residency.running):
            while not self._fits(canary) and self._residency.running:
                self._evict(self._residency.running)
            return canary if self._fits(canary) else None  # else exports hold the blocks, for a moment
        # Who has just lost blocks does not get them back in the same step, nor does anybody else of its rank.
        if any(not entry.guest for entry in self._evicted):
            return None
        interactive = self._queues.first(Priority.INTERACTIVE, self._fit)
        batch = self._queues.first(Priority.BATCH, self._fit) if not self._evicted else None
        if self._batch_is_due():
            right = self._by_right(batch)
            if right and right.phase is Phase.WAITING:
                return right
            if not right and batch and batch.overtaken >= OVERTAKES:
                interactive = None  # it has waited long enough for its blocks: nobody else takes any
        if interactive:
            return self._interactive(interactive, batch)
        return self._as_guest(batch) if batch else None

    # --- batch by right, or as a guest ---

    def _batch_is_due(self) -> bool:
        by_right = sum(entry.priority is Priority.BATCH and not entry.guest for entry in self._residency.running)
        return self._since_batch >= BATCH_SHARE - 1 and by_right < max(1, self._limits.max_running // 4)

    def _by_right(self, waiting: Sequence | None) -> Sequence | None:
        """Gives a batch sequence, the oldest, the right to run: a guest, or one that waits and can be admitted."""
        guests = self._guests()
        if guests and (waiting is None or guests[0].order < waiting.order):
            chosen = guests[0]
        elif waiting and self._make_room(waiting):
            chosen = waiting
        else:
            return None
        chosen.guest = False
        self._since_batch = 0
        return chosen

    def _as_guest(self, first: Sequence) -> Sequence | None:
        batch = sum(entry.priority is Priority.BATCH for entry in self._residency.running)
        most = self._limits.max_running - self._limits.max_running // 4
        if not self._has_place() or batch >= most:
            return None
        chosen = first if self._fits(first) else self._queues.overtaker(first, self._fit)
        if chosen:
            chosen.guest = True
        return chosen

    def _guests(self) -> list[Sequence]:
        return [entry for entry in self._residency.running if entry.guest]

    # --- interactive ---

    def _interactive(self, first: Sequence, batch: Sequence | None) -> Sequence | None:
        wanted = bool(batch or self._guests() or self._evicted)  # by batch, too
        if self._make_room(first):
            chosen: Sequence | None = first
        else:
            chosen = self._queues.overtaker(first, self._fit) if self._has_place() else None
        if chosen and wanted:
            if batch and self._batch_is_due():
                batch.overtaken += 1
            self._since_batch += 1
        return chosen

    def _make_room(self, sequence: Sequence) -> bool:
        """Evicts guests, the youngest first, where that gives the sequence a place and blocks; whether it has both."""
        guests = self._guests()
        missing = self._residency.blocks_needed(sequence) - self._residency.pool.free
        if sum(len(entry.blocks) for entry in guests) >= missing:
            while guests and not (self._has_place() and self._fits(sequence)):
                guests.remove(self._evict(guests))
        return self._has_place() and self._fits(sequence)

    # --- room ---

    def _evict(self, among: Several[Sequence]) -> Sequence:
        victim = max(among, key=favour)
        self._residency.evict(victim)
        self._queues.add(victim)
        self._evicted.append(victim)
        return victim

    def _has_place(self) -> bool:
        return len(self._residency) < self._limits.max_running

    def _fits(self, sequence: Sequence) -> bool:
        return self._residency.blocks_needed(sequence) <= self._residency.pool.free

    def _short(self, sequence: Sequence) -> bool:
        cached = len(sequence.prefix) * self._residency.pool.block_tokens
        return sequence.length - cached <= self._limits.step_tokens

    def _blocked(self, sequence: Sequence) -> bool:
        if sequence.awaits_images or self._residency.waits_for_sibling(sequence):
            return True
        crowded = not self._short(sequence) and self._long.get(sequence.priority, 0) >= LONG_PROMPTS
        return crowded and self._residency.donor(sequence) is None

    def _count_long(self, sequence: Sequence) -> None:
        if sequence.remaining > 1 and not self._short(sequence):
            self._long[sequence.priority] += 1
