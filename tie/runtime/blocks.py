"""The pool of KV blocks: who holds which, and the ledger that proves that none is lost.

A block is `block_tokens` positions of keys and values of all layers. Blocks are referred to by number; the bytes are
the executor's. Reference counts let sequences share blocks (a shared one is read-only: `writable`); a generation
counter per block tells a block from its later namesakes.

A block may be remembered: when its last reference goes it is free like any other, but handed out after all others, the
longest unused first, and until then it can be shared again with what it holds.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


class OutOfBlocksError(Exception):
    """The pool has fewer free blocks than asked for; nothing was taken."""


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """The ledger at one moment, in blocks. `handed_out - returned == used`, always."""

    total: int
    free: int
    used: int
    shared: int
    peak_used: int
    handed_out: int
    returned: int


class BlockPool:
    """Allocates blocks 0 … `total - 1`. Not thread-safe: the step thread owns it.

    Args:
        total: number of blocks, at least 1.
        block_tokens: positions in one block, at least 1.
    """

    def __init__(self, total: int, block_tokens: int) -> None:
        if total < 1 or block_tokens < 1:
            raise ValueError("a pool has at least one block of at least one token")
        self.block_tokens = block_tokens
        self._references = [0] * total
        self._generations = [0] * total
        # Last returned, first handed out: its memory is the warmest.
        self._free = list(range(total - 1, -1, -1))
        self._forget: dict[int, Callable[[], None]] = {}  # of every remembered block
        self._idle: dict[int, None] = {}  # the free ones of them, the longest unused first
        self._shared = 0  # counted as it changes: each step asks, and to go through a large pool takes milliseconds
        self._peak_used = 0
        self._handed_out = 0
        self._returned = 0

    @property
    def total(self) -> int:
        """Blocks in the pool."""
        return len(self._references)

    @property
    def free(self) -> int:
        """Blocks that nobody holds, remembered ones included."""
        return len(self._free) + len(self._idle)

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold `tokens` positions."""
        return -(-tokens // self.block_tokens)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks, each with one reference.

        Raises:
            OutOfBlocksError: fewer are free.
        """
        if count > self.free:
            raise OutOfBlocksError
        blocks = [self._free.pop() if self._free else self._reuse() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
            self._generations[block] += 1
        self._handed_out += count
        self._peak_used = max(self._peak_used, self.total - self.free)
        return blocks

    def _reuse(self) -> int:
        block = next(iter(self._idle))
        del self._idle[block]
        self._forget.pop(block)()
        return block

    def remember(self, block: int, forget: Callable[[], None]) -> None:
        """Keeps a held block findable when it is free; `forget` is called when it is handed out for something else."""
        if self._references[block] == 0:
            raise ValueError("a free block cannot be remembered")
        self._forget[block] = forget

    def in_use(self, block: int) -> bool:
        """Whether anybody holds the block."""
        return self._references[block] > 0

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a reference to each of `blocks`, held or remembered: another sequence reads them too."""
        for block in blocks:
            if self._references[block] == 0:
                if block not in self._idle:
                    raise ValueError("a free block cannot be shared")
                del self._idle[block]
                self._handed_out += 1
            self._references[block] += 1
            self._shared += self._references[block] == 2
        self._peak_used = max(self._peak_used, self.total - self.free)

    def release(self, blocks: Sequence[int]) -> None:
        """Gives up one reference to each of `blocks`; those without any are free again.

        Of remembered ones the last of `blocks` will be reused first: what follows a missing block is of no use.
        """
        idle: list[int] = []
        for block in blocks:
            if self._references[block] == 0:
                raise ValueError("the block is already free")
            self._references[block] -= 1
            self._shared -= self._references[block] == 1
            if self._references[block] == 0:
                (idle if block in self._forget else self._free).append(block)
                self._returned += 1
        self._idle.update(dict.fromkeys(reversed(idle)))

    def writable(self, block: int) -> bool:
        """Whether one sequence alone holds the block."""
        return self._references[block] == 1

    def generation(self, block: int) -> int:
        """How often the block has been handed out."""
        return self._generations[block]

    def statistics(self) -> PoolStatistics:
        """The ledger."""
        return PoolStatistics(
            total=self.total,
            free=self.free,
            used=self.total - self.free,
            shared=self._shared,
            peak_used=self._peak_used,
            handed_out=self._handed_out,
            returned=self._returned,
        )
