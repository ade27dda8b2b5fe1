"""Blocks of keys and values that lie in this process's own memory, so that a view of one is the block itself."""

from abc import ABC, abstractmethod


class HostBlocks(ABC):
    """Copies of whole blocks, for an executor that can show them in place."""

    @abstractmethod
    def block_view(self, block: int) -> memoryview:
        """The bytes of one block, in place and writable.

        Raises:
            InputError: no such block.
        """

    def read_block(self, block: int, target: memoryview) -> None:
        """Copies a block out, into as many bytes as it has. From any thread, while no step writes it.

        Raises:
            InputError: no such block.
        """
        with self.block_view(block) as source:
            target[:] = source

    def write_block(self, block: int, source: memoryview) -> None:
        """Copies a block in, as `read_block` gave it.

        Raises:
            InputError: no such block.
        """
        with self.block_view(block) as target:
            target[:] = source
