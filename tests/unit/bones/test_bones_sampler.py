"""The sampler: distributions by chi-square with fixed seeds, every parameter, and independence of the batch."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tie.bones.errors import InputError, SamplingError
from tie.bones.sampler import (
    Sampled,
    SampleRow,
    SamplingParams,
    _bucket_sums,
    _inside_nucleus,
    _kth_largest,
    _race,
    sample,
)

DRAWS = 4000


def _logits(probabilities) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log().float()


def _frequencies(logits: torch.Tensor, *, draws: int = DRAWS, row=None, **params) -> np.ndarray:
    """How often each token is drawn at the positions from 0 on."""
    asked = SamplingParams(**({"temperature": 1.0, "seed": 99} | params))
    rows = [SampleRow(asked, position, **(row or {})) for position in range(draws)]
    chosen = [result.token_id for result in sample(logits.expand(draws, -1).contiguous(), rows)]
    return np.bincount(chosen, minlength=len(logits))


def _assert_distributed(counts: np.ndarray, expected) -> None:
    """Chi-square against the expected probabilities; seeds are fixed, so the outcome is too."""
    expected = np.array(expected) / np.sum(expected)
    assert (counts[expected == 0] == 0).all(), "a token that must never be chosen was"
    kept = expected > 0
    wanted = expected[kept] * counts.sum()
    statistic = ((counts[kept] - wanted) ** 2 / wanted).sum()
    freedom = max(1, kept.sum() - 1)
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


P = [0.4, 0.25, 0.15, 0.1, 0.06, 0.04]


def test_temperature_one_is_the_distribution_itself():
    _assert_distributed(_frequencies(_logits(P)), P)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature(temperature):
    _assert_distributed(_frequencies(_logits(P), temperature=temperature), np.array(P) ** (1 / temperature))


def test_chi_square_would_notice():
    with pytest.raises(AssertionError):
        _assert_distributed(_frequencies(_logits(P), temperature=0.8), P)


def test_large_vocabulary():
    """Most tokens are never looked at closely."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(1543, generator=generator) * 2
    counts = _frequencies(logits)
    probabilities = logits.double().softmax(-1).numpy()
    bins = np.array_split(np.random.default_rng(0).permutation(1543), 20)
    _assert_distributed(np.array([counts[b].sum() for b in bins]), [probabilities[b].sum() for b in bins])


def test_greedy_takes_the_likeliest_and_the_first_of_equals():
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, 2.0]])
    results = sample(logits, [SampleRow(SamplingParams(), 0)] * 2)
    assert [result.token_id for result in results] == [1, 0]
    assert results[0] == Sampled(1)


def test_top_k():
    _assert_distributed(_frequencies(_logits(P), top_k=2), [0.4, 0.25, 0, 0, 0, 0])
    assert _frequencies(_logits(P), top_k=1, draws=50)[0] == 50
    _assert_distributed(_frequencies(_logits(P), top_k=100), P)


def test_top_k_keeps_ties():
    _assert_distributed(_frequencies(_logits([0.4, 0.2, 0.2, 0.2]), top_k=2), [0.4, 0.2, 0.2, 0.2])


def test_top_p():
    _assert_distributed(_frequencies(_logits(P), top_p=0.64), [0.4, 0.25, 0, 0, 0, 0])
    _assert_distributed(_frequencies(_logits(P), top_p=0.66), [0.4, 0.25, 0.15, 0, 0, 0])
    assert _frequencies(_logits(P), top_p=1e-9, draws=50)[0] == 50
    for off in (0.0, 1.0):
        _assert_distributed(_frequencies(_logits(P), top_p=off), P)


def test_top_p_counts_what_top_k_left():
    # After top-k 0.4 and 0.25 are 0.615 and 0.385 of the whole, so that the first alone exceeds 0.6.
    assert _frequencies(_logits(P), top_k=2, top_p=0.6, draws=50)[0] == 50


def test_top_p_is_measured_after_temperature():
    hot = np.array(P) ** 0.5
    share = hot / hot.sum()
    kept = int(np.searchsorted(share.cumsum(), 0.6)) + 1
    _assert_distributed(_frequencies(_logits(P), temperature=2.0, top_p=0.6), [*hot[:kept], *[0] * (6 - kept)])


def test_min_p():
    _assert_distributed(_frequencies(_logits(P), min_p=0.3), [0.4, 0.25, 0.15, 0, 0, 0])
    assert _frequencies(_logits(P), min_p=1.0, draws=50)[0] == 50


