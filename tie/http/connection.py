"""One TCP connection: finds out which HTTP it speaks, and holds what both versions need."""

import asyncio
from typing import Protocol, cast

from tie.http.contracts import Host, Speaker
from tie.http.http1 import Http1
from tie.http.http2 import PREFACE, Http2
from tie.http.limits import WRITE_BUFFER_BYTES
from tie.http.rooms import Room


class Registrar(Host, Protocol):
    """The server, as its connections see it."""

    def opened(self, connection: "Connection") -> bool:
        """A connection has come; False when there is no room for it."""

    def closed(self, connection: "Connection") -> None:
        """It is over."""

    def settle(self, connection: "Connection", room: Room | None) -> None:
        """It waits from now on, or it does not."""


class Connection(asyncio.Protocol):
    """One connection.

    Attributes:
        peer: the client's address.
        room: where it waits; written by the server's rooms.
        held: whether the client does not take what was written: there is no sense in writing more.
    """

    __slots__ = (
        "_beginning",
        "_ended",
        "_finished",
        "_full",
        "_host",
        "_speaker",
        "_transport",
        "held",
        "peer",
        "room",
    )

    def __init__(self, host: Registrar) -> None:
        self.peer = ""
        self.room: Room | None = None
        self.held = False
        self._ended = False  # the client's half
        self._finished = False  # our half
        self._full = False  # whoever speaks has enough for now
        self._host = host
        self._beginning = b""
        self._speaker: Speaker | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The event loop has accepted it."""
        self._transport = cast("asyncio.Transport", transport)
        address = transport.get_extra_info("peername")
        self.peer = address[0] if address else ""
        self._transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)
        if not self._host.opened(self):
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone, whoever ended it."""
        del exc
        self._host.closed(self)
        speaker, self._speaker = self._speaker, None
        if speaker is not None:
            speaker.lost()

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        if self._speaker is not None:
            self._speaker.receive(data)
        elif not self._finished:  # else it is read to be dropped
            self._begin(self._beginning + data)

    def eof_received(self) -> bool:
        """The client has closed its half, or the whole connection: there is no telling. Ours stays open."""
        self._ended = True
        if self._speaker is None:
            return False
        self._speaker.eof()
        return True

    def pause_writing(self) -> None:
        """The client does not read: it has to, before it is listened to."""
        self.held = True
        self._meter()

    def resume_writing(self) -> None:
        """It does."""
        self.held = False
        self._meter()
        if self._speaker is not None:
            self._speaker.wake()

    def pause(self, paused: bool) -> None:  # noqa: FBT001 (a state, not a mode)
        """Whoever speaks has enough for now, or can take more. A client that is held is not read from even so."""
        self._full = paused
        self._meter()

    def write(self, data: bytes) -> None:
        """Sends bytes."""
        if data and not self._finished and self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def settle(self, room: Room | None) -> None:
        """Waits from now on, or does not."""
        if not self._finished:
            self._host.settle(self, room)

    def linger(self) -> None:
        """Ends our half; closes when the client has closed its own, or after a while. Nothing is spoken any more.

        A socket that is closed while bytes still come to it makes the kernel reset the connection, and what was said
        last would be lost on the client.
        """
        if self._finished or self._transport is None or self._transport.is_closing():
            return
        if self._ended:
            self.close()
            return
        self._finish()
        try:
            self._transport.write_eof()
        except OSError:
            self._transport.abort()
            return
        self.held = self._full = False
        self._meter()

    def close(self) -> None:
        """Closes it once everything written has been taken, or after a while. Nothing is spoken any more."""
        if self._transport is not None:
            self._finish()
            self._transport.close()

    def abort(self) -> None:
        """Closes it now."""
        if self._transport is not None:
            self._transport.abort()

    def late(self) -> None:
        """It has waited long enough where it is."""
        if self._speaker is None:
            self.abort()
        else:
            self._speaker.late()

    def drain(self) -> None:
        """The server stops."""
        if self._speaker is None:
            self.abort()
        else:
            self._speaker.drain()

    def _meter(self) -> None:
        """Reads from the client exactly while neither side has reason not to."""
        if self._transport is not None and not self._transport.is_closing():
            (self._transport.pause_reading if self.held or self._full else self._transport.resume_reading)()

    def _finish(self) -> None:
        self.settle(Room.LINGER)
        self._finished = True
        self._speaker = None

    def _begin(self, data: bytes) -> None:
        if data.startswith(PREFACE):
            self._speaker = Http2(self, self._host)
            data = data[len(PREFACE) :]
        elif PREFACE.startswith(data):
            self._beginning = data
            self.settle(Room.HEAD)
            return
        else:
            self._speaker = Http1(self, self._host)
        self._beginning = b""
        self._speaker.receive(data)
