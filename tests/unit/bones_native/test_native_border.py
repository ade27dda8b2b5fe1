"""The native executor's border: batches, blocks and weights that are refused, and what stays untouched."""

import ctypes
from pathlib import Path

import numpy as np
import pytest

from tie.bones.batch import Batch, SequenceSlice
from tie.bones.errors import InputError, WeightsError
from tie.bones.native import library
from tie.bones.native.executor import NativeExecutor

pytestmark = pytest.mark.skipif(not library.available(), reason="the native library is not built")


def _slice(tokens=(1, 2, 3), start=0, blocks=(0, 1), logits=1) -> SequenceSlice:
    return SequenceSlice(tokens=tokens, start=start, blocks=blocks, logits=logits)


@pytest.fixture
def make(models):
    def make(weights="bf16", change=None, **arguments):
        config = models.config(context_tokens=64)
        tensors, _ = models.pack(config, models.tensors(config), weights)
        if change:
            change(tensors)
        defaults = {"num_blocks": 16, "block_tokens": 16, "weights": weights, "threads": 2}
        return NativeExecutor(config, tensors, **(defaults | arguments))

    return make


def test_says_what_it_is(make):
    executor = make()
    assert executor.layout_id == "native-bf16"
    assert executor.name == f"native-{library.levels()[0]}"
    assert (executor.vocab_size, executor.num_blocks, executor.block_tokens) == (99, 16, 16)
    # layers * heads * tokens * (keys + values) * dims * 2 bytes
    assert executor.block_bytes == 2 * 2 * 16 * 2 * 16 * 2 == len(executor.block_view(3))


def test_level_by_environment(make, monkeypatch):
    monkeypatch.setenv(library.LEVEL_VARIABLE, "portable")
    assert make().name == "native-portable"


def test_unknown_level(make):
    with pytest.raises(OSError, match="sse9"):
        make(level="sse9")


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        ((), "batch is empty"),
        ((_slice(tokens=()),), "no tokens"),
        ((_slice(tokens=(1, 99)),), "vocabulary"),
        ((_slice(tokens=(-1,)),), "vocabulary"),
        ((_slice(tokens=(1 << 80,)),), "vocabulary|whole numbers"),
        ((_slice(tokens=(1.5,)),), "whole numbers"),
        ((_slice(tokens=("a",)),), "whole numbers"),
        ((_slice(tokens=(1,) * 65, blocks=range(5)),), "context"),
        ((_slice(tokens=(1,), start=64, blocks=range(5)),), "context"),
        ((_slice(start=-1),), "context"),
        ((_slice(start=1 << 62),), "context"),
        ((_slice(start=1 << 80),), "whole numbers"),
        ((_slice(blocks=()),), "cover"),
        ((_slice(tokens=(1,) * 33),), "cover"),
        ((_slice(start=30),), "cover"),
        ((_slice(blocks=(0, 16)),), "pool"),
        ((_slice(blocks=(-1,)),), "pool"),
        ((_slice(blocks=(1 << 40,)),), "pool"),
        ((_slice(logits=4),), "logits"),
        ((_slice(logits=-1),), "logits"),
        ((_slice(), _slice()), "twice"),
        ((_slice(tokens=(1,) * 32, blocks=(2, 2)),), "twice"),
    ],
)
def test_refuses_a_batch_and_changes_nothing(make, slices, message):
    executor = make()
    executor.forward(Batch((_slice((7, 8, 9), 0, (0, 1), 0),)))
    before = [bytes(executor.block_view(block)) for block in range(16)]
    with pytest.raises(InputError, match=message):
        executor.forward(Batch(slices))
    assert [bytes(executor.block_view(block)) for block in range(16)] == before
    executor.forward(Batch((_slice((7,), 3, (0, 1), 1),)))  # and works on


