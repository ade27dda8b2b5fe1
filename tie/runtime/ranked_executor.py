"""A model on several ranks as one executor, and one memory of blocks. On a CPU all ranks' KV pools are mapped here."""

import mmap
from collections.abc import Sequence
from typing import Any

from tie.bones.batch import Batch
from tie.bones.blocks import HostBlocks
from tie.bones.errors import InputError
from tie.runtime.kv_blocks import PartMemory
from tie.runtime.step_executor import Executor


class RankMemory(HostBlocks):
    """Another rank's KV pool, mapped."""

    def __init__(self, descriptor: int, block_bytes: int, blocks: int) -> None:
        self.block_bytes = block_bytes
        self._blocks = blocks
        self._map = mmap.mmap(descriptor, block_bytes * blocks)

    def block_view(self, block: int) -> memoryview:
        """See `HostBlocks`."""
        if not 0 <= block < self._blocks:
            raise InputError("a block is outside the pool")
        return memoryview(self._map)[block * self.block_bytes : (block + 1) * self.block_bytes]


class RankedExecutor:
    """A model on several ranks: `tie.runtime.step_executor.Executor`. A block is the ranks' slices in rank order.

    Args:
        own: rank 0's.
        others: the other ranks' KV pools, in their order.

    Attributes:
        parts: of the memory: the ranks', in their order, each with its `block_bytes`.
    """

    vision = None  # models that take images are on one rank

    def __init__(self, own: Any, others: Sequence[RankMemory]) -> None:
        self.layout_id: str = own.layout_id
        self.num_blocks: int = own.num_blocks
        self.block_tokens: int = own.block_tokens
        self.parts: tuple[PartMemory, ...] = (own, *others)
        self.block_bytes: int = sum(part.block_bytes for part in self.parts)
        self._own = own

    def forward(self, batch: Batch) -> Any:
        """See `tie.bones.executor.Executor.forward`; when it returns, all ranks have filed their keys and values."""
        return self._own.forward(batch)

    def read_block(self, block: int, target: memoryview) -> None:
        """Copies a block out, as `HostBlocks` does."""
        start = 0
        for part in self.parts:
            part.read_block(block, target[start : start + part.block_bytes])
            start += part.block_bytes

    def write_block(self, block: int, source: memoryview) -> None:
        """Copies a block in, as `HostBlocks` does."""
        start = 0
        for part in self.parts:
            part.write_block(block, source[start : start + part.block_bytes])
            start += part.block_bytes


def parts_of(executor: Executor) -> Sequence[PartMemory]:
    """The ranks' parts of an executor's memory, in their order; of one that is alone, itself."""
    return executor.parts if isinstance(executor, RankedExecutor) else (executor,)
