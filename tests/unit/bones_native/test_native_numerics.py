"""The native step against the float32 reference, on the values that its packed weights stand for.

What is left between them is the rounding of activations (bfloat16, or 8 bits by groups) and of keys and values.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tie.bones.batch import Batch, SequenceSlice
from tie.bones.native import library

pytestmark = pytest.mark.skipif(not library.available(), reason="the native library is not built")

BOUNDS = {"bf16": 0.03, "q8": 0.05, "q4": 0.05}  # of the logits' spread, root mean square
KINDS = {
    "llama": {},
    "untied": {"tie_word_embeddings": False},
    "one key head": {"num_kv_heads": 1},
    "no groups": {"num_kv_heads": 4},
    "odd widths": {"hidden_size": 40, "intermediate_size": 72, "num_heads": 3, "num_kv_heads": 1, "head_dim": 10},
    "wide heads": {"num_heads": 2, "num_kv_heads": 1, "head_dim": 128, "num_layers": 1},
    "qwen2": {"kind": "qwen2", "attention_bias": True},
    "llama with biases": {"attention_bias": True},
    "qwen3": {"kind": "qwen3", "qk_norm": True, "head_dim": 32},
    "mistral": {"kind": "mistral", "sliding_window": 24},
    "narrow window": {"kind": "mistral", "sliding_window": 1},
}


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 99, count).tolist()


def distance(native, reference) -> float:
    """Root mean square of the difference, in the reference's standard deviations."""
    expected = np.asarray(reference)
    return float(np.sqrt(np.mean((np.asarray(native) - expected) ** 2)) / expected.std())


@pytest.mark.parametrize("weights", ["bf16", "q8", "q4"])
@pytest.mark.parametrize("kind", KINDS)
def test_prompt_and_next_token(pair, kind, weights):
    native, reference = pair(weights, **KINDS[kind])
    prompt = Batch((SequenceSlice(tokens(75), 0, (7, 3, 12, 0, 9), 75),))
    assert distance(native.forward(prompt), reference.forward(prompt)) < BOUNDS[weights]
    more = Batch((SequenceSlice((5,), 75, (7, 3, 12, 0, 9), 1),))
    assert distance(native.forward(more), reference.forward(more)) < BOUNDS[weights]


def test_matrices_may_be_stored_each_in_its_own_way(pair):
    native, reference = pair(lambda names: ("q4", "q8", "bf16")[len(names[0]) % 3])
    prompt = Batch((SequenceSlice(tokens(75), 0, (7, 3, 12, 0, 9), 75),))
    assert distance(native.forward(prompt), reference.forward(prompt)) < BOUNDS["q4"]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_mixed_batch_gives_what_each_slice_gives_alone(pair, threads):
    """Two sequences decode, one is being prefilled, one is verified; with any number of threads."""
    native, reference = pair("q8", threads=threads)
    history = [(tokens(40, 1), (0, 1, 2)), (tokens(17, 2), (3, 4)), (tokens(100, 3), tuple(range(5, 13)))]
    for executor in (native, reference):
        for ids, blocks in history:
            executor.forward(Batch((SequenceSlice(ids, 0, blocks, 0),)))
    batch = Batch(
        (
            SequenceSlice((1,), 40, (0, 1, 2), 1),
            SequenceSlice(tokens(33, 4), 0, (20, 21, 22), 1),
            SequenceSlice((2,), 17, (3, 4), 1),
            SequenceSlice((3, 4, 5), 100, tuple(range(5, 13)), 3),
        )
    )
    assert distance(native.forward(batch), reference.forward(batch)) < BOUNDS["q8"]


def test_chunks_of_a_prompt_give_what_it_gives_whole(pair):
    native, _ = pair("q4")
    ids, blocks = tokens(90), tuple(range(6))
    whole = native.forward(Batch((SequenceSlice(ids, 0, blocks, 1),)))
    for start, stop in ((0, 7), (7, 8), (8, 40), (40, 89), (89, 90)):
        chunked = native.forward(Batch((SequenceSlice(ids[start:stop], start, blocks, 1),)))
    assert distance(chunked, whole) < 1e-2


