"""One HTTP request and its response, as the application sees them, over either version of HTTP."""

import asyncio
import email.utils
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from tie.http.limits import Pace
from tie.http.reply import RefusedRequestError, Reply

Headers = Sequence[tuple[bytes, bytes]]


class DisconnectedError(Exception):
    """The client went away, or does not take its answer."""


class Stream(Protocol):
    """The way back to the client: one HTTP/2 stream, or an HTTP/1.1 connection for the time of one request."""

    def want_body(self) -> None:
        """The body will be read: a client that waits to be asked for it (`Expect: 100-continue`) is asked."""

    def took(self, size: int) -> None:
        """`size` bytes of the body have been used: as many more may come."""

    def head(self, status: int, headers: Headers) -> None:
        """Sends the response's head."""

    def send(self, data: bytes) -> int:
        """Sends as much of the response's body as the client takes now; returns how much."""

    def end(self) -> None:
        """Ends the response."""

    def reset(self) -> None:
        """Breaks the exchange off."""


class Exchange:
    """One request. The connection feeds it; the application reads it and answers.

    A client that goes away cancels the task that serves the exchange.

    Attributes:
        method: the HTTP method, in upper case.
        path: of the request's target, without the query.
        started: whether the response has begun: from then on no other status can be given.
        ended: whether the response has been sent to its end.
        received: whether the request has come to its end.
    """

    __slots__ = (
        "_body",
        "_changed",
        "_dropping",
        "_fault",
        "_headers",
        "_stream",
        "_writable",
        "_write_s",
        "ended",
        "method",
        "path",
        "received",
        "started",
    )

    def __init__(self, method: str, path: str, headers: Headers, stream: Stream, write_s: float) -> None:
        self.method = method
        self.path = path
        self.started = self.ended = self.received = False
        self._headers = headers
        self._stream = stream
        self._write_s = write_s
        self._body: deque[tuple[bytes, int]] = deque()
        self._dropping = False
        self._fault = ""
        self._changed = asyncio.Event()
        self._writable = asyncio.Event()

    def header(self, name: bytes) -> bytes:
        """A request header (`name` in lower case), or empty."""
        return next((value for key, value in self._headers if key == name), b"")

    async def chunks(self, pace: Pace) -> AsyncIterator[bytes]:
        """The request body as it comes.

        Raises:
            RefusedRequestError: it comes too slowly, or what comes is no HTTP.
        """
        now = asyncio.get_running_loop().time
        begun, count = now(), 0
        self._stream.want_body()
        while True:
            while self._body:
                data, size = self._body.popleft()
                count += len(data)
                self._stream.took(size)
                yield data
            if self._fault:
                raise RefusedRequestError(self._fault)
            if self.received:
                return
            self._changed.clear()
            try:
                async with asyncio.timeout_at(pace.until(begun, now(), count)):
                    await self._changed.wait()
            except TimeoutError:
                raise RefusedRequestError("timeout") from None

    async def start(self, content_type: str, *, status: int = 200, headers: Headers = ()) -> None:
        """Sends the response's head."""
        self.started = True
        self._stream.head(status, [*beginning(content_type), *headers])

    async def write(self, data: bytes) -> None:
        """Sends a piece of the response's body; waits while the client does not read.

        Raises:
            DisconnectedError: it has not read for too long; the exchange is broken off.
        """
        if self.method == "HEAD":
            return
        try:
            async with asyncio.timeout(self._write_s):
                while data:
                    self._writable.clear()
                    size = self._stream.send(data)
                    data = data[size:]
                    if not size:
                        await self._writable.wait()
        except TimeoutError:
            self._stream.reset()
            raise DisconnectedError from None

    async def finish(self) -> None:
        """Ends the response."""
        self.ended = True
        self._stream.end()

    async def reply(self, reply: Reply) -> None:
        """Sends a whole reply."""
        await self.start("application/json", status=reply.status, headers=reply_headers(reply))
        await self.write(reply.body)
        await self.finish()

    def feed(self, data: bytes, size: int) -> None:
        """A piece of the request's body; `size` is what it took of the flow-control window."""
        if self._dropping:
            self._stream.took(size)
        else:
            self._body.append((data, size))
            self._changed.set()

    def end_body(self, fault: str = "") -> None:
        """Nothing more comes of the request; `fault` is the code of why, unless that is its end."""
        self.received, self._fault = not fault, fault
        self._changed.set()

    def wake(self) -> None:
        """The client may take more of the response now."""
        self._writable.set()

    def close(self) -> None:
        """The application is done with it: what has not been read never will be."""
        self._dropping = True
        while self._body:
            self._stream.took(self._body.popleft()[1])
        if not self.ended:
            self._stream.reset()


def beginning(content_type: str) -> list[tuple[bytes, bytes]]:
    """The headers that every response has."""
    date = email.utils.formatdate(usegmt=True)
    return [(b"date", date.encode()), (b"content-type", content_type.encode()), (b"cache-control", b"no-store")]


def reply_headers(reply: Reply) -> list[tuple[bytes, bytes]]:
    """The headers of a reply, beside those that every response has."""
    return [(b"content-length", b"%d" % len(reply.body)), *reply.headers]
