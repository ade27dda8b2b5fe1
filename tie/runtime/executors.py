"""Makes the executor that fits the weights. None is imported before it is chosen, nor what it alone needs."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tie.bones.arena import byte_views, tensor_views
from tie.bones.config import ModelConfig
from tie.bones.errors import DeviceError
from tie.bones.layouts import CUDA_PREFIX, NATIVE_PREFIX
from tie.daemon.config import RuntimeConfig
from tie.daemon.errors import ConfigError
from tie.runtime import environment
from tie.runtime.owner_client import Weights
from tie.runtime.step_executor import Executor

_DEVICES: Final = Path("/dev")
_INSTALL: Final = {
    "torch-": "install it, or compile the native step: a C++ compiler, then `./run setup`",
    CUDA_PREFIX: "pip install 'tie-inference[cuda]', or choose another runtime.executor",
}


Make = Callable[[RuntimeConfig, ModelConfig, Weights], Executor]


def make_executor(
    runtime: RuntimeConfig, model: ModelConfig, weights: Weights, layout: str, *, ranked: Make | None = None
) -> Executor:
    """An executor over the owner's memory. A model that takes images is PyTorch's, whatever the layout is called.

    Args:
        runtime: what the operator wants of it.
        model: its shape.
        weights: the owner's.
        layout: how they are packed.
        ranked: makes one over several ranks; None: there is one.

    Raises:
        BonesError: the weights are not the model's, or the configuration does not suit it.
        ConfigError: what the executor needs is not here: a package, a GPU, memory on it.
        OSError: the native library cannot be loaded.
    """
    if model.vision and layout.startswith(CUDA_PREFIX):
        hint = "choose another runtime.executor: on a CPU it is seen by PyTorch"
        raise ConfigError("the executor for a GPU does not run models that take images yet", hint=hint)
    if model.vision and ranked:
        raise ConfigError(
            "a model that takes images is on one rank, so far", hint="runtime.tensor_parallel and pipeline_parallel: 1"
        )
    if layout.startswith(NATIVE_PREFIX) and not model.vision:
        return _native(runtime, model, weights)
    kind, make = (CUDA_PREFIX, _cuda) if layout.startswith(CUDA_PREFIX) else ("torch-", ranked or _torch)
    try:
        return make(runtime, model, weights)
    except ModuleNotFoundError as error:
        name = {"torch": "PyTorch", "flashinfer": "flashinfer"}.get(error.name or "")
        if name is None:
            raise
        problem = f"the executor {layout} needs {name}, and {name} is not installed"
        raise ConfigError(problem, hint=_INSTALL[kind]) from None
    except DeviceError as error:
        hint = "`nvidia-smi` says what there is; fewer runtime.kv_tokens take less memory"
        raise ConfigError(f"the executor {layout}: {error}", hint=hint) from error


def require_gpu() -> None:
    """Looks, without loading anything, whether the executor for a GPU can be made, so that an operator is told at once.

    Raises:
        ConfigError: a package or the device is missing.
    """
    for module, name in (("torch", "PyTorch"), ("flashinfer", "flashinfer")):
        if importlib.util.find_spec(module) is None:
            problem = f"runtime.executor is cuda, which needs {name}, and {name} is not installed"
            raise ConfigError(problem, hint=_INSTALL[CUDA_PREFIX])
    # As WSL calls the device, and as everybody else does.
    if not any((_DEVICES / name).exists() for name in ("nvidiactl", "dxg")):
        hint = "`tie doctor` says what there is; under systemd, `tie install --gpu`; or choose another runtime.executor"
        raise ConfigError("runtime.executor is cuda, and there is no NVIDIA GPU here", hint=hint)


def _native(runtime: RuntimeConfig, model: ModelConfig, weights: Weights) -> Executor:
    from tie.bones.native.executor import NativeExecutor

    return NativeExecutor(
        model,
        byte_views(weights.arena, weights.entries),
        num_blocks=block_count(runtime),
        block_tokens=runtime.block_tokens,
        threads=environment.thread_count(runtime),
        adapt=runtime.threads == 0,
        weights=runtime.weights,
    )


def _torch(runtime: RuntimeConfig, model: ModelConfig, weights: Weights) -> Executor:
    from tie.bones.executor import Executor as TorchExecutor

    return TorchExecutor(
        model,
        tensor_views(weights.arena, weights.entries),
        num_blocks=block_count(runtime),
        block_tokens=runtime.block_tokens,
        dtype=runtime.dtype,
        threads=environment.thread_count(runtime),
    )


def _cuda(runtime: RuntimeConfig, model: ModelConfig, weights: Weights) -> Executor:
    from tie.bones.cuda.executor import CudaExecutor

    return CudaExecutor(
        model,
        tensor_views(weights.arena, weights.entries),
        num_blocks=block_count(runtime),
        block_tokens=runtime.block_tokens,
        most_decoding=runtime.max_running,
    )


def block_count(runtime: RuntimeConfig) -> int:
    """Blocks of the KV pool."""
    return max(1, runtime.kv_tokens // runtime.block_tokens)