def test_presence_penalty_counts_a_token_once():
    counts = _frequencies(_logits(P), presence_penalty=math.log(2), row={"output_ids": [0, 0, 0, 1]})
    _assert_distributed(counts, [0.2, 0.125, *P[2:]])


def test_frequency_penalty_counts_every_time():
    counts = _frequencies(_logits(P), frequency_penalty=math.log(2), row={"output_ids": [0, 0, 1]})
    _assert_distributed(counts, [0.1, 0.125, *P[2:]])


def test_presence_and_frequency_penalties_leave_the_prompt_alone():
    counts = _frequencies(_logits(P), frequency_penalty=9.0, presence_penalty=9.0, row={"prompt_ids": [0, 0, 1]})
    _assert_distributed(counts, P)


def test_repetition_penalty_divides_and_multiplies():
    logits = torch.tensor([2.0, -1.0, 0.5, 1.0])
    row = {"prompt_ids": [0, 0], "output_ids": [1]}
    counts = _frequencies(logits, repetition_penalty=2.0, row=row)
    _assert_distributed(counts, np.exp([1.0, -2.0, 0.5, 1.0]))
    for off in (0.0, 1.0):
        _assert_distributed(_frequencies(logits, repetition_penalty=off, row=row), np.exp(logits.numpy()))


def test_logit_bias():
    _assert_distributed(_frequencies(_logits(P), logit_bias={5: math.log(10.0)}), [*P[:5], 0.4])
    results = sample(_logits([P]), [SampleRow(SamplingParams(logit_bias={3: 50.0}), 0)])
    assert results[0].token_id == 3


def test_allowed_bad_and_banned_ids():
    _assert_distributed(_frequencies(_logits(P), allowed_ids=frozenset({1, 4})), [0, 0.25, 0, 0, 0.06, 0])
    _assert_distributed(_frequencies(_logits(P), bad_ids=frozenset({0, 2})), [0, 0.25, 0, 0.1, 0.06, 0.04])
    _assert_distributed(_frequencies(_logits(P), row={"banned": [0]}), [0, *P[1:]])
    counts = _frequencies(_logits(P), allowed_ids=frozenset({0, 1}), bad_ids=frozenset({0}), row={"banned": [5]})
    assert counts[1] == DRAWS


