"""Makes the executor that fits the weights: PyTorch's or the native one. Neither is imported before it is chosen."""

import os

from tie.bones.arena import byte_views, tensor_views
from tie.bones.config import ModelConfig
from tie.bones.layouts import NATIVE_PREFIX
from tie.daemon.config import RuntimeConfig
from tie.daemon.errors import ConfigError
from tie.runtime.owner_client import Weights
from tie.runtime.step_executor import Executor


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
