"""Any bytes, on a real socket, to both parsers: no exception, an end, and nothing left behind."""

import asyncio
import socket
import struct
from collections.abc import Iterable
from typing import Any

import h2.config
import h2.connection
from hypothesis import given, settings
from hypothesis import strategies as st

from http_exchanges import answer
from tie.cloudboard.replies import reply as reply_of
from tie.http.connection import Connection
from tie.http.http2 import PREFACE
from tie.http.limits import Limits
from tie.http.server import Server

EXAMPLES = settings(max_examples=400, deadline=None)
SETTINGS = b"\0\0\0\4\0\0\0\0\0"


def send(pieces: Iterable[bytes]) -> bytes:
    """Everything that a server says to these bytes, until it closes."""

    async def run() -> bytes:
        loop = asyncio.get_running_loop()
        faults: list[dict[str, Any]] = []
        loop.set_exception_handler(lambda _, context: faults.append(context))
        server = Server(answer, Limits(), reply_of)
        theirs, ours = socket.socketpair()
        await loop.connect_accepted_socket(lambda: Connection(server), theirs)
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0)
            writer.write_eof()
            said = await asyncio.wait_for(reader.read(), 20)
        except ConnectionError:
            said = b""
        writer.close()
        async with asyncio.timeout(20):
            while len(server) or server._tasks or len(asyncio.all_tasks()) > 1:
                await asyncio.sleep(0)
        assert not faults
        assert server._streams == 0
        return said

    return asyncio.run(run())


LINES = [
    b"GET / HTTP/1.1\r\n", b"POST / HTTP/1.1\r\n", b"host: a\r\n", b"\r\n", b"content-length: 5\r\n", b"hello",
    b"0\r\n\r\n", b"transfer-encoding: chunked\r\n", b"5\r\nhello\r\n", b"connection: close\r\n", b"upgrade: h2c\r\n",
    b"expect: 100-continue\r\n", b"CONNECT a:1 HTTP/1.1\r\n", b"PRI * HTTP/2.0\r\n", b"HEAD / HTTP/1.0\r\n",
]  # fmt: skip


@EXAMPLES
@given(st.lists(st.one_of(st.binary(max_size=40), st.sampled_from(LINES)), max_size=14))
def test_any_lines(pieces: list[bytes]) -> None:
    said = send(pieces)
    if not b"".join(pieces).startswith(PREFACE):
        assert not said or said.startswith(b"HTTP/1.1 ")


def headers(stream_id: int, *, end: bool) -> bytes:
    """A whole request's HEADERS frame, whatever came before it on the connection."""
    client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    client.initiate_connection()
    client.data_to_send()
    client.send_headers(
        1, [(":method", "POST"), (":path", "/"), (":scheme", "http"), (":authority", "a")], end_stream=end
    )
    frame = bytearray(client.data_to_send())
    frame[5:9] = struct.pack(">I", stream_id)
    return bytes(frame)


STREAMS = st.sampled_from([0, 1, 1, 3, 3, 5, 2, 2**31 - 1, 2**32 - 1])


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    if draw(st.booleans()):
        return headers(draw(STREAMS) or 1, end=draw(st.booleans()))
    payload = draw(st.one_of(st.binary(max_size=60), st.sampled_from([b"\0\0\0\1", b"\x7f\xff\xff\xff", bytes(8)])))
    length = draw(st.sampled_from([len(payload)] * 8 + [0, len(payload) + 1, 2**24 - 1]))
    kind, flags = draw(st.integers(0, 12)), draw(st.sampled_from([0, 1, 4, 5, 8, 0x20, 0xFF]))
    return length.to_bytes(3, "big") + bytes([kind, flags]) + struct.pack(">I", draw(STREAMS)) + payload


@EXAMPLES
@given(st.lists(frames(), max_size=12))
def test_any_frames(pieces: list[bytes]) -> None:
    said = send([PREFACE, SETTINGS, *pieces])
    assert said[3] == 4  # the server's settings come first, whatever it heard


@EXAMPLES
@given(st.binary(max_size=200))
def test_any_bytes_after_the_preface(data: bytes) -> None:
    said = send([PREFACE, data])
    assert said[3] == 4