def _mask(allowed, words: int) -> np.ndarray:
    bits = np.zeros(words, dtype=np.uint32)
    for token in allowed:
        bits[token // 32] |= np.uint32(1 << (token % 32))
    return bits.view(np.int32)


def test_grammar_mask():
    logits = torch.zeros(70)
    logits[0] = 9
    mask = _mask([1, 31, 32, 64, 69], 3)
    expected = np.zeros(70)
    expected[[1, 31, 32, 64, 69]] = 1
    _assert_distributed(_frequencies(logits, row={"mask": mask}), expected)
    assert sample(logits[None], [SampleRow(SamplingParams(), 0, mask=mask)])[0].token_id == 1


def test_mask_forbids_what_it_does_not_cover():
    logits = torch.zeros(70)
    logits[69] = 9
    assert sample(logits[None], [SampleRow(SamplingParams(), 0, mask=_mask([3], 2))])[0].token_id == 3


def test_bias_does_not_undo_a_mask():
    row = SampleRow(SamplingParams(logit_bias={0: 100.0}), 0, mask=_mask([1, 2], 1))
    assert sample(torch.zeros(1, 8), [row])[0].token_id == 1


def test_logprobs_are_the_models_own():
    params = SamplingParams(temperature=0.1, logit_bias={4: 50.0}, bad_ids=frozenset({0}))
    result = sample(_logits([P]), [SampleRow(params, 0, logprobs=3)])[0]
    assert result.token_id == 4
    assert result.logprob == pytest.approx(math.log(0.06), abs=1e-5)
    assert result.top_ids == (0, 1, 2)
    assert result.top_logprobs == pytest.approx([math.log(p) for p in P[:3]], abs=1e-5)


def test_logprobs_of_few_many_and_equal_tokens():
    rows = [SampleRow(SamplingParams(), 0, logprobs=count) for count in (0, 2, 99)]
    none, two, all_of_them = sample(torch.zeros(3, 4), rows)
    assert none.logprob == pytest.approx(math.log(0.25))
    assert none.top_ids == ()
    assert two.top_ids == (0, 1)
    assert all_of_them.top_ids == (0, 1, 2, 3)


VARIETY = (
    {"params": SamplingParams()},
    {"params": SamplingParams(temperature=1.0, seed=1)},
    {"params": SamplingParams(temperature=0.7, top_k=5, seed=2)},
    {"params": SamplingParams(temperature=1.3, top_p=0.8, seed=3)},
    {"params": SamplingParams(temperature=1.0, min_p=0.1, top_k=40, seed=2**64 - 1)},
    {
        "params": SamplingParams(temperature=1.0, repetition_penalty=1.2, seed=5),
        "prompt_ids": [1, 2],
        "output_ids": [3],
    },
    {"params": SamplingParams(temperature=1.0, frequency_penalty=0.5, seed=6), "output_ids": [3, 3, 9]},
    {"params": SamplingParams(temperature=1.0, seed=7), "mask": _mask(range(0, 600, 3), 20), "logprobs": 2},
)


def test_a_row_gives_the_same_in_any_batch():
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(len(VARIETY), 600, generator=generator).bfloat16().float() * 3  # with ties
    rows = [SampleRow(position=index, **fields) for index, fields in enumerate(VARIETY)]
    alone = [sample(logits[index : index + 1], [row])[0] for index, row in enumerate(rows)]
    assert sample(logits, rows) == alone
    order = np.random.default_rng(1).permutation(len(rows))
    assert sample(logits[order.copy()], [rows[index] for index in order]) == [alone[index] for index in order]
    assert sample(logits.repeat(5, 1), rows * 5) == alone * 5


def test_randomness_depends_on_seed_and_position_only():
    logits = torch.zeros(1, 1000)

    def draw(seed: int, position: int) -> int:
        return sample(logits, [SampleRow(SamplingParams(temperature=1.0, seed=seed), position)])[0].token_id

    assert [draw(5, position) for position in range(20)] == [draw(5, position) for position in range(20)]
    assert len({draw(5, position) for position in range(20)}) > 15
    assert len({draw(seed, 0) for seed in range(20)}) > 15


def test_logits_are_not_changed():
    logits = torch.randn(len(VARIETY), 600, generator=torch.Generator().manual_seed(3))
    before = logits.clone()
    sample(logits, [SampleRow(position=0, **fields) for fields in VARIETY])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_choice_are_named(temperature):
    logits = torch.zeros(5, 8)
    logits[1, 3] = float("nan")
    logits[3, 0] = float("inf")
    free, stuck = (
        SampleRow(SamplingParams(temperature=temperature), 0),
        SampleRow(
            SamplingParams(temperature=temperature, allowed_ids=frozenset({2})), 0, mask=_mask([1], 1), logprobs=5
        ),
    )
    with pytest.raises(SamplingError) as caught:
        sample(logits, [free, free, stuck, free, free])
    assert caught.value.rows == (1, 2, 3)
    assert len(sample(logits[[0, 4]], [free, free])) == 2


def test_not_a_number_behind_a_mask_is_found():
    logits = torch.zeros(1, 5000)
    logits[0, 7] = float("nan")
    row = SampleRow(SamplingParams(temperature=1.0, bad_ids=frozenset({7}), top_k=3), 0, logprobs=3)
    with pytest.raises(SamplingError):
        sample(logits, [row])


def test_extreme_numbers_do_not_break():
    logits = torch.tensor([[3e38, -3e38, 0.0, 1.0]])
    for params in (
        SamplingParams(temperature=1e-5),
        SamplingParams(temperature=1e9, top_p=0.5, min_p=1.0),
        SamplingParams(temperature=1.0, frequency_penalty=-1e9, presence_penalty=1e9),
        SamplingParams(temperature=1.0, top_p=1e-300),
    ):
        assert 0 <= sample(logits, [SampleRow(params, 1 << 40, output_ids=[1])])[0].token_id < 4


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 1.1},
        {"top_p": -0.1},
        {"min_p": 2.0},
        {"min_p": math.nan},
        {"presence_penalty": math.inf},
        {"frequency_penalty": math.nan},
        {"repetition_penalty": -1.0},
        {"seed": -1},
        {"seed": 1 << 64},
        {"logit_bias": {1: math.inf}},
        {"allowed_ids": frozenset()},
    ],
)
def test_refuses_parameters(fields):
    with pytest.raises(InputError):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    ("params", "fields"),
    [
        ({"logit_bias": {8: 1.0}}, {}),
        ({"logit_bias": {-1: 1.0}}, {}),
        ({"bad_ids": frozenset({8})}, {}),
        ({"allowed_ids": frozenset({1, 8})}, {}),
        ({"allowed_ids": frozenset({1 << 80})}, {}),
        ({}, {"banned": [8]}),
        ({"presence_penalty": 1.0}, {"output_ids": [8]}),
        ({"repetition_penalty": 2.0}, {"prompt_ids": [-1]}),
    ],
)
def test_refuses_ids_outside_the_vocabulary(params, fields):
    with pytest.raises(InputError):
        sample(torch.zeros(1, 8), [SampleRow(SamplingParams(**params), 0, **fields)])


