"""Makes the executor that fits the weights: PyTorch's or the native one. Neither is imported before it is chosen."""

import os
from typing import Any, Protocol

from tie.bones.arena import byte_views, tensor_views
from tie.bones.batch import Batch
from tie.bones.config import ModelConfig
from tie.bones.layouts import NATIVE_PREFIX
from tie.daemon.config import RuntimeConfig
from tie.daemon.errors import ConfigError
from tie.runtime.owner_client import Weights


class Executor(Protocol):
    """What the runtime needs of an executor."""

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

    def block_view(self, block: int) -> memoryview:
        """The bytes of one block, in place and writable."""
        ...

    def forward(self, batch: Batch) -> Any:
        """Float32 logits, an array or a tensor on the CPU, `[sum of the slices' logits, vocab]`."""
        ...


def make_executor(runtime: RuntimeConfig, model: ModelConfig, weights: Weights, layout: str) -> Executor:
    """An executor over the owner's memory.

    Raises:
        BonesError: the weights are not the model's, or the configuration does not suit it.
        ConfigError: PyTorch is needed and not installed.
        OSError: the native library cannot be loaded.
    """
    threads = runtime.threads or len(os.sched_getaffinity(0))
    blocks = max(1, runtime.kv_tokens // runtime.block_tokens)
    if layout.startswith(NATIVE_PREFIX):
        from tie.bones.native.executor import NativeExecutor

        return NativeExecutor(
            model,
            byte_views(weights.arena, weights.entries),
            num_blocks=blocks,
            block_tokens=runtime.block_tokens,
            threads=threads,
            adapt=runtime.threads == 0,
            weights=runtime.weights,
        )
    try:
        from tie.bones.executor import Executor as TorchExecutor
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        hint = "install it, or compile the native step: a C++ compiler, then `./run setup`"
        raise ConfigError(f"the executor {layout} needs PyTorch, and PyTorch is not installed", hint=hint) from None
    return TorchExecutor(
        model,
        tensor_views(weights.arena, weights.entries),
        num_blocks=blocks,
        block_tokens=runtime.block_tokens,
        dtype=runtime.dtype,
        threads=threads,
    )
