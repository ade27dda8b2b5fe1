"""Blocks of registered system prompts in the paged KV: the hot, read-through copy of the prefix pool.

The pool, in the model owner's memory, is the source of truth and holds every block of the trie. A block gets a place in
the paged KV when a sequence first needs it, is shared by reference with all that need it later, and stays there, free,
until the room is needed: the longest unused goes first, and of one prompt the last block first (`blocks`). Its bytes
are copied there when there is time for it, once for all that wait for them. Which blocks a prompt may share is decided
by the trie alone, which no request can change.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tie.runtime.blocks import BlockPool
from tie.runtime.kv_blocks import BlockMemory
from tie.runtime.prefix_pool import RankedPool
from tie.runtime.prefix_trie import PrefixTrie


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
    """The hot blocks. The step thread's own, save for `open`; any thread may read `hot` and `statistics`.

    Before it is open nothing matches.

    Args:
        pool: of the paged KV's blocks.

    Attributes:
        pool: of the paged KV's blocks.
        statistics: what came of it so far.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.statistics = Statistics()
        self._opened: tuple[PrefixTrie, RankedPool, BlockMemory] | None = None
        self._places: dict[int, int] = {}  # node → block
        self._loaded: set[int] = set()  # nodes whose bytes are at their place

    @property
    def hot(self) -> int:
        """How many blocks of the pool are in the paged KV."""
        return len(self._loaded)

    def open(self, trie: PrefixTrie, source: RankedPool, memory: BlockMemory) -> None:
        """From here on prompts match `trie`, and blocks are loaded from `source` into `memory`. Once, on any thread."""
        self._opened = trie, source, memory

    def match(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """Nodes that a prompt begins with; see `PrefixTrie.match`."""
        return self._opened[0].match(prompt) if self._opened else ()

    def in_use(self, nodes: Sequence[int]) -> int:
        """For how many of `nodes` `take` needs no free block: somebody holds them already."""
        return sum(node in self._places and self.pool.in_use(self._places[node]) for node in nodes)

    def take(self, nodes: Sequence[int]) -> list[int]:
        """A reference to each node's block, in order. None may be read before it is `loaded`.

        Raises:
            OutOfBlocksError: there is no room for them; the caller has looked at `in_use` first.
        """
        if not nodes or not self._opened:  # and nothing matches before it is
            return []
        # First those that are there: a place for another must not push them out.
        self.pool.share(self._places[node] for node in nodes if node in self._places)
        blocks = [self._places[node] if node in self._places else self._place(node) for node in nodes]
        self.statistics.hits += 1
        self.statistics.tokens += len(blocks) * self.pool.block_tokens
        return blocks

    def loaded(self, nodes: Sequence[int]) -> int:
        """How many of `nodes` can be read: the first that cannot ends the count."""
        return next((count for count, node in enumerate(nodes) if node not in self._loaded), len(nodes))

    def load(self, nodes: Sequence[int], may_go_on: Callable[[], bool]) -> int:
        """Copies the next of `nodes`, which somebody has taken: one at least, and more while `may_go_on`.

        Returns:
            `loaded`, now.
        """
        if not nodes or not self._opened:
            return 0
        _, source, memory = self._opened
        for node in nodes[self.loaded(nodes) :]:
            if node not in self._loaded:
                with source.block(node) as sealed:
                    memory.write_block(self._places[node], sealed)
                self._loaded.add(node)
                self.statistics.loads += 1
                if not may_go_on():
                    break
        return self.loaded(nodes)

    def _place(self, node: int) -> int:
        (block,) = self.pool.allocate(1)
        self._places[node] = block
        self.pool.remember(block, lambda: self._forget(node))
        return block

    def _forget(self, node: int) -> None:
        del self._places[node]
        if node in self._loaded:
            self._loaded.remove(node)
            self.statistics.evictions += 1
