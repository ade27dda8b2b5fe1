"""Numbers of a request: what is possible goes on unchanged, what is not is refused by name."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tie.app.frames import Limits
from tie.app.outcome import RefusalError
from tie.app.sampling import check_options, output_tokens, sampling
from tie.proto import app_pb2, request_pb2

LIMITS = Limits(request_bytes=1000, output_tokens=100, time_s=1.0)


def refused(call) -> str:
    with pytest.raises(RefusalError) as caught:
        call()
    assert caught.value.status == app_pb2.STATUS_INVALID_REQUEST
    return caught.value.detail.split(":")[0]


def test_what_is_not_asked_for_is_off():
    numbers = sampling(request_pb2.Sampling(), 100)
    assert numbers.temperature == 1
    assert not numbers.HasField("seed")
    assert not any((numbers.top_k, numbers.top_p, numbers.min_p, numbers.repetition_penalty))


def test_what_is_asked_for_goes_on():
    asked = request_pb2.Sampling(
        temperature=0, top_k=5, top_p=0.5, min_p=0.25, presence_penalty=-2, frequency_penalty=2, repetition_penalty=1.5,
        seed=0, logit_bias={3: -100.0}, allowed_token_ids=[1, 2], bad_token_ids=[2],
    )  # fmt: skip
    numbers = sampling(asked, 100)
    assert numbers.HasField("seed")
    assert numbers.seed == 0
    for name in (
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
    ):
        assert getattr(numbers, name) == getattr(asked, name)
    assert dict(numbers.logit_bias) == {3: -100.0}
    assert list(numbers.allowed_token_ids) == [1, 2]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [-0.1, math.nan, math.inf, 2.5]),
        ("top_k", [-1]),
        ("top_p", [0.0, -0.5, 1.5, math.nan]),
        ("min_p", [-0.5, 1.5, math.nan]),
        ("presence_penalty", [-2.5, 2.5, math.inf]),
        ("frequency_penalty", [-2.5, 2.5, -math.inf]),
        ("repetition_penalty", [0.0, -1.0, 11.0]),
        ("min_tokens", [-1]),
        ("logit_bias", [{1: math.nan}, {1: 101.0}, {100: 0.0}]),
        ("allowed_token_ids", [[100], [0] * 5000]),
        ("bad_token_ids", [[2**32 - 1]]),
    ],
)
def test_impossible_values_are_refused_by_name(name, values):
    for value in values:
        assert refused(lambda value=value: sampling(request_pb2.Sampling(**{name: value}), 100)) == f"sampling.{name}"


def test_a_request_that_allows_no_token_is_refused():
    asked = request_pb2.Sampling(allowed_token_ids=[1], bad_token_ids=[1])
    assert refused(lambda: sampling(asked, 100)) == "sampling.bad_token_ids"


numbers = st.floats(width=32)
counts = st.integers(-(2**31), 2**31 - 1)


@given(
    st.builds(
        request_pb2.Sampling, temperature=numbers, top_k=counts, top_p=numbers, min_p=numbers, presence_penalty=numbers,
        frequency_penalty=numbers, repetition_penalty=numbers, seed=st.integers(0, 2**64 - 1), min_tokens=counts,
        logit_bias=st.dictionaries(st.integers(0, 200), numbers, max_size=3),
        allowed_token_ids=st.lists(st.integers(0, 200), max_size=3),
    )
)  # fmt: skip
def test_whatever_is_asked_either_has_a_finite_meaning_or_is_refused_by_name(asked):
    try:
        numbers = sampling(asked, 100)
    except RefusalError as refusal:
        field = refusal.detail.split(":")[0]
    else:
        field = "sampling."
        assert all(map(math.isfinite, (numbers.temperature, numbers.top_p, numbers.min_p, numbers.repetition_penalty)))
        assert numbers.temperature >= 0
    assert field.startswith("sampling.")


def test_output_is_the_least_of_wish_limit_and_room():
    for wish, free, allowed in ((None, 1000, 100), (None, 7, 7), (5, 1000, 5), (5000, 1000, 100), (50, 7, 7)):
        assert output_tokens(request_pb2.InferenceRequest(max_tokens=wish), LIMITS, free) == allowed


@pytest.mark.parametrize("wish", [0, -1, -(2**31)])
def test_no_output_is_no_request(wish):
    assert refused(lambda: output_tokens(request_pb2.InferenceRequest(max_tokens=wish), LIMITS, 10)) == "max_tokens"


def test_more_least_tokens_than_most_tokens():
    request = request_pb2.InferenceRequest(max_tokens=3, sampling=request_pb2.Sampling(min_tokens=4))
    assert refused(lambda: output_tokens(request, LIMITS, 10)) == "sampling.min_tokens"


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("n", [{"n": 0}, {"n": -1}, {"n": 9}]),
        ("logprobs", [{"logprobs": -1}, {"logprobs": 21}]),
        ("stop[0]", [{"stop": [""]}, {"stop": ["x" * 1025]}]),
        ("stop", [{"stop": ["x"] * 65}]),
        ("turn_key", [{"turn_key": b"x" * 31}, {"turn_key": b"x" * 33}]),
        ("priority", [{"priority": 7}]),
    ],
)
def test_impossible_options_are_refused_by_name(field, options):
    for option in options:
        assert refused(lambda option=option: check_options(request_pb2.InferenceRequest(**option))) == field


def test_possible_options_pass():
    for option in ({}, {"n": 8}, {"logprobs": 0}, {"stop": ["x" * 1024]}, {"turn_key": bytes(32)}, {"priority": 1}):
        check_options(request_pb2.InferenceRequest(**option))
