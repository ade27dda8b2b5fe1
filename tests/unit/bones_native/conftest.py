"""Random models of every kind, packed for the native step without a bundle, and the reference beside them."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tie.bones.config import ModelConfig
from tie.bones.executor import Executor
from tie.bones.llama import tensor_shapes
from tie.bones.native import library
from tie.bones.native.executor import NativeExecutor
from tie.bones.native.packing import (
    GROUP,
    TILE_ROWS,
    Groups,
    PackedMatrix,
    layout,
    quantize,
    tiles_of_bf16,
    tiles_of_groups,
)

BASE = {
    "kind": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "vocab_size": 99,
    "context_tokens": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}

Tensors = dict[str, np.ndarray]


def make_config(**changes: Any) -> ModelConfig:
    return ModelConfig(**(BASE | changes))


def random_tensors(config: ModelConfig, seed: int = 1) -> Tensors:
    """Weights such that activations keep about the size that they have."""
    random = np.random.default_rng(seed)
    made = {}
    for name, shape in tensor_shapes(config).items():
        values = random.standard_normal(shape, dtype=np.float32)
        made[name] = values / np.sqrt(shape[-1], dtype=np.float32) if len(shape) > 1 else 1 + 0.1 * values
    made["model.embed_tokens.weight"] *= np.sqrt(config.hidden_size, dtype=np.float32)
    return made


def aligned(size: int) -> np.ndarray:
    memory = np.zeros(size + 64, dtype=np.uint8)
    return memory[-memory.ctypes.data % 64 :][:size]


def pack(config: ModelConfig, tensors: Tensors, weights: str) -> tuple[Tensors, Tensors]:
    """The packed tensors, and the values that they stand for, under their own names."""
    packed, meant = {}, {name: values.copy() for name, values in tensors.items()}
    for item in layout(config, weights):
        packed[item.name] = aligned(item.bytes)
        if isinstance(item, PackedMatrix):
            rows, meaning = _rows(item, tensors)
            packed[item.name][:] = rows.reshape(-1)
            start = 0
            for name in item.sources:
                meant[name] = meaning[start : start + len(tensors[name])]
                start += len(tensors[name])
        else:
            values = np.concatenate([tensors[name] for name in item.sources])
            packed[item.name].view(np.float32)[: len(values)] = values
    return packed, meant


def _rows(item: PackedMatrix, tensors: Tensors) -> tuple[np.ndarray, np.ndarray]:
    values = np.concatenate([tensors[name] for name in item.sources])
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % GROUP)))
    known = item.order >= 0
    if item.weights == "bf16":
        rounded = torch.from_numpy(padded).bfloat16()
        words = np.zeros((len(item.order), padded.shape[1]), dtype=np.uint16)
        words[known] = rounded.view(torch.int16).numpy().view(np.uint16)[item.order[known]]
        return tiles_of_bf16(words), rounded.float().numpy()[:, : values.shape[1]]
    groups = quantize(padded, item.weights)

    def ordered(part: np.ndarray) -> np.ndarray:
        whole = np.zeros((len(item.order), *part.shape[1:]), dtype=part.dtype)
        whole[known] = part[item.order[known]]
        return whole

    minima = None if groups.minima is None else ordered(groups.minima)
    tiles = tiles_of_groups(Groups(ordered(groups.codes), ordered(groups.scales), minima))
    assert tiles.shape == (len(item.order) // TILE_ROWS, item.tile_bytes)
    meaning = groups.codes.astype(np.float32) * groups.scales.astype(np.float32)[..., None]
    if groups.minima is not None:
        meaning += groups.minima.astype(np.float32)[..., None]
    return tiles, meaning.reshape(padded.shape)[:, : values.shape[1]]


def make_pair(config: ModelConfig, weights: str, *, level: str, threads: int = 2, seed: int = 1, num_blocks: int = 64):
    """A native executor and the float32 reference on the very values that its weights stand for."""
    packed, meant = pack(config, random_tensors(config, seed), weights)
    native = NativeExecutor(
        config, packed, num_blocks=num_blocks, block_tokens=16, weights=weights, threads=threads, level=level
    )
    tensors = {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in meant.items()}
    reference = Executor(config, tensors, num_blocks=num_blocks, block_tokens=16, dtype="f32", threads=1)
    return native, reference


@pytest.fixture(scope="session")
def models() -> SimpleNamespace:
    """What makes random models."""
    return SimpleNamespace(config=make_config, pair=make_pair, pack=pack, tensors=random_tensors, aligned=aligned)


@pytest.fixture(params=list(library.LEVELS))
def level(request) -> str:
    if request.param not in library.levels():
        pytest.skip(f"{request.param} is not built, or this processor has not its instructions")
    return request.param


@pytest.fixture
def pair(level) -> Callable[..., tuple[NativeExecutor, Executor]]:
    def make(weights: str = "bf16", threads: int = 2, **changes: Any):
        return make_pair(make_config(**changes), weights, level=level, threads=threads)

    return make
