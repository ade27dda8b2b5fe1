"""The arena: views that share memory with a mapping, and tables from another process that lie."""

import contextlib
import gc
import mmap
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tie.bones.arena import WIDTHS, TensorEntry, tensor_views
from tie.bones.errors import ArenaError

SIZE = 4096


@contextlib.contextmanager
def _mapping(content: bytes, access: int = mmap.ACCESS_READ) -> Iterator[mmap.mmap]:
    descriptor = os.memfd_create("arena")
    try:
        os.write(descriptor, content)
        yield mmap.mmap(descriptor, len(content), access=access)
    finally:
        os.close(descriptor)


def _entry(**changes) -> TensorEntry:
    return TensorEntry(**({"name": "w", "dtype": "f32", "shape": (2, 3), "offset": 64, "bytes": 24} | changes))


def test_views_read_the_mapping_without_a_warning():
    values = torch.arange(12, dtype=torch.float32)
    half = torch.tensor([1.5, -2.0]).bfloat16()
    content = bytes(64) + values.numpy().tobytes() + bytes(16) + half.view(torch.uint8).numpy().tobytes()
    with _mapping(content.ljust(SIZE, b"\0")) as buffer, warnings.catch_warnings():
        warnings.simplefilter("error")
        views = tensor_views(
            buffer,
            [
                _entry(shape=(3, 4), bytes=48),
                _entry(name="half", dtype="bf16", shape=(2,), offset=128, bytes=4),
                _entry(name="raw", dtype="u8", shape=(SIZE,), offset=0, bytes=SIZE),
            ],
        )
    assert torch.equal(views["w"], values.view(3, 4))
    assert torch.equal(views["half"], half)
    assert views["raw"].numpy().tobytes() == content.ljust(SIZE, b"\0")


def test_views_share_memory_with_the_mapping():
    with _mapping(bytes(SIZE), mmap.ACCESS_WRITE) as buffer:
        view = tensor_views(memoryview(buffer), [_entry(dtype="u8", shape=(24,))])["w"]
        assert view[3] == 0
        buffer[64 + 3] = 7
        assert view[3] == 7


def test_views_keep_the_mapping_alive():
    with _mapping(bytes(64) + b"\x01" * (SIZE - 64)) as buffer:
        view = tensor_views(buffer, [_entry(dtype="u8", shape=(24,))])["w"]
        with pytest.raises(BufferError):
            buffer.close()
        del buffer
    gc.collect()
    assert view.sum() == 24


def test_writing_through_a_view_of_a_read_only_mapping_is_stopped_by_the_kernel():
    program = """
import mmap, os, resource
from tie.bones.arena import TensorEntry, tensor_views
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
descriptor = os.memfd_create("arena")
os.ftruncate(descriptor, 4096)
view = tensor_views(mmap.mmap(descriptor, 4096, access=mmap.ACCESS_READ), [TensorEntry("w", "u8", (8,), 0, 8)])["w"]
view.fill_(1)
"""
    ended = subprocess.run([sys.executable, "-c", program], check=False, timeout=120, capture_output=True)
    assert ended.returncode == -signal.SIGSEGV


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "f64"}, "dtype"),
        ({"dtype": ""}, "dtype"),
        ({"shape": (2, 0), "bytes": 0}, "shape"),
        ({"shape": (-2, -3)}, "shape"),
        ({"shape": (1,) * 9, "bytes": 4}, "shape"),
        ({"bytes": 23}, "length"),
        ({"shape": (2, 4)}, "length"),
        ({"shape": (1 << 63, 1 << 63), "bytes": 0}, "length"),
        ({"offset": 32}, "aligned"),
        ({"offset": -64}, "aligned"),
        ({"offset": SIZE}, "beyond"),
        ({"offset": SIZE - 64, "shape": (17,), "bytes": 68}, "beyond"),
        ({"offset": 1 << 70}, "beyond"),
        ({"shape": (1 << 62,), "bytes": 1 << 64}, "beyond"),
    ],
)
def test_refuses_an_entry(change, message):
    with _mapping(bytes(SIZE)) as buffer, pytest.raises(ArenaError, match=message):
        tensor_views(buffer, [_entry(**change)])


def test_refuses_a_name_given_twice():
    with _mapping(bytes(SIZE)) as buffer, pytest.raises(ArenaError, match="twice"):
        tensor_views(buffer, [_entry(), _entry(offset=128)])


def test_refuses_an_arena_that_is_empty_or_misaligned_or_has_gaps():
    with _mapping(bytes(SIZE)) as buffer:
        for view in (memoryview(buffer)[:0], memoryview(buffer)[::2], memoryview(buffer)[8:]):
            with pytest.raises(ArenaError, match="arena"):
                tensor_views(view, [])


_INTEGER = st.integers(-(1 << 70), 1 << 70) | st.integers(0, SIZE)


@given(
    st.lists(
        st.builds(
            TensorEntry,
            name=st.sampled_from("abcd"),
            dtype=st.sampled_from([*WIDTHS, "f64"]),
            shape=st.lists(st.integers(0, 8) | _INTEGER, max_size=4).map(tuple),
            offset=st.integers(0, SIZE // 64).map(lambda unit: unit * 64) | _INTEGER,
            bytes=st.integers(0, 64) | _INTEGER,
        ),
        max_size=4,
    )
)
def test_any_table_gives_views_within_the_arena_or_its_error(entries):
    with _mapping(bytes(SIZE)) as buffer:
        start = tensor_views(buffer, [TensorEntry("all", "u8", (SIZE,), 0, SIZE)])["all"].data_ptr()
        try:
            views = tensor_views(buffer, entries)
        except ArenaError:
            return
        for entry in entries:
            view = views[entry.name]
            assert view.shape == entry.shape
            assert view.data_ptr() == start + entry.offset
            assert entry.offset + view.nbytes <= SIZE
