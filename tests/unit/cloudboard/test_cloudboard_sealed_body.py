"""The ingress's parser of request bodies, on whatever a network may bring."""

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tie.cloudboard.exchange import DisconnectedError, Exchange
from tie.cloudboard.replies import RefusedRequestError
from tie.cloudboard.sealed_body import SealedBody
from tie.daemon.config import AppConfig, NodeConfig
from tie.envelope import sealing
from tie.envelope.frames import frame
from tie.proto import envelope_pb2

HEADER = envelope_pb2.SealedIn(
    header=envelope_pb2.SealedHeader(
        version=1, node_id="node-0", key_id=bytes(16), sealed_dek=bytes(sealing.SEALED_DEK_BYTES), model="m"
    )
)
CONFIG = NodeConfig(app=AppConfig(max_request_bytes=1024, idle_timeout_s=5))


def segment(*, last: bool) -> envelope_pb2.SealedIn:
    return envelope_pb2.SealedIn(segment=envelope_pb2.SealedSegment(ciphertext=b"x" * 20, last=last))


def parse(chunks: Iterable[bytes], *, disconnect: bool = False, length: bytes = b"") -> list[bool]:
    """The `last` flags of the segments of a body that comes in `chunks`."""

    async def run() -> list[bool]:
        messages: list[dict[str, Any]] = [
            {"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks
        ]
        end = {"type": "http.disconnect"} if disconnect else {"type": "http.request", "body": b"", "more_body": False}
        pending = iter([*messages, end])

        async def receive() -> dict[str, Any]:
            return next(pending)

        async def send(message: Any) -> None:
            raise AssertionError("the parser sends nothing")

        headers = [(b"content-length", length)] if length else []
        body = SealedBody(Exchange({"headers": headers}, receive, send), CONFIG)
        await body.header()
        return [one.last async for one in body.segments()]

    return asyncio.run(run())


def serialized(*messages: envelope_pb2.SealedIn) -> bytes:
    return b"".join(frame(message.SerializeToString()) for message in messages)


@given(st.data())
def test_any_division_into_chunks_is_the_same_body(data: st.DataObject) -> None:
    body = serialized(HEADER, segment(last=False), segment(last=True))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=8)))
    chunks = [body[start:end] for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    assert parse(chunks) == [False, True]


@given(st.lists(st.binary(max_size=2000), max_size=5))
def test_any_bytes_are_refused_with_a_code(chunks: list[bytes]) -> None:
    with pytest.raises(RefusedRequestError) as refused:
        parse(chunks)
    assert refused.value.code in {"bad_frame", "bad_version", "unknown_node", "truncated", "too_large"}


@given(st.binary(max_size=300))
def test_any_bytes_after_the_header(data: bytes) -> None:
    codes = set()
    try:
        parse([serialized(HEADER), data])
    except RefusedRequestError as refused:
        codes.add(refused.code)
    assert codes <= {"bad_frame", "truncated", "too_large"}


@pytest.mark.parametrize("length", [b"99999999", b"9" * 5000])
def test_a_length_over_the_limit_is_refused_unread(length: bytes) -> None:
    with pytest.raises(RefusedRequestError) as refused:
        parse(iter([]), length=length)
    assert refused.value.code == "too_large"


def test_more_than_it_said() -> None:
    with pytest.raises(RefusedRequestError) as refused:
        parse([serialized(HEADER), *[serialized(segment(last=False))] * 5000], length=b"10")
    assert refused.value.code == "too_large"


def test_a_client_that_goes_away() -> None:
    with pytest.raises(DisconnectedError):
        parse([serialized(HEADER)], disconnect=True)
