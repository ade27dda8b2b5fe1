"""What the runtime needs of whatever executes the model: the seam at which another executor can stand."""

from typing import Any, Protocol

from tie.bones.arena import Bytes
from tie.bones.batch import Batch, Floats
from tie.runtime.kv_blocks import BlockMemory


class Vision(Protocol):
    """Encodes images. One thread uses it, beside the one that calls `Executor.forward`."""

    def encode(self, tiles: Bytes) -> Floats:
        """Vectors of squares: `[n, side, side, 3]` to `[n, tokens, hidden_size]`."""
        ...


class Executor(BlockMemory, Protocol):
    """Executes batches. There are three: `Executor`, `NativeExecutor` and `CudaExecutor` of `tie.bones`.

    All that a step takes of it is `forward`, and of its blocks `read_block` and `write_block`.
    """

    @property
    def vision(self) -> Vision | None:
        """What encodes images; None: the model, or this executor, takes none."""
        ...

    @property
    def layout_id(self) -> str:
        """How it wants the weights; its name in the node's status."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV pool."""
        ...

    @property
    def block_tokens(self) -> int:
        """Tokens that a block holds."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes that a block takes, over all layers."""
        ...

    def forward(self, batch: Batch) -> Any:
        """Float32 logits, an array or a CPU tensor, `[sum of the slices' logits, vocab]`, in the batch's order.

        The next step may overwrite them.
        """
        ...
