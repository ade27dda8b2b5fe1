"""The executor on a GPU: flashinfer's kernels and captured graphs against the reference executor on the CPU.

Runs wherever PyTorch finds a GPU and flashinfer is installed; `tests/gpu/check.py` runs it on a bare machine. What is
not about the device is in tests/unit/bones/test_bones_cuda.py, which runs everywhere.
"""

import dataclasses
import importlib.util
import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from executor_workload import (  # noqa: E402 (after the skip)
    BLOCK_TOKENS,
    KINDS,
    VOCABULARY,
    Exact,
    error,
    greedy_answers,
    mixed_work,
    random_weights,
    small_model,
)
from tie.bones.batch import Batch, SequenceSlice  # noqa: E402
from tie.bones.cuda.executor import CudaExecutor  # noqa: E402
from tie.bones.errors import DeviceError, InputError  # noqa: E402
from tie.bones.executor import Executor  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
with_flashinfer = pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="needs flashinfer")

BLOCKS = 60
HEAD_DIM = 64
LONG = 3000  # tokens: enough for a context to be shared among multiprocessors and merged


def on_gpu(config, tensors, **changes):
    arguments = {"num_blocks": BLOCKS, "block_tokens": BLOCK_TOKENS, "dtype": "bf16", "most_decoding": 8}
    return CudaExecutor(config, tensors, **(arguments | changes))


def block(executor, number):
    target = bytearray(executor.block_bytes)
    executor.read_block(number, memoryview(target))
    return bytes(target)


@with_flashinfer
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_flashinfer_is_as_near_to_float32_as_the_reference(kind, graphs):
    """Prompts in chunks, guesses and decoding, mixed and not."""
    config = small_model(kind, HEAD_DIM)
    tensors = random_weights(config, "bf16")
    exact, executor = Exact(config, tensors, BLOCKS), on_gpu(config, tensors, graphs=graphs)
    for batch in mixed_work(config, BLOCKS, seed=1):
        exact.check(batch, executor.forward(batch))
    exact.check_all()