@pytest.mark.parametrize("pair", [(0, 16), (-1, 0), (1 << 40, 0)])
def test_refuses_copies_outside_the_pool(make, pair):
    with pytest.raises(InputError, match="pool"):
        make().forward(Batch((_slice(),), (pair,)))


def test_copied_block_continues_the_sequence(make):
    executor = make()
    expected = executor.forward(Batch((_slice((1, 2, 3, 4), 0, (0,), 1),)))
    copied = executor.forward(Batch((_slice((4,), 3, (9,), 1),), ((0, 9),)))
    assert np.allclose(copied, expected, atol=0.05)
    assert bytes(executor.block_view(9)) == bytes(executor.block_view(0))


def test_block_moved_through_its_bytes_continues_the_sequence(make):
    source, target = make(), make()
    ids = tuple(range(20))
    expected = source.forward(Batch((_slice(ids, 0, (0, 1), 1),)))
    target.block_view(7)[:] = bytes(source.block_view(0))
    moved = target.forward(Batch((_slice(ids[16:], 16, (7, 2), 1),)))
    assert np.allclose(moved, expected, atol=0.05)


def test_reused_block_gives_the_same_as_a_fresh_one(make):
    batch = Batch((_slice((1, 2, 3) * 7, 0, (3, 5), 1),))
    expected = make().forward(batch)
    executor = make()
    for block in range(16):
        executor.block_view(block)[:] = b"\xff" * executor.block_bytes  # not a number
    assert np.array_equal(executor.forward(batch), expected)


def test_touches_only_its_blocks(make):
    executor = make()
    executor.forward(Batch((_slice((1,) * 20, 0, (9, 5), 0),)))
    used = {block for block in range(16) if any(executor.block_view(block))}
    assert used == {9, 5}


def test_sequences_may_share_blocks_that_are_only_read(make):
    executor = make()
    executor.forward(Batch((_slice((1,) * 16, 0, (0,), 0),)))
    both = executor.forward(Batch((_slice((5,), 16, (0, 1), 1), _slice((5,), 16, (0, 2), 1))))
    assert np.allclose(both[0], both[1], atol=1e-6)


def test_a_block_that_another_sequence_writes_may_be_read(make):
    """What is written in a pass is there for all of its readers, as in the reference."""
    executor = make()
    executor.forward(Batch((_slice((1,) * 15, 0, (0,), 0),)))
    batch = Batch((_slice((5,), 16, (0, 2), 1), _slice((1,), 15, (0,), 0)))
    shared = executor.forward(batch)
    alone = executor.forward(Batch((_slice((5,), 16, (0, 3), 1),)))
    assert np.allclose(shared, alone, atol=1e-5)


@pytest.mark.parametrize("block", [-1, 16, 1 << 70])
def test_refuses_to_view_a_block_outside_the_pool(make, block):
    with pytest.raises(InputError, match="pool"):
        make().block_view(block)


@pytest.mark.parametrize(
    "arguments",
    [{"threads": 0}, {"threads": -1}, {"threads": 1 << 20}, {"num_blocks": 0}, {"block_tokens": 4}],
)
def test_refuses_impossible_arguments(make, models, arguments):
    config = models.config()
    tensors, _ = models.pack(config, models.tensors(config), "bf16")
    defaults = {"num_blocks": 16, "block_tokens": 16, "weights": "bf16", "threads": 2}
    with pytest.raises(InputError):
        NativeExecutor(config, tensors, **(defaults | arguments))


