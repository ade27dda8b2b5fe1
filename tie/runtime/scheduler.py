"""Who computes what in the next step. Pure: no model, no tensors, no clock; requests in, a batch plan out.

Continuous batching (Yu et al. 2022, "Orca") over paged KV (Kwon et al. 2023, "vLLM"), with chunked prefill (Agrawal et
al. 2024, "Sarathi-Serve"). The rules, in this order:

1. A step computes at most `step_tokens` tokens in at most `max_running` sequences (and one canary).
2. Every decoding sequence gets its token first: no prompt, however long, stops an answer that is being written.
3. What is left of the budget goes to prefills, oldest first, in chunks.
4. A waiting sequence is admitted when all its known tokens have blocks, so a prefill never stalls half-way. Interactive
   before batch, first come first served inside a class; every `BATCH_SHARE`-th admission is batch's, so that neither
   starves.
5. When a decoding sequence needs a block and none is free, the youngest sequence of the lowest class loses its blocks
   and is computed anew later (preemption by recomputation). The oldest of the highest class is never a victim of
   others, so something always finishes.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from tie.runtime.blocks import BlockPool
from tie.runtime.sequence import Phase, Priority, Sequence

BATCH_SHARE = 8


class QueueFullError(Exception):
    """As many sequences wait as may: the caller answers "busy"."""


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


@dataclass(frozen=True, slots=True)
class PlannedSlice:
    """A run of one sequence's tokens to compute.

    Attributes:
        start: tokens already computed.
        count: tokens to compute now.
        logits: rows at the slice's end whose logits are wanted: 0 in the middle of a prefill, else 1.
    """

    sequence: Sequence
    start: int
    count: int
    logits: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: decodes first, then prefills."""

    slices: tuple[PlannedSlice, ...]
    preempted: tuple[Sequence, ...]

    @property
    def tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(part.count for part in self.slices)


class Scheduler:
    """Keeps the queues and the block tables. Not thread-safe: the step thread owns it."""

    def __init__(self, limits: Limits, pool: BlockPool) -> None:
        self.limits = limits
        self.pool = pool
        self._running: list[Sequence] = []  # in order of arrival
        self._waiting: dict[Priority, deque[Sequence]] = {priority: deque() for priority in Priority}
        self._arrivals = 0
        self._admissions = 0

    @property
    def running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences that wait."""
        return sum(map(len, self._waiting.values()))

    def sequences(self) -> Iterator[Sequence]:
        """All unfinished sequences."""
        yield from self._running
        for queue in self._waiting.values():
            yield from queue

    @property
    def room(self) -> int:
        """How many more sequences may be submitted now, canaries aside."""
        present = sum(entry.priority is not Priority.CANARY for entry in self.sequences())
        return self.limits.max_running + self.limits.max_waiting - present

    def submit(self, sequence: Sequence) -> None:
        """Queues a sequence.

        Raises:
            QueueFullError: there is no room (never for a canary).
            ValueError: it could not run even alone; the caller checks lengths first.
        """
        if self.pool.blocks_for(sequence.max_length) > self.pool.total or not sequence.prompt:
            raise ValueError("the sequence does not fit the pool")
        if sequence.priority is not Priority.CANARY and self.room < 1:
            raise QueueFullError
        sequence.order = self._arrivals
        self._arrivals += 1
        self._waiting[sequence.priority].append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is; its blocks are free. A second time does nothing."""
        if sequence.phase is Phase.RUNNING:
            self._running.remove(sequence)
        elif sequence.phase is Phase.WAITING:
            self._waiting[sequence.priority].remove(sequence)
        self._give_up_blocks(sequence)
        sequence.phase = Phase.FINISHED

    def expired(self, now: float) -> list[Sequence]:
        """Unfinished sequences whose deadline is not after `now`."""
        return [entry for entry in self.sequences() if entry.deadline is not None and entry.deadline <= now]

    def plan(self) -> Plan:
        """Decides the next step and takes the blocks that it needs. An empty plan: nothing to do."""
        preempted = self._make_room_for_decodes()
        preempted += self._admit(canaries_only=bool(preempted))
        budget = self.limits.step_tokens
        slices = []
        for sequence in self._running:
            if sequence.remaining == 1:
                slices.append(PlannedSlice(sequence, sequence.computed, 1, 1))
                budget -= 1
        for sequence in sorted(self._running, key=_favour):
            if budget > 0 and sequence.remaining > 1:
                count = min(budget, sequence.remaining)
                slices.append(PlannedSlice(sequence, sequence.computed, count, int(count == sequence.remaining)))
                budget -= count
        return Plan(tuple(slices), tuple(preempted))

    def computed(self, plan: Plan) -> None:
        """Says that the plan's tokens have keys and values now. Call before new tokens are appended."""
        for part in plan.slices:
            if part.sequence.phase is Phase.RUNNING:
                part.sequence.computed = part.start + part.count

    def _make_room_for_decodes(self) -> list[Sequence]:
        """Gives every decoding sequence the block its next position needs, from the most to the least favoured."""
        preempted: list[Sequence] = []
        for sequence in sorted(self._running, key=_favour):
            while sequence.phase is Phase.RUNNING and len(sequence.blocks) < self.pool.blocks_for(sequence.length):
                if self.pool.free:
                    sequence.blocks += self.pool.allocate(1)
                else:
                    preempted.append(self._preempt())
        return preempted

    def _preempt(self) -> Sequence:
        victim = max(self._running, key=_favour)
        self._running.remove(victim)
        self._give_up_blocks(victim)
        victim.phase = Phase.WAITING
        victim.preemptions += 1
        queue = self._waiting[victim.priority]
        queue.insert(sum(entry.order < victim.order for entry in queue), victim)
        return victim

    def _admit(self, *, canaries_only: bool) -> list[Sequence]:
        """Admits what fits. A canary takes blocks from others where none are free: these are returned."""
        preempted: list[Sequence] = []
        while (queue := self._next_queue(canaries_only=canaries_only)) is not None:
            sequence = queue[0]
            needed = self.pool.blocks_for(sequence.length)
            while sequence.priority is Priority.CANARY and needed > self.pool.free and self._running:
                preempted.append(self._preempt())
                canaries_only = True
            if needed > self.pool.free:
                break
            queue.popleft()
            sequence.blocks = self.pool.allocate(needed)
            sequence.phase = Phase.RUNNING
            self._running.append(sequence)
            self._admissions += 1
        self._running.sort(key=lambda entry: entry.order)
        return preempted

    def _next_queue(self, *, canaries_only: bool) -> deque[Sequence] | None:
        """The queue whose head is admitted next, or None when nobody may be."""
        canaries = self._waiting[Priority.CANARY]
        if canaries and not any(entry.priority is Priority.CANARY for entry in self._running):
            return canaries
        admitted = sum(entry.priority is not Priority.CANARY for entry in self._running)
        if canaries_only or admitted >= self.limits.max_running:
            return None
        interactive, batch = self._waiting[Priority.INTERACTIVE], self._waiting[Priority.BATCH]
        if batch and (not interactive or self._admissions % BATCH_SHARE == BATCH_SHARE - 1):
            return batch
        return interactive or None

    def _give_up_blocks(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = 0


def _favour(sequence: Sequence) -> tuple[Priority, int]:
    """Sort key: the most favoured first."""
    return sequence.priority, sequence.order
