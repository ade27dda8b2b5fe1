"""Who computes what in the next step. Pure: no model, no tensors, no clock; requests in, a batch plan out.

Continuous batching (Yu et al. 2022, "Orca") over paged KV (Kwon et al. 2023, "vLLM"), with chunked prefill (Agrawal et
al. 2024, "Sarathi-Serve"). The rules, in this order:

1. A step computes at most `step_tokens` tokens in at most `max_running` sequences (and one canary). While interactive
   answers are being written, the caller's `pace` may set a lower bound, but not below `LEAST` tokens for the others.
2. Every decoding interactive sequence (and canary) gets its token in every step: nothing stops an answer that somebody
   reads as it is written. Of tokens that a grammar forces it gets more: where prompts are computed, `LEAST`.
3. What is left goes to decoding batch sequences, the least recently served first, and to prompts, in chunks; where
   there are both, the former get up to half. The whole chunk goes to one prompt after the other: interactive before
   batch, but every `BATCH_SHARE`-th turn is batch's; in one turn the oldest first, in the next the shortest. So a short
   prompt is not stuck behind long ones, and none stands still.
4. A waiting sequence is admitted when all its known tokens have blocks, so a prefill never stalls half-way: canary,
   interactive, batch; first come first served inside a class. Exceptions: of prompts longer than a step, only
   `LONG_PROMPTS` of a class are computed at a time, the rest wait without holding blocks; and while the first in a
   queue does not fit, shorter ones may overtake it, `queues.OVERTAKES` times in its life.
5. Every `BATCH_SHARE`-th admission is batch's by right, as long as no more than a quarter of `max_running` run by
   right; where it does not fit, interactive ones pass it `queues.OVERTAKES` times. Other batch sequences are guests:
   admitted where no interactive one waits, to at most three quarters of `max_running`, and evicted (the youngest first)
   when an interactive one lacks a place or blocks.
6. When a decoding sequence needs a block and none is free, the youngest guest, else the youngest of all, loses its
   blocks and is computed anew later (preemption by recomputation).
7. A draft (`tie.runtime.speculation`) is verified where no prompt is being computed, and never takes a block that
   somebody may need in this step.

That nobody starves follows: the oldest sequence that is not a guest is never a victim (6), so it ends; all younger
ones get older, and the first in a queue is passed by few (4), (5). While fewer than a quarter run by right, a batch
sequence gets that right after `BATCH_SHARE` interactive admissions (5), and then takes part in every few steps (3). No
interactive one waits behind guests (5), or for another's prompt to end (2), (3).
"""

import enum
from collections.abc import Callable, Iterator

from tie.runtime.admission import BATCH_SHARE, Admission, Limits
from tie.runtime.blocks import BlockPool
from tie.runtime.plan import Plan, PlannedSlice
from tie.runtime.prefix_cache import PrefixCache
from tie.runtime.queues import Queues
from tie.runtime.residency import Residency, favour
from tie.runtime.sequence import Phase, Priority, Sequence

__all__ = ["Beside", "Limits", "Pace", "Plan", "PlannedSlice", "QueueFullError", "Scheduler"]

LEAST = 4


class Beside(enum.Enum):
    """What else there is to do while interactive answers are being written."""

    INTERACTIVE_PROMPTS = "interactive prompts"  # and perhaps more
    BATCH_PROMPTS = "batch prompts"
    DECODES = "decodes"


Pace = Callable[[int, Beside, int], int]
"""How many tokens a step may compute when so many interactive sequences decode in it, beside something else, and so
many interactive prompts."""


Restore = Callable[[list[Sequence]], None]
"""Goes on with copying the blocks of sequences that have `Sequence.restored`, the most favoured first."""


class QueueFullError(Exception):
    """As many sequences wait as may: the caller answers "busy"."""