@with_flashinfer
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_long_contexts_are_shared_out_and_merged(kind):
    """Decoding with a graph, without, and with the reference kernel: the same, for every number of sequences."""
    config = dataclasses.replace(small_model(kind, HEAD_DIM), context_tokens=LONG + 16)
    tensors = random_weights(config, "bf16")
    pages = LONG // BLOCK_TOKENS + 2
    shape = {"num_blocks": pages + 40, "most_decoding": 33}
    executors = [
        on_gpu(config, tensors, **shape),
        on_gpu(config, tensors, graphs=False, **shape),
        on_gpu(config, tensors, kernel="reference", graphs=False, **shape),
    ]
    dice = np.random.default_rng(0)
    prompt = dice.integers(0, VOCABULARY, LONG).tolist()
    for executor in executors:
        for start in range(0, LONG, 512):
            chunk = prompt[start : start + 512]
            executor.forward(Batch((SequenceSlice(chunk, start, range(pages), 0),)))
    for count in (1, 2, 3, 7, 8, 9, 16, 17, 33):
        # All read the prompt's blocks up to somewhere, and each writes one of its own.
        slices = []
        for own in range(count):
            begun = int(dice.integers(0, LONG // BLOCK_TOKENS))
            table = [*range(begun), pages + own]
            slices.append(SequenceSlice([own], begun * BLOCK_TOKENS, table, 1))
        replayed, launched, gathered = (executor.forward(Batch(tuple(slices))).copy() for executor in executors)
        assert np.isfinite(replayed).all()
        assert error(replayed, gathered) < 0.1
        assert error(launched, gathered) < 0.1
        assert error(replayed, launched) < 0.1


@pytest.mark.parametrize("graphs", [True, False])
def test_with_the_reference_kernel_float32_is_the_cpu_s(graphs):
    """Graphs of all sizes in any order, which share their memory: token for token the same greedy answers."""
    config = small_model("llama", HEAD_DIM)
    tensors = random_weights(config, "f32")
    executors = [
        on_gpu(config, tensors, dtype="f32", kernel="reference", graphs=graphs),
        Executor(config, tensors, num_blocks=BLOCKS, block_tokens=BLOCK_TOKENS, dtype="f32", threads=1),
    ]
    assert greedy_answers(executors[0]) == greedy_answers(executors[1])


@with_flashinfer
def test_blocks_go_out_and_come_back():
    """Into another executor, where the sequence goes on; and another thread may read while steps run."""
    config = small_model("llama", HEAD_DIM)
    tensors = random_weights(config, "bf16")
    tokens = [index % VOCABULARY for index in range(2 * BLOCK_TOKENS + 1)]
    source, target = on_gpu(config, tensors), on_gpu(config, tensors)
    expected = source.forward(Batch((SequenceSlice(tokens, 0, [0, 1, 2], 1),))).copy()
    first, second = block(source, 0), block(source, 1)
    target.write_block(9, memoryview(first))
    target.write_block(4, memoryview(second))
    assert (block(target, 9), block(target, 4)) == (first, second)
    moved = target.forward(Batch((SequenceSlice(tokens[-1:], 2 * BLOCK_TOKENS, [9, 4, 7], 1),)))
    assert error(moved, expected) < 0.1

    seen, ready = [], threading.Barrier(2)

    def read():
        ready.wait(30)
        seen.extend(block(source, 0) for _ in range(50))

    reader = threading.Thread(target=read)
    reader.start()
    ready.wait(30)
    for position in range(50):
        source.forward(Batch((SequenceSlice([3], position, [10, 11, 12, 13], 1),)))
    reader.join(60)
    assert seen == [first] * 50


@with_flashinfer
def test_padding_touches_no_block_of_a_sequence():
    config = small_model("llama", HEAD_DIM)
    executor = on_gpu(config, random_weights(config, "bf16"))
    marked = bytes(range(256)) * (executor.block_bytes // 256)
    for number in range(BLOCKS):
        executor.write_block(number, memoryview(marked))
    executor.forward(Batch(tuple(SequenceSlice([3], 0, [number], 1) for number in (4, 9, 2))))
    assert {number for number in range(BLOCKS) if block(executor, number) != marked} == {4, 9, 2}


@with_flashinfer
@pytest.mark.parametrize("graphs", [True, False])
def test_what_a_former_sequence_left_in_a_block_is_never_in_a_sum(graphs):
    config = small_model("llama", HEAD_DIM)
    tensors = random_weights(config, "bf16")
    fresh, used = on_gpu(config, tensors, graphs=graphs), on_gpu(config, tensors, graphs=graphs)
    for number in range(BLOCKS):
        used.write_block(number, memoryview(b"\xff" * used.block_bytes))  # not a number
    for batch in (Batch((SequenceSlice([1, 2, 3], 0, [5], 1),)), Batch((SequenceSlice([4], 3, [5], 1),))):
        found = used.forward(batch).copy()
        assert np.isfinite(found).all()
        assert error(found, fresh.forward(batch)) < 1e-3


@with_flashinfer
@pytest.mark.parametrize(
    "item",
    [
        SequenceSlice([VOCABULARY], 0, [0], 1),
        SequenceSlice([1], 0, [BLOCKS], 1),
        SequenceSlice([1], 0, [-1], 1),
        SequenceSlice([1], 0, [1 << 40], 1),
        SequenceSlice([1], BLOCK_TOKENS, [0], 1),
        SequenceSlice([1], 320, list(range(21)), 1),
        SequenceSlice([1], 0, [0], 2),
    ],
)
def test_a_hostile_batch_is_refused_at_the_border(item):
    """Nothing of it reaches the device, which goes on computing."""
    config = small_model("llama", HEAD_DIM)
    executor = on_gpu(config, random_weights(config, "bf16"), most_decoding=2)
    good = Batch((SequenceSlice([1, 2, 3], 0, [0], 1),))
    before = executor.forward(good).copy()
    with pytest.raises(InputError):
        executor.forward(Batch((item,)))
    for outside in (-1, BLOCKS):
        with pytest.raises(InputError):
            executor.write_block(outside, memoryview(bytes(executor.block_bytes)))
    assert np.array_equal(executor.forward(good), before)


def test_a_pool_that_does_not_fit_is_an_error_that_says_so():
    config = small_model("llama", HEAD_DIM)
    block_bytes = config.num_layers * 2 * config.num_kv_heads * BLOCK_TOKENS * HEAD_DIM * 2
    _, total = torch.cuda.mem_get_info()
    with pytest.raises(DeviceError, match="memory"):
        on_gpu(config, random_weights(config, "bf16"), num_blocks=2 * total // block_bytes, kernel="reference")
