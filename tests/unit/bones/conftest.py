"""A tiny model with random weights, enough to run the executor."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tie.bones.config import ModelConfig
from tie.bones.executor import Executor
from tie.bones.llama import tensor_shapes

TINY = {
    "kind": "llama",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 6,
    "vocab_size": 50,
    "context_tokens": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="session")
def tiny_fields() -> dict[str, Any]:
    return dict(TINY)


@pytest.fixture(scope="session")
def tiny_config() -> ModelConfig:
    return ModelConfig(**TINY)


@pytest.fixture(scope="session")
def tiny_tensors(tiny_config: ModelConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in tensor_shapes(tiny_config).items()}


@pytest.fixture
def make_executor(tiny_config: ModelConfig, tiny_tensors: dict[str, torch.Tensor]) -> Callable[..., Executor]:
    def make(**changes: Any) -> Executor:
        arguments = {"num_blocks": 16, "block_tokens": 4, "dtype": "f32", "threads": 1}
        return Executor(tiny_config, tiny_tensors, **(arguments | changes))

    return make
