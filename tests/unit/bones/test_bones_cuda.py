"""The executor for GPUs, on the CPU: the same numbers as the reference executor, with and without fixed shapes.

All but the capture of graphs and flashinfer's kernels runs here; `tests/gpu` runs those where there is a GPU.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executor_workload import (
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
from tie.bones.batch import Batch, SequenceSlice, lay_out
from tie.bones.cuda.decode import decode_sizes
from tie.bones.cuda.executor import CudaExecutor
from tie.bones.cuda.numbers import NOTHING, number, padded
from tie.bones.errors import DeviceError, InputError, WeightsError
from tie.bones.executor import Executor

BLOCKS = 60


def on_cpu(config, tensors, **changes):
    arguments = {"num_blocks": BLOCKS, "block_tokens": BLOCK_TOKENS, "dtype": "f32", "most_decoding": 8}
    return CudaExecutor(config, tensors, **(arguments | {"device": "cpu", "kernel": "reference"} | changes))


def reference(config, tensors, dtype="f32"):
    return Executor(config, tensors, num_blocks=BLOCKS, block_tokens=BLOCK_TOKENS, dtype=dtype, threads=1)


def block(executor, number):
    target = bytearray(executor.block_bytes)
    executor.read_block(number, memoryview(target))
    return bytes(target)


@pytest.fixture(scope="module")
def llama():
    config = small_model("llama", 8)
    return config, random_weights(config, "f32")


@pytest.mark.parametrize("kind", KINDS)
def test_computes_what_the_reference_executor_does(kind):
    """Prompts in chunks, guesses and decoding, mixed and not: the same logits, and the same keys and values."""
    config = small_model(kind, 8)
    tensors = random_weights(config, "f32")
    exact, fixed, mixed = reference(config, tensors), on_cpu(config, tensors), on_cpu(config, tensors, graphs=False)
    decoded = 0
    for batch in mixed_work(config, BLOCKS, seed=len(kind)):
        expected = exact.forward(batch).numpy()
        for executor in (fixed, mixed):
            found = executor.forward(batch)
            assert found.dtype == np.float32
            assert found.shape == expected.shape
            assert error(found, expected) < 1e-5
            assert (found.argmax(-1) == expected.argmax(-1)).all()
        decoded += all(len(item.tokens) == 1 for item in batch.slices)
    assert decoded > 8
    for number_ in range(BLOCKS):
        kept = np.frombuffer(block(fixed, number_), np.float32)
        # The reference clears a block that it begins; what lies behind the last token is nobody's.
        written = np.frombuffer(exact.block_view(number_), np.float32) != 0
        assert np.allclose(kept[written], np.frombuffer(exact.block_view(number_), np.float32)[written], atol=1e-4)


def test_in_bfloat16_it_is_as_near_to_float32_as_the_reference():
    config = small_model("llama", 8)
    tensors = random_weights(config, "bf16")
    exact, executor = Exact(config, tensors, BLOCKS), on_cpu(config, tensors, dtype="bf16")
    for batch in mixed_work(config, BLOCKS, seed=3):
        exact.check(batch, executor.forward(batch))
    exact.check_all()
    assert executor.layout_id == "cuda-bf16"
    assert executor.block_bytes == reference(config, tensors, "bf16").block_bytes


def test_greedy_answers_are_the_reference_s(llama):
    executors = (on_cpu(*llama), on_cpu(*llama, graphs=False), reference(*llama))
    answers = [greedy_answers(executor) for executor in executors]
    assert answers[0] == answers[1] == answers[2]


def test_padding_touches_no_block_of_a_sequence(llama):
    executor = on_cpu(*llama)
    marked = bytes(range(256)) * (executor.block_bytes // 256)
    for number_ in range(BLOCKS):
        executor.write_block(number_, memoryview(marked))
    slices = [SequenceSlice([3], 0, [number_], 1) for number_ in (4, 9, 2)]  # padded to four
    executor.forward(Batch(tuple(slices)))
    changed = {number_ for number_ in range(BLOCKS) if block(executor, number_) != marked}
    assert changed == {4, 9, 2}


@pytest.mark.parametrize("graphs", [True, False])
def test_what_a_former_sequence_left_in_a_block_is_never_in_a_sum(llama, graphs):
    batches = [Batch((SequenceSlice([1, 2, 3], 0, [5], 1),)), Batch((SequenceSlice([4], 3, [5], 1),))]
    fresh, used = on_cpu(*llama, graphs=graphs), on_cpu(*llama, graphs=graphs)
    for number_ in range(BLOCKS):
        used.write_block(number_, memoryview(b"\xff" * used.block_bytes))  # not a number
    for batch in batches:
        assert np.array_equal(fresh.forward(batch).copy(), used.forward(batch))


def test_a_block_moved_through_its_bytes_continues_the_sequence(llama):
    tokens = list(range(BLOCK_TOKENS + 1))
    source, target = on_cpu(*llama), on_cpu(*llama)
    expected = source.forward(Batch((SequenceSlice(tokens, 0, [0, 1], 1),))).copy()
    target.write_block(7, memoryview(block(source, 0)))
    moved = target.forward(Batch((SequenceSlice(tokens[-1:], BLOCK_TOKENS, [7, 2], 1),)))
    assert error(moved, expected) < 1e-5


def test_blocks_are_the_reference_executor_s(llama):
    """Byte for byte where float32 is: `[layer][K, V][kv head][token][dim]`."""
    batch = Batch((SequenceSlice(range(BLOCK_TOKENS), 0, [3], 0),))
    executor, exact = on_cpu(*llama), reference(*llama)
    executor.forward(batch)
    exact.forward(batch)
    ours, theirs = (np.frombuffer(bytes_, np.float32) for bytes_ in (block(executor, 3), exact.block_view(3)))
    assert np.allclose(ours, theirs, atol=1e-5)


def test_copies_come_first_and_in_order(llama):
    executor = on_cpu(*llama)
    executor.forward(Batch((SequenceSlice([1, 2, 3], 0, [0], 0),)))
    original = block(executor, 0)
    fork = Batch((SequenceSlice([7], 3, [0], 1), SequenceSlice([8], 3, [6], 1)), copies=((0, 5), (5, 6)))
    both = executor.forward(fork).copy()
    assert block(executor, 5) == original
    for row, token in zip(both, (7, 8), strict=True):
        alone = on_cpu(*llama)
        alone.forward(Batch((SequenceSlice([1, 2, 3], 0, [0], 0),)))
        assert error(alone.forward(Batch((SequenceSlice([token], 3, [0], 1),)))[0], row) < 1e-5


def test_more_than_the_largest_step_decodes_as_well(llama):
    slices = tuple(SequenceSlice([index], 0, [index], 1) for index in range(11))
    assert error(on_cpu(*llama).forward(Batch(slices)), reference(*llama).forward(Batch(slices))) < 1e-5


def test_a_long_prompt_and_many_logits_find_room(llama):
    """Beyond what the buffers were made for."""
    tokens = [index % VOCABULARY for index in range(300)]
    batch = Batch((SequenceSlice(tokens, 0, range(40), 300),))
    assert error(on_cpu(*llama, most_decoding=1).forward(batch), reference(*llama).forward(batch)) < 1e-5


@pytest.mark.parametrize("graphs", [True, False])
def test_no_logits_are_an_empty_answer(llama, graphs):
    executor = on_cpu(*llama, graphs=graphs)
    assert executor.forward(Batch((SequenceSlice([1], 0, [0], 0),))).shape == (0, VOCABULARY)
    decoding = Batch(tuple(SequenceSlice([2], at, [where], asked) for at, where, asked in ((1, 0, 0), (0, 1, 1))))
    assert error(executor.forward(decoding), reference(*llama).forward(Batch(decoding.slices[1:]))) < 1e-5


@pytest.mark.parametrize(
    "slices",
    [
        (),
        (SequenceSlice([VOCABULARY], 0, [0], 1),),
        (SequenceSlice([-1], 0, [0], 1),),
        (SequenceSlice([1], 0, [BLOCKS], 1),),  # the scratch block is nobody's
        (SequenceSlice([1], 0, [-1], 1),),
        (SequenceSlice([1], BLOCK_TOKENS, [0], 1),),
        (SequenceSlice([1], 320, list(range(21)), 1),),
        (SequenceSlice([1], -1, [0], 1),),
        (SequenceSlice([1], 0, [0], 2),),
        (SequenceSlice([1], 0, [0], 1), SequenceSlice([1], 0, [0], 1)),
    ],
)
def test_a_batch_that_cannot_be_is_refused_and_changes_nothing(llama, slices):
    executor = on_cpu(*llama)
    executor.forward(Batch((SequenceSlice([7, 8, 9], 0, [0], 0),)))
    before = [block(executor, number_) for number_ in range(BLOCKS)]
    with pytest.raises(InputError):
        executor.forward(Batch(slices, copies=((0, 1),)))
    with pytest.raises(InputError):
        executor.forward(Batch((SequenceSlice([1], 0, [2], 1),), copies=((0, BLOCKS),)))
    assert [block(executor, number_) for number_ in range(BLOCKS)] == before


@pytest.mark.parametrize("outside", [-1, BLOCKS, 1 << 70])
def test_a_block_outside_the_pool_is_neither_read_nor_written(llama, outside):
    executor = on_cpu(*llama)
    for call in (executor.read_block, executor.write_block):
        with pytest.raises(InputError, match="pool"):
            call(outside, memoryview(bytearray(executor.block_bytes)))


def test_a_block_of_another_size_is_refused(llama):
    executor = on_cpu(*llama)
    for call in (executor.read_block, executor.write_block):
        with pytest.raises(ValueError, match="structures"):
            call(0, memoryview(bytearray(executor.block_bytes - 1)))


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "f16"},
        {"most_decoding": 0},
        {"num_blocks": 0},
        {"block_tokens": 0},
        {"device": "tpu"},
        {"kernel": "fast"},
    ],
)
def test_impossible_arguments_are_refused(llama, changes):
    with pytest.raises(InputError):
        on_cpu(*llama, **changes)


def test_weights_of_another_model_are_refused(llama):
    config, tensors = llama
    with pytest.raises(WeightsError, match="missing"):
        on_cpu(config, {name: tensor for name, tensor in tensors.items() if "norm" not in name})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_computes_nowhere_else(llama):
    with pytest.raises(DeviceError, match="no GPU"):
        on_cpu(*llama, device="cuda")


def test_weights_are_copied(llama):
    config, tensors = llama
    mine = {name: tensor.clone() for name, tensor in tensors.items()}
    executor = on_cpu(config, mine)
    batch = Batch((SequenceSlice([1, 2, 3], 0, [0], 1),))
    before = executor.forward(batch).copy()
    for tensor in mine.values():
        tensor.zero_()
    assert np.array_equal(executor.forward(batch), before)


@given(most=st.integers(1, 300))
def test_sizes_go_up_to_the_most_and_waste_little(most):
    sizes = decode_sizes(most)
    assert sizes[-1] == most
    assert list(sizes) == sorted(set(sizes))
    for count in range(1, most + 1):
        size = min(size for size in sizes if size >= count)
        assert size < count + 16
        assert size < 2 * count or size == 1


@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=7),
    news=st.lists(st.integers(1, 40), min_size=7, max_size=7),
)
def test_numbers_say_where_every_row_goes(lengths, news):
    """Against plain loops."""
    config = small_model("llama", 8)
    slices, at = [], 0
    for end, wish in zip(lengths, news, strict=False):
        new = min(wish, end)
        count = -(-end // BLOCK_TOKENS)
        table = list(range(at, at + count + 1))  # one more than is used
        at += count + 1
        slices.append(SequenceSlice([end % VOCABULARY] * new, end - new, table, 1))
    rows = lay_out(Batch(tuple(slices)), config, num_blocks=100, block_tokens=BLOCK_TOKENS)
    numbers = number(rows, BLOCK_TOKENS)
    table = numbers.table
    packed = numbers.packed.tolist()
    sections = [packed[index * numbers.rows : (index + 1) * numbers.rows] for index in range(4)]
    row = 0
    for index, span in enumerate(rows.spans):
        assert table.row_starts[index] == row
        pages = table.pages[table.page_starts[index] : table.page_starts[index + 1]].tolist()
        assert pages == span.blocks.tolist()[: len(pages)]
        assert (len(pages) - 1) * BLOCK_TOKENS + table.last_lengths[index] == span.end
        for position in range(span.start, span.end):
            told = [section[row] for section in sections]
            assert told[1:] == [position, span.blocks[position // BLOCK_TOKENS], position % BLOCK_TOKENS]
            row += 1
    assert sections[0] == rows.tokens.tolist()
    assert packed[4 * row :] == [*rows.wanted.tolist(), *table.pages.tolist()]
    assert table.row_starts[-1] == row


def test_padding_is_sequences_of_one_token_in_the_scratch_block():
    filled = padded(NOTHING, 3, 60)
    numbers = number(filled, BLOCK_TOKENS)
    assert (numbers.rows, numbers.wanted) == (3, 3)
    assert numbers.packed.tolist() == [0, 0, 0, 0, 0, 0, 60, 60, 60, 0, 0, 0, 0, 0, 0, 60, 60, 60]
    assert numbers.table.last_lengths.tolist() == [1, 1, 1]
