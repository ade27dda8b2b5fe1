"""Blocks of registered system prompts in the paged KV: the hot, read-through copy of the prefix pool.

The pool, in the model owner's memory, is the source of truth and holds every block of the trie. A block gets into the
paged KV when a sequence first needs it, is shared by reference with all that need it later, and stays there, free,
until the room is needed: the longest unused goes first, and of one prompt the last block first (`blocks`). Which blocks
a prompt may share is decided by the trie alone, which no request can change.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tie.runtime.blocks import BlockPool
from tie.runtime.prefix_trie import PrefixTrie


class Source(Protocol):
    """Where blocks are loaded from."""

    def block(self, number: int) -> memoryview:
        """The bytes of a node's block."""


class BlockMemory(Protocol):
    """What loading needs of an executor."""

    def block_view(self, block: int) -> memoryview:
        """The bytes of one block, in place and writable."""


@dataclass(slots=True)
class Statistics:
    """What came of it so far.

    Attributes:
        hits: sequences that began with blocks of the pool.
        tokens: that were not computed for it.
        loads: blocks copied out of the pool.
        evictions: blocks that lost their place in the paged KV.
    """

    hits: int = 0
    tokens: int = 0
    loads: int = 0
    evictions: int = 0


class PrefixCache:
    """The hot blocks. The step thread's own, save for `open`. Before that nothing matches.

    Args:
        pool: of the paged KV's blocks.

    Attributes:
        pool: of the paged KV's blocks.
        statistics: what came of it so far.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.statistics = Statistics()
        self._opened: tuple[PrefixTrie, Source, BlockMemory] | None = None
        self._hot: dict[int, int] = {}  # node → block

    @property
    def hot(self) -> int:
        """How many blocks of the pool are in the paged KV."""
        return len(self._hot)

    def open(self, trie: PrefixTrie, source: Source, memory: BlockMemory) -> None:
        """From here on prompts match `trie`, and blocks are loaded from `source` into `memory`. Once, on any thread."""
        self._opened = trie, source, memory

    def match(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """Nodes that a prompt begins with; see `PrefixTrie.match`."""
        return self._opened[0].match(prompt) if self._opened else ()

    def in_use(self, nodes: Sequence[int]) -> int:
        """For how many of `nodes` `take` needs no free block: somebody holds them already."""
        return sum(node in self._hot and self.pool.in_use(self._hot[node]) for node in nodes)

    def take(self, nodes: Sequence[int]) -> list[int]:
        """A reference to each node's block, in order. Those that are not in the paged KV are loaded.

        Raises:
            OutOfBlocksError: there is no room for them; the caller has looked at `in_use` first.
        """
        if not nodes or not self._opened:  # and nothing matches before it is
            return []
        _, source, memory = self._opened
        # First the hot ones: to load the others must not push them out.
        self.pool.share(self._hot[node] for node in nodes if node in self._hot)
        blocks = [self._hot[node] if node in self._hot else self._load(node, source, memory) for node in nodes]
        self.statistics.hits += 1
        self.statistics.tokens += len(blocks) * self.pool.block_tokens
        return blocks

    def _load(self, node: int, source: Source, memory: BlockMemory) -> int:
        (block,) = self.pool.allocate(1)
        with source.block(node) as sealed, memory.block_view(block) as target:
            target[:] = sealed
        self._hot[node] = block
        self.pool.remember(block, lambda: self._forget(node))
        self.statistics.loads += 1
        return block

    def _forget(self, node: int) -> None:
        del self._hot[node]
        self.statistics.evictions += 1
