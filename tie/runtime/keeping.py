"""Blocks that outlive their sequence for a moment, so that they can be exported. The step thread's own."""

from collections.abc import Callable

from tie.runtime.blocks import BlockPool
from tie.runtime.kv_blocks import Kept
from tie.runtime.sequence import Sequence

Keep = Callable[[Kept | None], None]
"""Takes a finished sequence's blocks, or None where there are none to be had. Called once, and must not block."""
Later = Callable[[Callable[[], None]], None]
"""Has something done on the step thread, between two steps."""


class Keeping:
    """Who holds what after the end.

    Never more than half of the pool: whatever the holders do, the largest half of it is there for those who run.

    Args:
        pool: of the blocks.
        later: how a release, from any thread, gets to the step thread.
    """

    def __init__(self, pool: BlockPool, later: Later) -> None:
        self._pool = pool
        self._later = later
        self._held = 0

    def hold(self, sequence: Sequence) -> Kept | None:
        """References to the blocks of a sequence that are whole and computed. Call it while the sequence has them.

        The last sampled token has no keys and values yet, so its position is never among them.
        """
        whole = min(sequence.computed, sequence.length) // self._pool.block_tokens
        blocks = tuple(sequence.blocks[:whole])
        if not blocks or self._held + len(blocks) > self._pool.total // 2:
            return None
        self._pool.share(blocks)
        self._held += len(blocks)

        def release() -> None:
            self._held -= len(blocks)
            self._pool.release(blocks)

        return Kept(blocks, lambda: self._later(release))
