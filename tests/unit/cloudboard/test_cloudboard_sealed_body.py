"""The ingress's parser of request bodies, on whatever a network may bring."""

import asyncio
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tie.cloudboard import sealed_body
from tie.cloudboard.uploads import Uploads
from tie.daemon.config import AppConfig, CloudBoardConfig, NodeConfig
from tie.envelope import sealing
from tie.envelope.frames import frame
from tie.http.exchange import Exchange
from tie.http.reply import RefusedRequestError
from tie.proto import envelope_pb2

HEADER = envelope_pb2.SealedIn(
    header=envelope_pb2.SealedHeader(
        version=1, node_id="node-0", key_id=bytes(16), sealed_dek=bytes(sealing.SEALED_DEK_BYTES), model="m"
    )
)
CONFIG = NodeConfig(app=AppConfig(max_request_bytes=1024, idle_timeout_s=5))


def segment(*, last: bool) -> envelope_pb2.SealedIn:
    return envelope_pb2.SealedIn(segment=envelope_pb2.SealedSegment(ciphertext=b"x" * 20, last=last))


class Stream:
    """The connection's side, counting what is given back of the window."""

    taken = 0

    def want_body(self) -> None:
        pass

    def took(self, size: int) -> None:
        self.taken += size

    def reset(self) -> None:
        raise AssertionError("the parser ends nothing")


def parse(
    chunks: Iterable[bytes], *, fault: str = "", length: bytes = b"", uploads: Uploads | None = None
) -> list[bool]:
    """The `last` flags of the segments of a body that comes in `chunks`."""

    async def run() -> list[bool]:
        stream, sent = Stream(), 0
        headers = [(b"content-length", length)] if length else []
        exchange = Exchange("POST", "/", headers, stream, 5.0)  # type: ignore[arg-type]
        for chunk in chunks:
            exchange.feed(chunk, len(chunk))
            sent += len(chunk)
        exchange.end_body(fault)
        with (uploads or Uploads(CONFIG)).begin() as upload:
            await sealed_body.receive(exchange, CONFIG.node_id, upload)
            assert stream.taken == sent
            return [segment.last for segment in upload.segments]

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


@pytest.mark.parametrize("fault", ["truncated", "bad_request"])
def test_a_body_that_breaks_off(fault: str) -> None:
    with pytest.raises(RefusedRequestError) as refused:
        parse([serialized(HEADER)], fault=fault)
    assert refused.value.code == fault


def test_a_body_without_its_last_segment() -> None:
    with pytest.raises(RefusedRequestError) as refused:
        parse([serialized(HEADER, segment(last=False))])
    assert refused.value.code == "truncated"


def test_uploads_hold_what_has_come_and_give_it_back() -> None:
    config = NodeConfig(cloudboard=CloudBoardConfig(upload_bytes=32 * 1024 * 1024))
    uploads = Uploads(config)
    body = serialized(HEADER, segment(last=True))
    with uploads.begin() as other:
        other.count(32 * 1024 * 1024 - len(body))
        assert parse([body], uploads=uploads) == [True]
        with pytest.raises(RefusedRequestError) as refused:
            parse([serialized(HEADER, segment(last=False), segment(last=True))], uploads=uploads)
        assert refused.value.code == "busy"
        other.drop()
        assert uploads.held == 0
    assert uploads.held == 0


def test_one_request_fits_whatever_the_configuration_says() -> None:
    size = 100 * 1024 * 1024
    uploads = Uploads(NodeConfig(app=AppConfig(max_request_bytes=size)))
    with uploads.begin() as upload:
        upload.count(size)
