"""Requests from another process: every field is checked, and nothing but RequestRefusedError comes out."""

import math

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from tie.proto import runtime_pb2 as pb
from tie.runtime.request import Bounds, RequestRefusedError, check
from tie.runtime.sequence import Priority

BOUNDS = Bounds(vocab_size=100, max_length=32)


def request(**fields) -> pb.GenerateRequest:
    return pb.GenerateRequest(**({"token_ids": [1, 2, 3], "max_tokens": 4} | fields))


def test_defaults_are_greedy_and_unconstrained():
    checked = check(request(), BOUNDS)
    assert checked.prompt == (1, 2, 3)
    assert len(checked.params) == 1
    assert checked.params[0].greedy
    assert checked.params[0].top_p == checked.params[0].repetition_penalty == 1.0
    assert checked.grammar is checked.logprobs is checked.deadline_s is None
    assert checked.priority is Priority.INTERACTIVE


@pytest.mark.parametrize(
    ("fields", "code", "names"),
    [
        ({"token_ids": []}, pb.CODE_INVALID, "token_ids"),
        ({"token_ids": [100]}, pb.CODE_INVALID, "token_ids"),
        ({"token_ids": [1] * 32}, pb.CODE_PROMPT_TOO_LONG, "token_ids"),
        ({"max_tokens": 0}, pb.CODE_INVALID, "max_tokens"),
        ({"min_tokens": 5}, pb.CODE_INVALID, "min_tokens"),
        ({"n": 9}, pb.CODE_INVALID, "n:"),
        ({"stop": [""]}, pb.CODE_INVALID, "stop"),
        ({"stop": ["x" * 2000]}, pb.CODE_INVALID, "stop"),
        ({"stop": ["x"] * 65}, pb.CODE_INVALID, "stop"),
        ({"stop_token_ids": [100]}, pb.CODE_INVALID, "stop_token_ids"),
        ({"logprobs": 21}, pb.CODE_INVALID, "logprobs"),
        ({"images": [b"x"]}, pb.CODE_UNSUPPORTED, "images"),
        ({"import_ticket": b"x"}, pb.CODE_INVALID, "import_ticket"),
        ({"export_ticket": b"x"}, pb.CODE_INVALID, "export_ticket"),
        ({"grammar": "x" * 200_000}, pb.CODE_GRAMMAR, "grammar"),
        ({"canary": True}, pb.CODE_INVALID, "canary"),
        ({"sampling": pb.Sampling(temperature=-1)}, pb.CODE_INVALID, "temperature"),
        ({"sampling": pb.Sampling(temperature=math.nan)}, pb.CODE_INVALID, "temperature"),
        ({"sampling": pb.Sampling(top_p=1.5)}, pb.CODE_INVALID, "top_p"),
        ({"sampling": pb.Sampling(min_p=math.inf)}, pb.CODE_INVALID, "min_p"),
        ({"sampling": pb.Sampling(presence_penalty=11)}, pb.CODE_INVALID, "presence_penalty"),
        ({"sampling": pb.Sampling(logit_bias={100: 1.0})}, pb.CODE_INVALID, "logit_bias"),
        ({"sampling": pb.Sampling(logit_bias={1: math.nan})}, pb.CODE_INVALID, "logit_bias"),
        ({"sampling": pb.Sampling(allowed_token_ids=[1], bad_token_ids=[1])}, pb.CODE_INVALID, "bad_token_ids"),
        ({"sampling": pb.Sampling(bad_token_ids=list(range(100)))}, pb.CODE_INVALID, "bad_token_ids"),
    ],
)
def test_an_impossible_field_is_refused_by_name(fields, code, names):
    with pytest.raises(RequestRefusedError) as caught:
        check(request(**fields), BOUNDS)
    assert caught.value.code == code
    assert names in caught.value.detail


def test_choices_have_seeds_of_their_own():
    params = check(request(n=3, sampling=pb.Sampling(seed=2**64 - 1, temperature=1)), BOUNDS).params
    seeds = [entry.seed for entry in params]
    assert seeds[0] == 2**64 - 1
    assert len(set(seeds)) == 3
    again = check(request(n=3, sampling=pb.Sampling(seed=2**64 - 1, temperature=1)), BOUNDS).params
    assert [entry.seed for entry in again] == seeds
    other = check(request(n=3, sampling=pb.Sampling(seed=0, temperature=1)), BOUNDS).params
    assert not {entry.seed for entry in other} & set(seeds)


def test_without_a_seed_no_two_requests_draw_alike():
    seeds = {check(request(sampling=pb.Sampling(temperature=1)), BOUNDS).params[0].seed for _ in range(4)}
    assert len(seeds) == 4


@given(st.binary(max_size=300))
def test_any_bytes_give_a_checked_request_or_a_refusal(data):
    message = pb.GenerateRequest()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return
    try:
        checked = check(message, BOUNDS)
    except RequestRefusedError:
        return
    assert 1 <= len(checked.prompt) < BOUNDS.max_length
    assert max(checked.prompt) < BOUNDS.vocab_size
