"""Packing: values, places, hashes, and what a damaged bundle does."""

import mmap
import os
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from model_owner import plain
from model_owner.loader import pack
from model_owner.plain import round_to_bf16
from model_owner.source import CancelledError
from tie.assets.build import create_bundle, read_source
from tie.assets.bundle import open_bundle
from tie.assets.sample import write_sample_model
from tie.bones.arena import TensorEntry, tensor_views
from tie.daemon.errors import BundleError
from tie.proto import owner_pb2


def _pack(bundle, layout_id, read=None):
    return pack(
        bundle, layout_id, on_read=read.append if read is not None else lambda _: None, cancelled=threading.Event()
    )


def _views(packed) -> dict[str, torch.Tensor]:
    """The tensors as the runtime lays them over the arena."""
    table = owner_pb2.TensorTable.FromString(os.pread(packed.table_descriptor, 1 << 20, 0))
    assert table.SerializeToString(deterministic=True) == packed.table
    (descriptor,) = packed.arena.descriptors()
    view = mmap.mmap(descriptor, packed.arena.size, mmap.MAP_SHARED, mmap.PROT_READ)
    return tensor_views(view, [TensorEntry(t.name, t.dtype, tuple(t.shape), t.offset, t.bytes) for t in table.tensors])


def _original(bundle) -> dict[str, torch.Tensor]:
    values = safetensors.numpy.load_file(bundle.path("model.safetensors"))
    return {name: torch.from_numpy(item.copy()) for name, item in values.items()}


def test_float32_is_the_file(sample):
    read = []
    packed = _pack(sample, "torch-cpu-f32", read)
    views = _views(packed)
    expected = _original(sample)
    assert views.keys() == expected.keys()
    assert all(torch.equal(views[name], item) for name, item in expected.items())
    assert sum(read) == sample.manifest.files["model.safetensors"].bytes
    packed.close()


def test_bfloat16_is_torchs_rounding_and_norms_stay(sample):
    packed = _pack(sample, "torch-cpu-bf16")
    for name, view in _views(packed).items():
        original = _original(sample)[name]
        assert view.dtype == (torch.float32 if name.endswith("norm.weight") else torch.bfloat16)
        assert torch.equal(view, original.to(view.dtype))
    packed.close()


def test_pieces_smaller_than_a_tensor(sample, monkeypatch):
    monkeypatch.setattr(plain, "PIECE_VALUES", 100)
    packed = _pack(sample, "torch-cpu-f32")
    expected = _original(sample)
    assert all(torch.equal(view, expected[name]) for name, view in _views(packed).items())
    packed.close()


def test_same_bundle_gives_the_same_arena(sample):
    first, second = (_pack(sample, "torch-cpu-bf16") for _ in range(2))
    assert first.table == second.table
    contents = [os.pread(packed.arena.descriptors()[0], packed.arena.size, 0) for packed in (first, second)]
    assert contents[0] == contents[1]
    first.close()
    second.close()


@given(arrays.arrays(np.float32, st.integers(1, 50), elements=st.floats(width=32, allow_nan=False)))
def test_rounding(values):
    out = np.empty(values.size, np.uint16)
    round_to_bf16(values, out)
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("file", ["model.safetensors", "tensors.json"])
def test_flipped_byte(own_sample, file):
    data = bytearray((own_sample / file).read_bytes())
    data[-2] ^= 1
    (own_sample / file).write_bytes(data)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(BundleError, match=file.replace(".", r"\.")):
        _pack(open_bundle(own_sample), "torch-cpu-f32")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_file_cut_after_opening(own_sample):
    bundle = open_bundle(own_sample)
    (own_sample / "model.safetensors").write_bytes(b"x")
    with pytest.raises(BundleError):
        _pack(bundle, "torch-cpu-f32")


def test_weights_that_are_not_finite(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    write_sample_model(
        directory, kind="llama", seed=0, layers=1, hidden_size=32, heads=2, kv_heads=1, context_tokens=64, tied=True
    )
    values = safetensors.numpy.load_file(directory / "model.safetensors")
    values["model.norm.weight"][3] = np.nan
    safetensors.numpy.save_file(values, directory / "model.safetensors")
    bundle = create_bundle(read_source(directory), tmp_path / "bundle")
    with pytest.raises(BundleError, match=r"model\.norm\.weight"):
        _pack(bundle, "torch-cpu-bf16")


def test_cancelled(sample):
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(CancelledError):
        pack(sample, "torch-cpu-f32", on_read=lambda _: None, cancelled=cancelled)


def test_a_table_of_another_model(own_sample):
    bundle = open_bundle(own_sample)
    bigger = msgspec.structs.replace(bundle.manifest.architecture, num_layers=3)
    other = type(bundle)(bundle.directory, msgspec.structs.replace(bundle.manifest, architecture=bigger))
    with pytest.raises(BundleError, match="missing"):
        _pack(other, "torch-cpu-f32")
