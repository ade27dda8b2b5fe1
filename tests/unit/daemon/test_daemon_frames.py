"""Frames: what one side writes the other reads; every way of cutting, bloating or delaying them has its own error."""

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tie.daemon import frames
from tie.daemon.errors import PeerDiedError, PeerTimeoutError, ProtocolError
from tie.proto import app_pb2


def fed(data: bytes, *, end: bool = True) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    if end:
        reader.feed_eof()
    return reader


async def test_frames_are_read_one_by_one_and_then_the_clean_end():
    reader = fed(frames.frame(b"one") + frames.frame(b"") + frames.frame(b"three"))
    read = [await frames.read_bytes(reader, limit=5, timeout=1) for _ in range(4)]
    assert read == [b"one", b"", b"three", None]


@pytest.mark.parametrize("cut", [1, 3, 4, 6])
async def test_a_frame_cut_short_is_a_dead_peer(cut):
    with pytest.raises(PeerDiedError):
        await frames.read_bytes(fed(frames.frame(b"abc")[:cut]), limit=5, timeout=1)


async def test_an_oversized_frame_is_refused_before_it_is_read():
    reader = fed(frames.PREFIX.pack(6), end=False)
    with pytest.raises(frames.FrameTooLargeError):
        await frames.read_bytes(reader, limit=5, timeout=1)


async def test_a_silent_peer_and_a_slow_one_run_into_their_deadlines():
    with pytest.raises(PeerTimeoutError):
        await frames.read_bytes(fed(b"", end=False), limit=5, timeout=1000, idle=0.01)
    with pytest.raises(PeerTimeoutError):
        await frames.read_bytes(fed(b"\0\0", end=False), limit=5, timeout=0.01, idle=math.inf)


async def test_a_peer_may_be_silent_for_ever_where_the_caller_says_so():
    reader = fed(b"", end=False)
    reading = asyncio.create_task(frames.read_bytes(reader, limit=5, timeout=0.01, idle=math.inf))
    done, _ = await asyncio.wait([reading], timeout=0.1)
    assert not done
    reader.feed_data(frames.frame(b"late"))
    assert await reading == b"late"


@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_are_a_protocol_error_and_nothing_else(data):
    try:
        message = frames.parse(data, app_pb2.AppIn)
    except ProtocolError as error:
        message, text = None, str(error)
    else:
        text = ""
    assert isinstance(message, app_pb2.AppIn) or text == "not a message of the expected type"


@given(st.binary(max_size=300), st.integers(0, 300))
def test_any_bytes_from_a_peer_end_in_a_frame_an_end_or_a_peer_error(data, limit):
    async def read_all() -> None:
        reader = fed(data)
        while (payload := await frames.read_bytes(reader, limit=limit, timeout=1)) is not None:
            assert len(payload) <= limit

    try:
        asyncio.run(read_all())
    except (PeerDiedError, ProtocolError):
        assert data


async def connected(tmp_path) -> tuple[asyncio.StreamWriter, asyncio.StreamReader, asyncio.StreamWriter]:
    import socket

    ours, theirs = socket.socketpair()
    _, writer = await asyncio.open_connection(sock=ours)
    reader, other = await asyncio.open_connection(sock=theirs)
    return writer, reader, other


async def test_written_messages_arrive_whole_and_in_order(tmp_path):
    writer, reader, other = await connected(tmp_path)
    await frames.write_bytes(writer, b"a", b"", b"c", timeout=1)
    await frames.write_message(writer, app_pb2.AppIn(abort=app_pb2.Abort()), timeout=1)
    read = [await frames.read_bytes(reader, limit=10, timeout=1) for _ in range(3)]
    last = await frames.read_message(reader, app_pb2.AppIn, limit=10, timeout=1)
    assert read == [b"a", b"", b"c"]
    assert last is not None
    assert last.WhichOneof("kind") == "abort"
    writer.close()
    other.close()


async def test_a_peer_that_does_not_read_and_one_that_is_gone(tmp_path):
    writer, _, other = await connected(tmp_path)
    with pytest.raises(PeerTimeoutError):
        await frames.write_bytes(writer, bytes(64 << 20), timeout=0.05)
    other.transport.abort()
    with pytest.raises(PeerDiedError):
        await frames.write_bytes(writer, b"x", timeout=1)
    writer.transport.abort()
    await asyncio.sleep(0)
