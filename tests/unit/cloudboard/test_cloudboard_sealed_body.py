"""The ingress's parser of request bodies, on whatever a network may bring."""

import asyncio
import subprocess
import sys
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tie.cloudboard import sealed_body
from tie.cloudboard.uploads import Upload, Uploads
from tie.daemon import frames
from tie.daemon.config import AppConfig, CloudBoardConfig, NodeConfig
from tie.envelope import sealing
from tie.envelope.frames import FrameSplitter, frame
from tie.envelope.stream import Direction
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


def segments(upload: Upload) -> list[envelope_pb2.SealedSegment]:
    """What a jobhelper would be sent."""
    payloads = FrameSplitter(Direction.REQUEST.max_frame_bytes).feed(bytes(upload.body))
    return [frames.parse(payload, envelope_pb2.JobIn).segment for payload in payloads]


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
            return [segment.last for segment in segments(upload)]

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
    with pytest.raises(RefusedRequestError) as refused:  # a whole last segment comes by no chance
        parse([serialized(HEADER), data])
    assert refused.value.code in {"bad_frame", "truncated", "too_large"}


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
        room = 32 * 1024 * 1024 - len(body) - len(body) // 8
        other.count(room * 8 // 9)
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


def test_what_is_kept_is_what_was_sent_and_nothing_else() -> None:
    async def run() -> list[envelope_pb2.SealedSegment]:
        exchange = Exchange("POST", "/", [], Stream(), 5.0)  # type: ignore[arg-type]
        strange = segment(last=True).SerializeToString()
        strange = strange[:1] + bytes([strange[1] + 3]) + strange[2:] + b"\x98\x06\x01"  # a field that nobody knows
        for data in (serialized(HEADER, segment(last=False)), frame(strange)):
            exchange.feed(data, len(data))
        exchange.end_body()
        with Uploads(CONFIG).begin() as upload:
            await sealed_body.receive(exchange, CONFIG.node_id, upload)
            return segments(upload)

    assert asyncio.run(run()) == [segment(last=False).segment, segment(last=True).segment]


@pytest.mark.parametrize("size", [0, 15])
def test_a_segment_shorter_than_its_tag(size: int) -> None:
    short = envelope_pb2.SealedIn(segment=envelope_pb2.SealedSegment(ciphertext=bytes(size)))
    with pytest.raises(RefusedRequestError) as refused:
        parse([serialized(HEADER, short, segment(last=True))])
    assert refused.value.code == "bad_frame"


def test_more_segments_than_a_request_of_that_size_has() -> None:
    assert len(parse([serialized(HEADER, *[segment(last=False)] * 40, segment(last=True))])) == 41
    config = NodeConfig(app=AppConfig(max_request_bytes=64 * 1024, idle_timeout_s=5))
    assert Uploads(config).most_segments == 128
    body = serialized(HEADER, *[segment(last=False)] * 127, segment(last=True))
    assert len(parse([body], uploads=Uploads(config))) == 128
    with pytest.raises(RefusedRequestError) as refused:
        parse([serialized(HEADER, *[segment(last=False)] * 128, segment(last=True))], uploads=Uploads(config))
    assert refused.value.code == "too_large"


GREEDY = """
import asyncio, sys
from tie.cloudboard import sealed_body
from tie.cloudboard.uploads import Uploads
from tie.daemon.config import NodeConfig
from tie.envelope.frames import frame
from tie.http.reply import RefusedRequestError
from tie.proto import envelope_pb2

class Body:
    def header(self, name):
        return b""
    async def chunks(self, pace):
        header = envelope_pb2.SealedHeader(
            version=1, node_id="node-0", key_id=bytes(16), sealed_dek=bytes(1168), model="m"
        )
        yield frame(envelope_pb2.SealedIn(header=header).SerializeToString())
        segment = envelope_pb2.SealedSegment(ciphertext=bytes(int(sys.argv[1])))
        piece = frame(envelope_pb2.SealedIn(segment=segment).SerializeToString())
        many = piece * (64 * 1024 // len(piece) + 1)
        for _ in range(17 * 1024 * 1024 // len(many)):
            yield many

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

async def main():
    uploads = Uploads(NodeConfig())
    before = resident()
    with uploads.begin() as upload:
        try:
            await sealed_body.receive(Body(), "node-0", upload)
        except RefusedRequestError as refused:
            print(refused.code, resident() - before, uploads.held)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("size", "code"), [(0, "bad_frame"), (16, "too_large"), (1100, "truncated"), (32_784, "truncated")]
)
def test_the_process_holds_no_more_than_uploads_count(size: int, code: str) -> None:
    done = subprocess.run([sys.executable, "-c", GREEDY, str(size)], capture_output=True, check=True, timeout=300)
    found, grown, held = done.stdout.decode().split()
    assert found == code
    assert int(grown) <= int(held) + 4 * 1024 * 1024  # the interpreter's own, and one frame that was not whole