@pytest.mark.parametrize(
    "changes", [{"head_dim": 300}, {"num_heads": 66, "num_kv_heads": 1}, {"hidden_size": (1 << 24) + 1}]
)
def test_refuses_shapes_beyond_its_bounds(changes):
    fields = {
        "hidden": 64, "intermediate": 64, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 16, "vocab": 9,
        "context": 9, "eps": 1e-5,
    }  # fmt: skip
    names = {"num_heads": "heads", "num_kv_heads": "kv_heads", "hidden_size": "hidden"}
    shape = library.Shape(**(fields | {names.get(name, name): value for name, value in changes.items()}))
    assert library.load(library.choose()).tie_native_block_bytes(ctypes.byref(shape), ctypes.sizeof(shape)) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("norm"), "missing"),
        (lambda tensors: tensors.update(extra=np.zeros(64, np.uint8)), "1 tensors"),
        (lambda tensors: tensors.update({"layers.1.down": tensors["layers.1.down"][:-64]}), "size"),
        (lambda tensors: tensors.update({"layers.0.qkv": np.tile(tensors["layers.0.qkv"], 2)}), "size"),
        (lambda tensors: tensors.update(norm=tensors["norm"][:-4]), "size"),
        (lambda tensors: tensors.update(norm=np.zeros(65 * 4, np.uint8)[4:]), "alignment"),
        (lambda tensors: tensors.update(embedding=tensors["embedding"][::-1]), "alignment"),
    ],
)
def test_refuses_weights_that_are_not_the_models(make, change, message):
    with pytest.raises(WeightsError, match=message):
        make(change=change)


def test_the_library_refuses_weights_and_pools_by_itself():
    """What Python has seen to already: an engine that lacks anything is never made."""
    native, made = library.load(library.choose()), ctypes.c_void_p()
    shape = library.Shape(64, 64, 1, 2, 1, 16, 9, 9, 0, 1e-5)
    size = native.tie_native_block_bytes(ctypes.byref(shape), ctypes.sizeof(shape))
    memory = np.zeros(size + 128, np.uint8)
    start = memory.ctypes.data + -memory.ctypes.data % 64

    def new(count=14, cache=start, cache_bytes=size):
        none = (library.Tensor * 15)()
        return native.tie_native_new(
            ctypes.byref(shape), ctypes.sizeof(shape), none, count, cache, cache_bytes, 1, 0, ctypes.byref(made)
        )

    for count in (0, 1, 13, 14, 15):
        assert b"the weights have another size" in new(count)
    assert b"pool" in new(cache=start + 2)
    assert b"pool" in new(cache_bytes=size - 1)
    assert b"pool" in new(cache_bytes=0)
    assert b"is missing" in new(cache=None)
    assert not made


def test_a_call_without_an_engine_or_a_batch_is_refused(make):
    native, batch = library.load(library.choose()), library.RawBatch()
    executor = make()
    for engine, size in ((None, ctypes.sizeof(batch)), (executor._engine, 1), (executor._engine, ctypes.sizeof(batch))):
        assert b"is missing" in native.tie_native_step(engine, ctypes.byref(batch), size)


def test_threads_end_with_the_executor(make):
    before = _threads()
    executor = make(threads=5)
    own = _threads() - before
    assert len(own) >= 4
    del executor
    # Whatever else this process started meanwhile may stay.
    assert len(own & _threads()) <= len(own) - 4


@pytest.mark.parametrize(("adapt", "used"), [(True, [3, 2]), (False, [3, 3])])
def test_where_many_are_served_a_core_is_left_to_the_rest_of_the_node(make, monkeypatch, adapt, used):
    executor, seen = make(threads=3, adapt=adapt), []
    monkeypatch.setattr(executor._threads, "record", lambda _sequences, _rows, threads, _: seen.append(threads))
    for streams in (3, 4):
        executor.forward(Batch(tuple(SequenceSlice([5], 0, (block,), 1) for block in range(streams))))
    assert seen == used


def _threads() -> set[str]:
    return {path.name for path in Path("/proc/self/task").iterdir()}


def test_an_array_of_any_integers_serves(make):
    expected = make().forward(Batch((_slice((1, 2, 3), 0, (0, 1), 1),)))
    arrays = _slice(np.array([1, 2, 3], dtype=np.int32), 0, np.array([0, 1], dtype=np.uint16), 1)
    assert np.array_equal(make().forward(Batch((arrays,))), expected)
