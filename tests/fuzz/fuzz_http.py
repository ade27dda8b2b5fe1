"""What a fuzzer sends to the ingress's port: both versions of HTTP, and the body of a sealed request inside."""

import asyncio
from typing import Any, Final

from tie.cloudboard import sealed_body
from tie.cloudboard.replies import reply as reply_of
from tie.cloudboard.uploads import Uploads
from tie.daemon.config import AppConfig, NodeConfig
from tie.http.connection import Connection
from tie.http.exchange import Exchange
from tie.http.http2 import PREFACE
from tie.http.limits import Limits
from tie.http.reply import RefusedRequestError
from tie.http.server import Server

NODE: Final = "node-0"
SETTINGS: Final = b"\0\0\0\4\0\0\0\0\0"
_CONFIG: Final = NodeConfig(app=AppConfig(max_request_bytes=1024))
_TURNS: Final = 40  # of the event loop: more than anything here takes that does not wait for more bytes
_LOOP: Final = asyncio.new_event_loop()


class Wire(asyncio.Transport):
    """The connection's socket, in memory: whoever is at its other end reads at once, or not at all."""

    def __init__(self, connection: Connection, *, deaf: bool) -> None:
        super().__init__()
        self.said = bytearray()
        self.reading = True
        self._connection = connection
        self._deaf = deaf
        self._closing = False

    def write(self, data: bytes) -> None:  # type: ignore[override]
        assert not self._closing
        self.said += data
        if self._deaf:
            self._connection.pause_writing()

    def write_eof(self) -> None:
        """Nobody counts how often."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """There is no buffer."""

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            _LOOP.call_soon(self._connection.connection_lost, None)

    def abort(self) -> None:
        self.close()


def http(data: bytes) -> None:
    """One connection, as the first byte says; the second is how many of the following bytes come at once.

    Bit 0 begins it as HTTP/2, bit 1 cuts it instead of closing one half first, bit 2 has a client that never reads.
    """
    if len(data) < 3:
        return
    flags, size, rest = data[0], data[1] or 256, data[2:]
    pieces = [PREFACE + SETTINGS] if flags & 1 else []
    pieces += [rest[at : at + size] for at in range(0, len(rest), size)]
    said = _LOOP.run_until_complete(_spoken(pieces, cut=bool(flags & 2), deaf=bool(flags & 4)))
    if flags & 1:
        assert said[3] == 4, "the server's settings come first, whatever it heard"
    elif not b"".join(pieces).startswith(PREFACE):
        assert not said or said.startswith(b"HTTP/1.1 ")
        assert not said.startswith(b"HTTP/1.1 5")


async def _spoken(pieces: list[bytes], *, cut: bool, deaf: bool) -> bytes:
    faults: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    uploads = Uploads(_CONFIG)

    async def handler(exchange: Exchange) -> None:
        try:
            await _taken(exchange, uploads)
        except Exception as error:
            faults.append(error)
            raise

    server = Server(handler, Limits(), reply_of)
    connection = Connection(server)
    wire = Wire(connection, deaf=deaf)
    connection.connection_made(wire)
    for piece in pieces:
        await _settled(lambda: wire.reading)  # what does not read is not given anything
        if wire.is_closing() or not wire.reading:
            break
        connection.data_received(piece)
        await asyncio.sleep(0)
    if not cut and not wire.is_closing() and not connection.eof_received():
        wire.close()
    await _settled(lambda: not server._tasks)
    wire.close()
    await _settled(lambda: not len(server) and not server._tasks)
    assert not faults, faults
    assert (len(server), len(server._tasks), server._streams, uploads.held) == (0, 0, 0, 0)
    return bytes(wire.said)


async def _settled(condition: Any) -> None:
    for _ in range(_TURNS):
        if condition():
            return
        await asyncio.sleep(0)


async def _taken(exchange: Exchange, uploads: Uploads) -> None:
    """As the ingress does it, up to where a jobhelper would come."""
    try:
        with uploads.begin() as upload:
            header = await sealed_body.receive(exchange, NODE, upload)
            assert header.node_id == NODE
            assert len(upload.body) <= 2 * upload.largest
            await exchange.start("application/octet-stream")
            await exchange.write(bytes(upload.body))
        await exchange.finish()
    except RefusedRequestError as refusal:
        await exchange.reply(reply_of(refusal.code))
