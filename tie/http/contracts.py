"""What the parts of one connection know of one another."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from tie.http.exchange import Exchange
from tie.http.limits import Limits
from tie.http.reply import Reply
from tie.http.rooms import Room


class Host(Protocol):
    """The server, as what speaks on its connections sees it."""

    @property
    def limits(self) -> Limits:
        """Its limits."""

    @property
    def draining(self) -> bool:
        """Whether it takes no new requests."""

    def reply(self, code: str) -> Reply:
        """What is answered to what never became a request."""

    def count_streams(self, change: int) -> bool:
        """Counts HTTP/2 streams that begin or end; False, and nothing counted, when there are too many."""

    def serve_exchange(self, exchange: Exchange, done: Callable[[], None]) -> "asyncio.Task[None]":
        """Serves one request in a task, and calls `done` after it."""


class Line(Protocol):
    """A TCP connection, as the HTTP on it sees it."""

    @property
    def held(self) -> bool:
        """Whether the client does not take what was written: there is no sense in writing more."""

    def write(self, data: bytes) -> None:
        """Sends bytes."""

    def pause(self, paused: bool) -> None:  # noqa: FBT001 (a state, not a mode)
        """Stops reading, or takes it up unless the client is held."""

    def settle(self, room: Room | None) -> None:
        """The connection waits from now on, or it does not."""

    def linger(self) -> None:
        """Ends our half; closes when the client has closed its own, or after a while."""

    def close(self) -> None:
        """Closes it once everything written has been taken, or after a while."""

    def abort(self) -> None:
        """Closes it now."""


class Speaker(Protocol):
    """One version of HTTP on one connection."""

    def receive(self, data: bytes) -> None:
        """Bytes have come."""

    def eof(self) -> None:
        """The client has closed its half, or the whole connection: there is no telling."""

    def lost(self) -> None:
        """The connection is gone."""

    def wake(self) -> None:
        """The client reads again."""

    def late(self) -> None:
        """The connection has waited long enough for a request, or for the rest of one's head."""

    def drain(self) -> None:
        """The server stops: no new requests; the connection ends with those under way."""
