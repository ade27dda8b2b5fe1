"""One HTTP request and its response over ASGI: reads that end, writes that know whether they have begun."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any, Final

from tie.cloudboard.replies import REPLIES, RETRY_AFTER_S, RefusedRequestError, body

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

LINGER_S: Final = 600.0


class DisconnectedError(Exception):
    """The client went away."""


class Exchange:
    """One request.

    Attributes:
        started: whether the response has begun: from then on no other status can be given.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.started = False
        self._scope = scope
        self._receive = receive
        self._send = send
        self._received = asyncio.Event()

    @property
    def method(self) -> str:
        """The HTTP method, in upper case."""
        return str(self._scope["method"])

    @property
    def path(self) -> str:
        """The path, decoded."""
        return str(self._scope["path"])

    def header(self, name: bytes) -> bytes:
        """A request header (`name` in lower case), or empty."""
        return next((bytes(value) for key, value in self._scope["headers"] if key.lower() == name), b"")

    async def chunks(self, idle: float) -> AsyncIterator[bytes]:
        """The request body as it comes.

        Raises:
            DisconnectedError: the client went away.
            RefusedRequestError: nothing came for `idle` seconds.
        """
        while not self._received.is_set():
            try:
                async with asyncio.timeout(idle):
                    message = await self._next()
            except TimeoutError:
                raise RefusedRequestError("timeout") from None
            yield message.get("body", b"")

    async def disconnected(self) -> None:
        """Waits until the client goes away, which it may never do.

        Raises:
            DisconnectedError: always, in the end.
        """
        while True:
            await self._next()

    async def start(
        self, content_type: str, *, status: int = 200, headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        """Sends the response's head."""
        self.started = True
        head = [(b"content-type", content_type.encode()), (b"cache-control", b"no-store"), *headers]
        await self._send({"type": "http.response.start", "status": status, "headers": head})

    async def write(self, data: bytes) -> None:
        """Sends a piece of the response's body; waits while the client does not read."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self) -> None:
        """Ends the response.

        A response that ends while its request is still coming in takes the whole connection with it (the server does
        not expect data for a stream that it has closed), so the rest of the request is read and dropped first.
        """
        await self.linger()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def linger(self) -> None:
        """Reads and drops the rest of the request body, for `LINGER_S` seconds at most.

        Nothing but this one stream waits meanwhile: the request is no longer counted, and its status is out.
        """
        with contextlib.suppress(TimeoutError, DisconnectedError):
            async with asyncio.timeout(LINGER_S):
                while not self._received.is_set():
                    await self._next()

    async def reply(self, code: str) -> None:
        """Sends a whole reply of the table."""
        text = body(code)
        headers: tuple[tuple[bytes, bytes], ...] = ((b"content-length", b"%d" % len(text)),)
        if REPLIES[code].status == 503:
            headers += ((b"retry-after", b"%d" % RETRY_AFTER_S),)
        await self.start("application/json", status=REPLIES[code].status, headers=headers)
        await self.write(text)
        await self.finish()

    async def _next(self) -> MutableMapping[str, Any]:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise DisconnectedError
        if not message.get("more_body", False):
            self._received.set()
        return message