def test_long_contexts_are_split_among_threads(pair):
    native, reference = pair("bf16", threads=3)
    blocks = tuple(np.random.default_rng(5).permutation(64)[:32].tolist())
    prompt = Batch((SequenceSlice(tokens(500), 0, blocks, 1),))
    assert distance(native.forward(prompt), reference.forward(prompt)) < BOUNDS["bf16"]
    more = Batch((SequenceSlice((1,), 500, blocks, 1),))
    assert distance(native.forward(more), reference.forward(more)) < BOUNDS["bf16"]


@pytest.mark.parametrize("scaling", [{"rope_type": "linear", "factor": 4.0}, {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}])  # fmt: skip
def test_stretched_rotary_embedding(pair, scaling):
    from tie.bones.config import RopeScaling

    native, reference = pair("bf16", rope_scaling=RopeScaling.from_object(scaling))
    prompt = Batch((SequenceSlice(tokens(75), 0, range(5), 75),))
    assert distance(native.forward(prompt), reference.forward(prompt)) < BOUNDS["bf16"]


def test_the_same_batch_gives_the_same_bits(pair):
    native, _ = pair("q8", threads=2)
    batch = Batch(tuple(SequenceSlice(tokens(20 + i, i), 0, (2 * i, 2 * i + 1), 1) for i in range(9)))
    assert np.array_equal(native.forward(batch), native.forward(batch))


def test_fewer_threads_of_a_team_give_the_same_bits(pair):
    native, _ = pair("q8", threads=4)
    batch = Batch(tuple(SequenceSlice(tokens(90 + i, i), 0, tuple(range(7 * i, 7 * i + 7)), 1) for i in range(3)))
    expected = native.forward(batch)
    for threads in (1, 2, 3):
        native._threads.choose = lambda _sequences, _rows, threads=threads: threads
        assert np.array_equal(native.forward(batch), expected)


def test_levels_agree(models):
    """Every instruction set computes the same model."""
    batch = Batch((SequenceSlice(tokens(60), 0, range(4), 60),))
    results = {
        (level, weights): models.pair(models.config(), weights, level=level)[0].forward(batch)
        for level in library.levels()
        for weights in BOUNDS
    }
    for (_, weights), result in results.items():
        assert distance(result, results[library.levels()[0], weights]) < 0.02


@st.composite
def shapes(draw):
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    return {
        "hidden_size": draw(st.integers(1, 12)) * 8,
        "intermediate_size": draw(st.integers(1, 100)),
        "num_layers": draw(st.integers(1, 2)),
        "num_heads": kv_heads * group,
        "num_kv_heads": kv_heads,
        "head_dim": 2 * draw(st.integers(1, 40)),
        "vocab_size": draw(st.integers(99, 140)),
        "sliding_window": draw(st.none() | st.integers(1, 90)),
        "qk_norm": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "tie_word_embeddings": draw(st.booleans()),
    }


@settings(max_examples=40, deadline=None)
@given(
    shapes(),
    st.sampled_from(sorted(BOUNDS)),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), min_size=1, max_size=5),
    st.integers(0, 1 << 30),
)
def test_any_shape_and_batch(  # noqa: PLR0917 (hypothesis passes them by place)
    models, shape, weights, threads, lengths, seed
):
    """Random models, histories, chunks and block orders. Tiny random models amplify rounding: hence the wide bound."""
    random = np.random.default_rng(seed)
    native, reference = models.pair(
        models.config(**shape), weights, level=library.levels()[0], threads=threads, seed=seed, num_blocks=64
    )
    free = random.permutation(64).tolist()
    slices = []
    for history, count in lengths:
        blocks = tuple(free.pop() for _ in range(-(-(history + count) // 16)))
        ids = random.integers(0, 99, history + count).tolist()
        for executor in (native, reference) if history else ():
            executor.forward(Batch((SequenceSlice(ids[:history], 0, blocks, 0),)))
        slices.append(SequenceSlice(ids[history:], history, blocks, int(random.integers(1, count + 1))))
    batch = Batch(tuple(slices))
    with torch.inference_mode():
        assert distance(native.forward(batch), reference.forward(batch)) < 0.15
