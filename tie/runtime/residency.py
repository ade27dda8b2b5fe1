"""Which sequences hold blocks, and which: admission, growth, sharing between siblings, eviction. Pure, like `blocks`.

Blocks are write-once: a position of a block whose keys and values count as computed is never written again, and a
shared block is always full, so it is never written at all. What a sibling has in its last, partial block is copied
into a block of the fork's own before the fork's first write (copy on write, at the only moment there is for it).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from tie.runtime.blocks import BlockPool
from tie.runtime.prefix_cache import PrefixCache
from tie.runtime.sequence import Phase, Priority, Sequence


@dataclass(frozen=True, slots=True)
class Copy:
    """The whole of block `source` is to be copied into block `target` before anything is computed."""

    source: int
    target: int


class Residency:
    """The running sequences and their block tables.

    Args:
        pool: of the blocks.
        prefix: where blocks of registered system prompts come from.

    Attributes:
        running: in order of arrival.
    """

    def __init__(self, pool: BlockPool, prefix: PrefixCache | None = None) -> None:
        self.pool = pool
        self._prefix = prefix or PrefixCache(pool)
        self.running: list[Sequence] = []
        self._admissions = 0

    def __len__(self) -> int:
        """Running sequences, canaries aside."""
        return sum(entry.priority is not Priority.CANARY for entry in self.running)

    def waits_for_sibling(self, sequence: Sequence) -> bool:
        """Whether a sibling computes right now what this sequence could share in a moment."""
        return bool(
            sequence.family
            and self.donor(sequence) is None
            and any(other.phase is Phase.RUNNING and other.computed < sequence.shareable for other in sequence.family)
        )

    def donor(self, sequence: Sequence) -> Sequence | None:
        """A running sibling that has computed all that `sequence` can share."""
        wanted = sequence.shareable
        for other in sequence.family if wanted else ():
            if other is not sequence and other.phase is Phase.RUNNING and other.computed >= wanted:
                return other
        return None

    def blocks_needed(self, sequence: Sequence) -> int:
        """Free blocks that admitting the sequence takes."""
        if self.donor(sequence):
            shared = sequence.shareable // self.pool.block_tokens
        else:
            shared = self._prefix.in_use(sequence.prefix)
        return self.pool.blocks_for(sequence.length) - shared

    def admit(self, sequence: Sequence) -> tuple[Copy, ...]:
        """Gives a waiting sequence blocks for all its known tokens, as many of them shared as can be.

        Raises:
            OutOfBlocksError: fewer are free than `blocks_needed`.
        """
        copies: tuple[Copy, ...] = ()
        donor, tokens = self.donor(sequence), sequence.shareable
        if donor is None:
            prefix = self._prefix.take(sequence.prefix)
            sequence.blocks = [*prefix, *self.pool.allocate(self.pool.blocks_for(sequence.length) - len(prefix))]
            there = self._prefix.loaded(sequence.prefix)
            sequence.computed = there * self.pool.block_tokens
            if there < len(prefix):
                sequence.restored = max(sequence.restored, len(prefix) * self.pool.block_tokens)
        else:
            whole, rest = divmod(tokens, self.pool.block_tokens)
            own = self.pool.allocate(self.pool.blocks_for(sequence.length) - whole)
            shared = donor.blocks[:whole]
            self.pool.share(shared)
            sequence.blocks = [*shared, *own]
            sequence.computed = tokens
            if rest:
                copies = (Copy(donor.blocks[whole], own[0]),)
        sequence.phase = Phase.RUNNING
        self._admissions += 1
        sequence.residence = self._admissions
        # Arrivals are admitted nearly in order: the place is close to the end.
        place = len(self.running)
        while place and self.running[place - 1].order > sequence.order:
            place -= 1
        self.running.insert(place, sequence)
        return copies

    def grow(self, sequence: Sequence, length: int) -> bool:
        """Extends the block table to cover `length` tokens; false, and nothing done, when too few blocks are free."""
        missing = self.pool.blocks_for(length) - len(sequence.blocks)
        if missing > self.pool.free:
            return False
        if missing > 0:
            sequence.blocks += self.pool.allocate(missing)
        return True

    def evict(self, sequence: Sequence) -> None:
        """Takes a running sequence's blocks; it will be computed anew."""
        self._leave(sequence)
        sequence.phase = Phase.WAITING
        sequence.preemptions += 1

    def finish(self, sequence: Sequence) -> None:
        """Takes a running sequence's blocks, for good."""
        self._leave(sequence)
        sequence.phase = Phase.FINISHED

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = 0

    def victim(self, among: Iterable[Sequence] | None = None) -> Sequence | None:
        """Whom to evict next: the least favoured."""
        return max(self.running if among is None else among, key=favour, default=None)


def favour(sequence: Sequence) -> tuple[int, int]:
    """Sort key: the most favoured first. Canaries, then by arrival; batch sequences that are only guests come last."""
    if sequence.priority is Priority.CANARY:
        return 0, sequence.order
    return (2 if sequence.guest else 1), sequence.order