def test_refuses_a_wrong_number_of_rows():
    row = SampleRow(SamplingParams(), 0)
    for logits in (torch.zeros(2, 8), torch.zeros(8), torch.zeros(1, 8).double()):
        with pytest.raises(InputError):
            sample(logits, [row])
    assert sample(torch.zeros(0, 8), []) == []
    with pytest.raises(InputError):
        SampleRow(SamplingParams(), -1)
    with pytest.raises(InputError):
        SampleRow(SamplingParams(), 0, logprobs=-1)


def test_vocabulary_is_checked_ahead_of_time():
    SamplingParams(logit_bias={7: 1.0}).check_vocabulary(8)
    with pytest.raises(InputError):
        SamplingParams(logit_bias={8: 1.0}).check_vocabulary(8)


def test_what_was_asked_is_not_told():
    params = SamplingParams(logit_bias={4242: 1.0})
    assert "4242" not in repr(params) + repr(SampleRow(params, 0, output_ids=[4242])) + repr(Sampled(4242))


@given(st.lists(st.sampled_from([0.0, 1e-30, 0.25, 1.0]), min_size=1, max_size=700), st.integers(0, 2**32))
def test_weight_zero_never_wins(weights, seed):
    if any(weights):
        with np.errstate(divide="ignore"):
            assert (
                weights[_race(np.float32(weights), _bucket_sums(np.float32(weights)), np.random.default_rng(seed))] > 0
            )


def test_rounding_of_logits_hardly_ever_changes_a_draw():
    """A hundred times what it is in float32. Looking a number up in the running sum would change 29 of these draws."""
    dice = np.random.default_rng(8)
    logits = (dice.standard_normal((1, 50_000)) * 2).astype(np.float32)
    changed = 0
    for position in range(400):
        row = SampleRow(SamplingParams(temperature=1.0, seed=1), position)
        noisy = logits * (1 + dice.uniform(-1e-4, 1e-4, logits.shape).astype(np.float32))
        changed += sample(logits, [row]) != sample(noisy, [row])
    assert changed <= 1


@given(st.integers(0, 2**32), st.integers(1, 6000), st.data())
def test_kth_largest_equals_sorting(seed, size, data):
    k = data.draw(st.integers(1, size))
    values = np.random.default_rng(seed).integers(0, 500, size).astype(np.float32)
    assert _kth_largest(values, k) == np.sort(values)[-k]


@given(st.integers(0, 2**32), st.integers(1, 300), st.floats(0.01, 0.999))
def test_the_nucleus_is_the_smallest_set_that_suffices(seed, size, top_p):
    weights = (np.random.default_rng(seed).exponential(size=size) ** 3).astype(np.float32)
    goal = top_p * float(weights.sum(dtype=np.float64))
    kept = weights[[_inside_nucleus(weights, token, goal) for token in range(size)]].astype(np.float64)
    assert kept.sum() >= goal * (1 - 1e-9)
    assert kept.sum() - kept.min() <= goal * (1 + 1e-9)


def test_a_nucleus_of_many_among_many():
    """What is drawn anew is drawn from the nucleus alone, and as often as it should be."""
    logits = torch.randn(1200, generator=torch.Generator().manual_seed(6))
    probabilities = logits.double().softmax(-1).numpy()
    order = np.argsort(-probabilities)
    kept = order[: int(np.searchsorted(probabilities[order].cumsum(), 0.3)) + 1]
    counts = _frequencies(logits, top_p=0.3)
    assert counts[kept].sum() == DRAWS
    bins = np.array_split(np.random.default_rng(0).permutation(kept), 15)
    _assert_distributed(np.array([counts[b].sum() for b in bins]), [probabilities[b].sum() for b in bins])
