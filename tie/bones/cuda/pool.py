"""The KV pool in the device's memory."""

import threading

import torch
from torch import Tensor

from tie.bones.config import ModelConfig
from tie.bones.cuda.numbers import Inputs
from tie.bones.errors import InputError


class DevicePool:
    """The blocks of keys and values of all sequences, zeroed at the start.

    They lie as `tie.bones.attention.KvPool` has them, `[block][layer][K, V][kv head][token][dim]`, so that a block is
    one run of bytes. There is one more block than is asked for: `scratch`, which padding writes to and nobody reads.

    Args:
        config: of the model.
        num_blocks: blocks that sequences may have.
        block_tokens: tokens that one block holds.
        dtype: of keys and values.
        device: where.

    Raises:
        InputError: there is not a block, or a block has no token.
    """

    def __init__(
        self, config: ModelConfig, *, num_blocks: int, block_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        if num_blocks < 1 or block_tokens < 1:
            raise InputError("the KV pool needs at least one block of at least one token")
        self.num_blocks = self.scratch = num_blocks
        self.block_tokens = block_tokens
        self._heads = (2, config.num_kv_heads)
        shape = (num_blocks + 1, config.num_layers, *self._heads, block_tokens, config.head_dim)
        self._data = torch.zeros(shape, dtype=dtype, device=device)
        self._bytes = self._data.view(num_blocks + 1, -1).view(torch.uint8)
        self.block_bytes = self._bytes.shape[1]
        self.layers = self._data.unbind(1)
        """Of each layer `[blocks, 2, kv_heads, block_tokens, head_dim]`: keys, values."""
        # Blocks pass through host memory that the device reaches itself: a copy from or to any other is staged by the
        # driver, in smaller pieces. One serves all, for the bus is one as well.
        self._staging = torch.empty(self.block_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._lock = threading.Lock()

    def read_block(self, block: int, target: memoryview) -> None:
        """Copies a block out, after all that was asked of the device before; any thread may.

        Raises:
            InputError: no such block.
        """
        self._check(block)
        with self._lock:
            self._staging.copy_(self._bytes[block])
            target[:] = self._staging.numpy().data

    def write_block(self, block: int, source: memoryview) -> None:
        """Copies a block in, before all that is asked of the device after; any thread may.

        Raises:
            InputError: no such block.
        """
        self._check(block)
        with self._lock:
            self._staging.numpy().data[:] = source
            self._bytes[block].copy_(self._staging)

    def copy(self, source: int, target: int) -> None:
        """Copies all that a block holds into another."""
        self._data[target].copy_(self._data[source])

    def file(self, layer: int, where: Inputs, fresh: Tensor) -> None:
        """Puts the keys and values of a pass's rows where they belong.

        Args:
            layer: its number.
            where: the pass.
            fresh: `[rows, 2 * kv_heads, head_dim]`: keys, values.
        """
        self.layers[layer][where.blocks, :, :, where.places] = fresh.view(len(fresh), *self._heads, -1)

    def _check(self, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise InputError("a block is outside the pool")
