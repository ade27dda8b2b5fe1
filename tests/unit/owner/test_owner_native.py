"""Packing for the native step: what the executor computes from an arena is what the file's weights give."""

import mmap
import os
import threading

import msgspec
import numpy as np
import pytest

from model_owner.loader import pack
from model_owner.native import as_stored
from model_owner.source import Source
from tie.assets.sample import make_sample_vision_bundle
from tie.assets.tensors import StoredTensor
from tie.bones.arena import TensorEntry, byte_views, tensor_views
from tie.bones.batch import Batch, SequenceSlice
from tie.bones.config import ModelConfig
from tie.bones.executor import Executor
from tie.bones.native import library
from tie.bones.native.executor import NativeExecutor
from tie.proto import owner_pb2

pytestmark = pytest.mark.skipif(not library.available(), reason="the native library is not built")


def _mapped(bundle, layout_id):
    packed = pack(bundle, layout_id, on_read=lambda _: None, cancelled=threading.Event())
    table = owner_pb2.TensorTable.FromString(os.pread(packed.table_descriptor, 1 << 20, 0))
    arena = mmap.mmap(packed.arena.descriptors()[0], packed.arena.size, mmap.MAP_SHARED, mmap.PROT_READ)
    entries = [TensorEntry(t.name, t.dtype, tuple(t.shape), t.offset, t.bytes) for t in table.tensors]
    packed.close()
    return arena, entries


@pytest.mark.parametrize(("weights", "bound"), [("auto", 0.03), ("bf16", 0.03), ("q8", 0.05), ("q4", 0.5)])
def test_executor_on_the_arena(sample, weights, bound):
    """4 bits lose much of a random model; what is packed wrongly loses all."""
    config = ModelConfig.from_json(msgspec.json.encode(sample.manifest.architecture))
    common = {"num_blocks": 8, "block_tokens": 16, "threads": 1}
    reference = Executor(config, tensor_views(*_mapped(sample, "torch-cpu-f32")), dtype="f32", **common)
    native = NativeExecutor(config, byte_views(*_mapped(sample, f"native-{weights}")), weights=weights, **common)
    batch = Batch((SequenceSlice(tuple(range(1, 41)), 0, (3, 1, 5), 40),))
    expected = np.asarray(reference.forward(batch))
    difference = np.sqrt(np.mean((native.forward(batch) - expected) ** 2)) / expected.std()
    assert difference < bound


@pytest.mark.parametrize(
    ("encodings", "weights"),
    [
        ({"q4_1"}, "q4"),
        ({"q4_0", "q4_1"}, "q4"),
        ({"q8_0"}, "q8"),
        ({"q4_k", "q6_k"}, "q8"),
        ({"q4_0", "q8_0"}, "q8"),
        ({"f16"}, "bf16"),
        ({"q4_1", "f32"}, "bf16"),
    ],
)
def test_matrices_stay_as_they_are_stored(encodings, weights):
    stored = [
        StoredTensor(name=encoding, file="x", encoding=encoding, shape=(16, 256), offset=0, bytes=1)
        for encoding in encodings
    ]
    assert as_stored(Source(stored, {}, threading.Event()))(tuple(encodings)) == weights


def test_same_bundle_gives_the_same_arena(sample):
    first, second = (_mapped(sample, "native-q4") for _ in range(2))
    assert first[1] == second[1]
    assert first[0][:] == second[0][:]


def test_a_model_that_takes_images_is_packed_for_pytorch(tmp_path):
    bundle = make_sample_vision_bundle(tmp_path / "bundle")
    (arena, entries), (other, _) = _mapped(bundle, "native-auto"), _mapped(bundle, "torch-cpu-bf16")
    assert arena[:] == other[:]
    config = ModelConfig.from_json(msgspec.json.encode(bundle.manifest.architecture))
    executor = Executor(config, tensor_views(arena, entries), num_blocks=8, block_tokens=16, dtype="bf16", threads=1)
    assert executor.vision.encode(np.zeros((2, 32, 32, 3), dtype=np.uint8)).shape == (2, 4, 64)
