"""Small random models, and work for executors: prompts in chunks beside sequences that decode, and verified guesses.

For tests that run the same work on two executors and compare. They need PyTorch and nothing else of a node.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from tie.bones.batch import Batch, SequenceSlice
from tie.bones.config import ModelConfig
from tie.bones.executor import Executor
from tie.bones.llama import tensor_shapes

BLOCK_TOKENS = 16
VOCABULARY = 199

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_layers": 2,
    "vocab_size": VOCABULARY,
    "context_tokens": 320,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
# Of each kind what the others have not; three query heads to a key head, as SmolLM2 has, two, and one.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"kind": "llama", "num_heads": 6, "num_kv_heads": 2},
    "llama-biases": {"kind": "llama", "num_heads": 4, "num_kv_heads": 4, "attention_bias": True},
    "mistral": {"kind": "mistral", "num_heads": 4, "num_kv_heads": 2, "sliding_window": 37},
    "qwen2": {"kind": "qwen2", "num_heads": 7, "num_kv_heads": 1, "attention_bias": True},
    "qwen3": {"kind": "qwen3", "num_heads": 4, "num_kv_heads": 2, "qk_norm": True, "tie_word_embeddings": False},
}


def small_model(kind: str, head_dim: int) -> ModelConfig:
    return ModelConfig(**(_COMMON | KINDS[kind] | {"head_dim": head_dim}))


def random_weights(config: ModelConfig, dtype: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Of a size that gives logits of an ordinary spread."""
    dice = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in tensor_shapes(config).items():
        matrix = len(shape) > 1
        values = torch.randn(shape, generator=dice) * (2 * shape[-1] ** -0.5 if matrix else 1)
        found[name] = values.bfloat16() if matrix and dtype == "bf16" else values
    return found


def mixed_work(config: ModelConfig, blocks: int, seed: int) -> Iterator[Batch]:
    """Batches of an engine's kind on a pool of `blocks`: sequences come, are computed in chunks, decode, and go.

    What they say is drawn, not chosen from logits, so that two executors get the same whatever they compute.
    """
    dice = np.random.default_rng(seed)
    free = list(dice.permutation(blocks))
    alive: list[tuple[list[int], list[int]]] = []  # tokens not computed yet, in reverse; table
    lengths: list[int] = []
    for step in range(24):
        while len(alive) < 5 and len(free) * BLOCK_TOKENS > 200:
            count = int(dice.choice([1, 3, BLOCK_TOKENS, 47, 90]))
            alive.append((dice.integers(0, VOCABULARY, count).tolist(), []))
            lengths.append(0)
        slices = []
        for index, (waiting, table) in enumerate(alive):
            # Every other step everybody decodes; in the others there are chunks of prompts and guesses among them.
            most = 1 if step % 2 else int(dice.choice([1, 2, 5, 40]))
            chunk = [waiting.pop() for _ in range(min(most, len(waiting)))] or dice.integers(0, VOCABULARY, 1).tolist()
            end = lengths[index] + len(chunk)
            while len(table) * BLOCK_TOKENS < end:
                table.append(int(free.pop()))
            asked = int(dice.integers(0, len(chunk) + 1))
            slices.append(SequenceSlice(chunk, lengths[index], list(table), asked))
            lengths[index] = end
        yield Batch(tuple(slices))
        for index in reversed(range(len(alive))):
            if lengths[index] > 100 or dice.random() < 0.1:
                free.extend(alive.pop(index)[1])
                lengths.pop(index)


def error(found: Any, expected: Any) -> float:
    """‖found - expected‖ / ‖expected‖, rows and all; 0 where there are none."""
    exact = torch.as_tensor(np.asarray(expected)).double()
    difference = torch.as_tensor(np.array(found)).double() - exact
    return float(difference.norm() / exact.norm()) if exact.numel() else 0.0


class Exact:
    """A model in float32 on the reference executor, and what rounding to bfloat16 costs there."""

    def __init__(self, config: ModelConfig, tensors: dict[str, torch.Tensor], blocks: int) -> None:
        common: dict[str, Any] = {"num_blocks": blocks, "block_tokens": BLOCK_TOKENS, "threads": 1}
        exact = {name: tensor.float() for name, tensor in tensors.items()}
        self._exact = Executor(config, exact, dtype="f32", **common)
        self._rounded = Executor(config, tensors, dtype="bf16", **common)
        self._ours: list[float] = []
        self._theirs: list[float] = []

    def check(self, batch: Batch, found: Any) -> None:
        """That `found` is about as near to the exact logits as the reference executor's in bfloat16."""
        expected = self._exact.forward(batch)
        self._ours.append(error(found, expected))
        self._theirs.append(error(self._rounded.forward(batch), expected))
        assert self._ours[-1] < 3 * self._theirs[-1] + 0.02, (self._ours[-1], self._theirs[-1])

    def check_all(self) -> None:
        """The same of all batches together, where chance has less to say."""
        ours, theirs = (sum(errors) / len(errors) for errors in (self._ours, self._theirs))
        assert ours < 1.6 * theirs, (ours, theirs)


def greedy_answers(executor: Any) -> list[list[int]]:
    """Eight prompts, answered token by token in batches that grow and shrink through all sizes of a padded step."""
    tables = [[index * 5 + page for page in range(5)] for index in range(8)]
    said = [[index + 1, 7, 5] for index in range(8)]
    executor.forward(Batch(tuple(SequenceSlice(said[i][:2], 0, tables[i], 0) for i in range(8))))
    for step in range(40):
        who = range(1 + step * 5 % 8)
        slices = [SequenceSlice(said[i][-1:], len(said[i]) - 1, tables[i], 1) for i in who]
        for index, row in zip(who, np.asarray(executor.forward(Batch(tuple(slices)))), strict=True):
            said[index].append(int(row.argmax()))
    return said