class Scheduler:
    """Keeps the queues and the block tables. Not thread-safe: the step thread owns it."""

    def __init__(self, limits: Limits, pool: BlockPool, prefix: PrefixCache | None = None) -> None:
        self.limits = limits
        self.pool = pool
        self._queues = Queues()
        self._residency = Residency(pool, prefix)
        self._admission = Admission(limits, self._queues, self._residency)
        self._arrivals = 0
        self._turn = 0  # steps that computed prompts
        self._steps = 0

    @property
    def running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._residency.running)

    @property
    def waiting(self) -> int:
        """Sequences that wait."""
        return len(self._queues)

    def decoding(self) -> list[Sequence]:
        """Running sequences whose answer is being written, oldest first."""
        return [entry for entry in self._residency.running if entry.decoding]

    def sequences(self) -> Iterator[Sequence]:
        """All unfinished sequences."""
        yield from self._residency.running
        yield from self._queues

    @property
    def room(self) -> int:
        """How many more sequences may be submitted now, canaries aside."""
        present = len(self._residency) + len(self._queues) - self._queues.count(Priority.CANARY)
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
        self._queues.add(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is; its blocks are free. A second time does nothing."""
        if sequence.phase is Phase.RUNNING:
            self._residency.finish(sequence)
        elif sequence.phase is Phase.WAITING:
            self._queues.remove(sequence)
            sequence.phase = Phase.FINISHED

    def expired(self, now: float) -> list[Sequence]:
        """Unfinished sequences whose deadline is not after `now`."""
        return [entry for entry in self.sequences() if entry.deadline is not None and entry.deadline <= now]

    def plan(self, pace: Pace | None = None, restore: Restore | None = None) -> Plan:
        """Decides the next step and takes the blocks that it needs. An empty plan: nothing to compute now.

        Args:
            pace: bounds the step further.
            restore: copies blocks into sequences that wait for it; they are not part of the step before that is done.
        """
        preempted, copies = self._admission.update()
        if restore and (waiting := [entry for entry in self._residency.running if entry.restored]):
            restore(sorted(waiting, key=favour))
        slices = self._slices(pace)
        self._steps += 1
        for part in slices:
            part.sequence.served = self._steps
        return Plan(tuple(slices), tuple(preempted), tuple(copies))

    def computed(self, plan: Plan) -> None:
        """Says that the plan's tokens have keys and values now. Call before new tokens are appended.

        A draft's tokens count when they have been accepted: the caller adds those to `Sequence.computed`.
        """
        for part in plan.slices:
            if part.sequence.phase is Phase.RUNNING:
                part.sequence.computed = part.start + part.known

    def _slices(self, pace: Pace | None) -> list[PlannedSlice]:
        decodes = self.decoding()
        prompts = [
            entry
            for entry in self._residency.running
            if entry.remaining > 0 and not entry.decoding and not entry.restored
        ]
        first = [entry for entry in decodes if entry.priority is not Priority.BATCH]
        budget = self.limits.step_tokens
        if pace is not None and first:
            asking = sum(entry.priority is not Priority.BATCH for entry in prompts)
            budget = min(budget, max(pace(len(first), _beside(prompts), asking), len(first) + LEAST))
        left = budget - len(first)
        batch = sorted((entry for entry in decodes if entry.priority is Priority.BATCH), key=lambda entry: entry.served)
        if prompts:
            batch = batch[: max(left // 2, self._turn % 2)]  # of a single token, every other
        batch = batch[:left]
        left -= len(batch)
        slices = []
        for sequence in first + batch:
            forced = min(left, sequence.remaining - 1, LEAST if prompts else left)
            draft = () if prompts else self._draft(sequence, left - forced)
            slices.append(_part(sequence, 1 + forced, draft))
            left -= forced + len(draft)
        for sequence in self._in_turn(prompts) if prompts else ():
            if left:
                slices.append(_part(sequence, min(left, sequence.remaining)))
                left -= slices[-1].count
        return slices

    def _draft(self, sequence: Sequence, left: int) -> tuple[int, ...]:
        """As much of the sequence's draft as fits the budget, the sequence and the blocks that nobody needs."""
        if not sequence.draft or sequence.remaining != 1:
            return ()
        draft = sequence.draft[: max(0, min(left, sequence.max_length - sequence.length - 1))]
        spare = max(0, self.pool.free - self.running)  # the next step may take one for each
        missing = self.pool.blocks_for(sequence.length + len(draft)) - len(sequence.blocks)
        return draft if missing <= spare and self._residency.grow(sequence, sequence.length + len(draft)) else ()

    def _in_turn(self, prompts: list[Sequence]) -> list[Sequence]:
        turn, self._turn = self._turn, self._turn + 1
        batch_first = turn % BATCH_SHARE == BATCH_SHARE - 1
        oldest_first = (turn + turn // BATCH_SHARE) % 2 == 0

        def rank(sequence: Sequence) -> tuple[int, int, int]:
            batch = sequence.priority is Priority.BATCH
            kind = 0 if sequence.priority is Priority.CANARY else 1 + int(batch != batch_first)
            return kind, (0 if oldest_first else sequence.remaining), sequence.order

        return sorted(prompts, key=rank)


def _beside(prompts: list[Sequence]) -> Beside:
    if not prompts:
        return Beside.DECODES
    batch = all(entry.priority is Priority.BATCH for entry in prompts)
    return Beside.BATCH_PROMPTS if batch else Beside.INTERACTIVE_PROMPTS


def _part(sequence: Sequence, known: int, draft: tuple[int, ...] = ()) -> PlannedSlice:
    logits = 1 + len(draft) if known == sequence.remaining else 0
    return PlannedSlice(sequence, sequence.computed, known + len(draft), logits, draft)
