"""Shared parts of the oracle tests: block tables scattered over a pool, and the reference's logits."""

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from transformers import PreTrainedModel

from tie.bones.executor import Batch, Executor, SequenceSlice


class Sequences:
    """Block tables of several sequences, drawn at random from one pool, and the slices that go over them."""

    def __init__(self, executor: Executor, seed: int = 0) -> None:
        self.executor = executor
        self._free = list(range(executor.num_blocks))
        random.Random(seed).shuffle(self._free)  # noqa: S311 - no secret
        self._tables: dict[int, list[int]] = {}
        self._filled: dict[int, int] = {}

    def next(self, key: int, tokens: Sequence[int], *, logits: int) -> SequenceSlice:
        """The slice that continues sequence `key` by `tokens`."""
        table, start = self._tables.setdefault(key, []), self._filled.get(key, 0)
        while len(table) * self.executor.block_tokens < start + len(tokens):
            table.append(self._free.pop())
        self._filled[key] = start + len(tokens)
        return SequenceSlice(tokens=tokens, start=start, blocks=list(table), logits=logits)

    def run(self, *slices: SequenceSlice) -> torch.Tensor:
        return self.executor.forward(Batch(slices))


@pytest.fixture(scope="session")
def reference_logits() -> Callable[[PreTrainedModel, Sequence[int]], torch.Tensor]:
    """Logits of every position, by transformers, in one pass without a cache."""

    def logits(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([list(tokens)]), use_cache=False).logits[0].float()

    return logits


@pytest.fixture(scope="session")
def sequences() -> Callable[..., Sequences]:
    return Sequences
