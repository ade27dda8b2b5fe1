"""Request sizes: powers of two, whatever the request."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tie.envelope.errors import SealUsageError
from tie.envelope.padding import SMALLEST, pad_request
from tie.proto import request_pb2


def request(text: str) -> request_pb2.InferenceRequest:
    part = request_pb2.Part(text=text)
    return request_pb2.InferenceRequest(model="m", messages=[request_pb2.Message(role="user", parts=[part])])


@given(st.text(max_size=3000))
def test_size_is_a_power_of_two_and_the_request_survives(text: str) -> None:
    original = request(text)
    payload = pad_request(original)
    assert len(payload) >= SMALLEST
    assert len(payload).bit_count() == 1
    parsed = request_pb2.InferenceRequest.FromString(payload)
    parsed.ClearField("padding")
    assert parsed == original == request(text)


@pytest.mark.parametrize("length", [*range(900, 1100), *range(16300, 16400), 131_000, 131_072, 2_100_000])
def test_every_gap_around_a_bucket(length: int) -> None:
    size = len(pad_request(request("a" * length)))
    assert size.bit_count() == 1
    assert size < 2.02 * max(length, SMALLEST)


def test_padded_twice_is_a_bug() -> None:
    with pytest.raises(SealUsageError):
        pad_request(request_pb2.InferenceRequest(padding=b"\0"))
