"""The ingress's HTTP server alone, on a real socket, and clients that do what decent ones do not."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import h2.config
import h2.connection
import h2.events
import pytest

from http_exchanges import DEADLINE_S, answer, echo
from tie.cloudboard.replies import reply as reply_of
from tie.http.exchange import DisconnectedError, Exchange
from tie.http.limits import Limits
from tie.http.rooms import Room
from tie.http.server import Server


async def close(writer: asyncio.StreamWriter) -> None:
    """Closes a connection, whatever state it is in, and waits until its socket is gone."""
    writer.transport.abort()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


@dataclass
class Web:
    """A running server.

    Attributes:
        handler: what it does with an exchange; looked up when one comes.
        ended: how the handler ended for each exchange: "done", "cancelled", "disconnected".
    """

    handler: Callable[[Exchange], Awaitable[None]] = echo
    ended: list[str] = field(default_factory=list)
    server: Server = None  # type: ignore[assignment]
    port: int = 0
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    serving: "asyncio.Task[None]" = None  # type: ignore[assignment]
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def handle(self, exchange: Exchange) -> None:
        try:
            await answer(exchange, self.handler)
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise
        except DisconnectedError:
            self.ended.append("disconnected")
        else:
            self.ended.append("done")

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.005)

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection that is closed at the test's end at the latest."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        return reader, writer

    def hurry(self, room: Room, seconds: float = 0.0) -> None:
        """From now on connections may wait no longer than this."""
        self.server._rooms._patience[room] = seconds  # type: ignore[index]

    async def say(self, data: bytes) -> bytes:
        """Sends bytes; all that comes back until the server closes."""
        reader, writer = await self.open()
        writer.write(data)
        try:
            return await asyncio.wait_for(reader.read(), DEADLINE_S)
        finally:
            writer.close()

    async def stop(self) -> None:
        self.stopping.set()
        await asyncio.wait_for(self.serving, DEADLINE_S)
        for writer in self.writers:
            await close(writer)


@pytest.fixture
async def make_web() -> AsyncIterator[Callable[..., Awaitable[Web]]]:
    """Starts a server; keyword arguments are its limits."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(**limits: float) -> Web:
            web = Web()
            listening = socket.socket()
            listening.bind(("127.0.0.1", 0))
            listening.listen()
            web.port = listening.getsockname()[1]
            web.server = Server(web.handle, Limits(**limits), reply_of)  # type: ignore[arg-type]
            web.serving = asyncio.create_task(web.server.serve(listening, web.stopping))
            stack.push_async_callback(web.stop)
            return web

        yield make


@pytest.fixture
async def web(make_web: Callable[..., Awaitable[Web]]) -> Web:
    return await make_web()


class Http2Client:
    """A client of one connection, with every frame in the test's hands."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self.events: list[h2.events.Event] = []
        self.acknowledging = True
        self.closed = False

    def flush(self) -> None:
        self.writer.write(self.h2.data_to_send())

    def request(self, method: str = "POST", path: str = "/", *, end: bool = False) -> int:
        stream_id = self.h2.get_next_available_stream_id()
        names = ((":method", method), (":path", path), (":scheme", "http"), (":authority", "node"))
        self.h2.send_headers(stream_id, names, end_stream=end)
        self.flush()
        return stream_id

    def body(self, stream_id: int, data: bytes, *, end: bool = True) -> None:
        self.h2.send_data(stream_id, data, end_stream=end)
        self.flush()

    def reset(self, stream_id: int) -> None:
        self.h2.reset_stream(stream_id, 8)
        self.flush()

    async def pump(self) -> bool:
        """Takes what comes; False when the server has closed."""
        try:
            data = await asyncio.wait_for(self.reader.read(65536), DEADLINE_S)
        except ConnectionError:
            data = b""
        if not data:
            self.closed = True
            return False
        for event in self.h2.receive_data(data):
            self.events.append(event)
            if isinstance(event, h2.events.DataReceived) and self.acknowledging:
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        with contextlib.suppress(ConnectionError):
            self.flush()
        return True

    async def until(self, kind: type[h2.events.Event], stream_id: int | None = None) -> h2.events.Event:
        """Waits for an event."""
        while True:
            for event in self.events:
                if isinstance(event, kind) and stream_id in {None, getattr(event, "stream_id", None)}:
                    return event
            assert await self.pump(), f"the server closed before {kind.__name__}: {self.events}"

    async def answer(self, stream_id: int) -> tuple[int, bytes]:
        """Status and body of a whole response."""
        await self.until(h2.events.StreamEnded, stream_id)
        status, data = 0, b""
        for event in self.events:
            if getattr(event, "stream_id", None) == stream_id:
                if isinstance(event, h2.events.ResponseReceived):
                    status = int(dict(event.headers)[b":status"])
                elif isinstance(event, h2.events.DataReceived):
                    data += event.data
        return status, data

    async def error(self, stream_id: int) -> tuple[int, str]:
        """Status and code of a reply."""
        status, data = await self.answer(stream_id)
        return status, json.loads(data)["error"]


@pytest.fixture
async def http2() -> AsyncIterator[Callable[[int], Awaitable[Http2Client]]]:
    """Connects an HTTP/2 client to a port."""
    clients: list[Http2Client] = []

    async def connect(port: int) -> Http2Client:
        client = Http2Client(*await asyncio.open_connection("127.0.0.1", port))
        clients.append(client)
        client.h2.initiate_connection()
        client.flush()
        return client

    yield connect
    for client in clients:
        await close(client.writer)
