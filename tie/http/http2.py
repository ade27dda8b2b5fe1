"""HTTP/2 on one connection (RFC 9113): many requests at once, each with its own flow control and its own end."""

import asyncio
import contextlib
import functools
from typing import Final

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings
from hyperframe.frame import GoAwayFrame

from tie.http.contracts import Host, Line
from tie.http.exchange import Exchange, Headers
from tie.http.frame_guard import FloodError, FrameGuard
from tie.http.limits import CONNECTION_WINDOW_BYTES, FRAME_BYTES, HEAD_BYTES, WINDOW_BYTES
from tie.http.rooms import Room

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # section 3.4
_CONFIG: Final = H2Configuration(client_side=False, header_encoding=None)
_DEFAULT_WINDOW: Final = 65_535


class Http2:
    """One connection."""

    __slots__ = ("_guard", "_h2", "_host", "_last", "_line", "_lingering", "_streams", "_time")

    def __init__(self, line: Line, host: Host) -> None:
        """Begins after the client's preface."""
        self._line = line
        self._host = host
        self._time = asyncio.get_running_loop().time
        self._guard = FrameGuard(self._time())
        self._streams: dict[int, _Stream] = {}
        self._lingering: dict[int, asyncio.TimerHandle] = {}  # answered, and their requests still come
        self._last = False  # no further requests are served here
        self._h2 = _Parser(_CONFIG)
        self._h2.local_settings = Settings(
            client=False,
            initial_values={
                SettingCodes.MAX_CONCURRENT_STREAMS: host.limits.streams,
                SettingCodes.INITIAL_WINDOW_SIZE: WINDOW_BYTES,
                SettingCodes.MAX_FRAME_SIZE: FRAME_BYTES,
                SettingCodes.MAX_HEADER_LIST_SIZE: HEAD_BYTES,
            },
        )
        self._h2.receive_data(PREFACE)
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(CONNECTION_WINDOW_BYTES - _DEFAULT_WINDOW)
        self._flush()

    def receive(self, data: bytes) -> None:
        """Bytes have come."""
        try:
            self._guard.watch(data, self._time())
            events = self._h2.receive_data(data)
        except FloodError as flood:
            self._end(flood.code)
            return
        except ProtocolError:
            self._flush()  # the parser's own GOAWAY
            self._end(None)
            return
        for event in events:
            self._handle(event)
        self._flush()
        self._settle()

    def eof(self) -> None:
        """The client has closed its half: it is gone."""
        self.lost()
        self._line.close()

    def lost(self) -> None:
        """The connection is gone."""
        self._last = True
        for timer in self._lingering.values():
            timer.cancel()
        self._host.count_streams(-len(self._lingering))
        self._lingering.clear()
        for stream in self._streams.values():
            stream.cancel()

    def wake(self) -> None:
        """The client reads again."""
        for stream in self._streams.values():
            stream.exchange.wake()

    def late(self) -> None:
        """The client has waited long enough with a request, or with its SETTINGS."""
        self._end(ErrorCodes.NO_ERROR)

    def drain(self) -> None:
        """The server stops."""
        self._last = True
        if self._streams:
            self._go_away(ErrorCodes.NO_ERROR)
        else:
            self._end(ErrorCodes.NO_ERROR)

    # The streams' side. A stream that is over takes everything and does nothing.

    def took(self, stream_id: int, size: int) -> None:
        """Gives a part of the flow-control windows back."""
        with contextlib.suppress(ProtocolError):
            self._h2.acknowledge_received_data(size, stream_id)
        self._flush()

    def head(self, stream_id: int, status: int, headers: Headers) -> None:
        """Sends a response's head."""
        with contextlib.suppress(ProtocolError):
            self._h2.send_headers(stream_id, [(b":status", b"%d" % status), *headers])
        self._flush()

    def send(self, stream_id: int, data: bytes) -> int:
        """Sends as much as flow control allows, and nothing while the client does not read at all."""
        if self._line.held:
            return 0
        try:
            size = min(len(data), self._h2.max_outbound_frame_size, self._h2.local_flow_control_window(stream_id))
            if size <= 0:
                return 0
            self._h2.send_data(stream_id, data[:size])
        except ProtocolError:
            return len(data)
        self._guard.earn(1)
        self._flush()
        return size

    def end(self, stream_id: int) -> None:
        """Ends a response."""
        with contextlib.suppress(ProtocolError):
            self._h2.end_stream(stream_id)
        self._flush()

    def reset(self, stream_id: int, code: ErrorCodes) -> None:
        """Ends a stream, whatever it was about."""
        with contextlib.suppress(ProtocolError):
            self._h2.reset_stream(stream_id, code)
        self._flush()

    # Events.

    def _handle(self, event: Event) -> None:
        match event:
            case RequestReceived():
                self._begin(event.stream_id or 0, event.headers or [])
            case DataReceived():
                size, stream = event.flow_controlled_length or 0, self._streams.get(event.stream_id or 0)
                if stream is None:
                    self.took(event.stream_id or 0, size)
                else:
                    stream.exchange.feed(event.data or b"", size)
            case StreamEnded() | StreamReset():
                self._close(event.stream_id or 0, reset=isinstance(event, StreamReset))
            case WindowUpdated() | RemoteSettingsChanged():
                self.wake()
            case ConnectionTerminated():
                # The parser sends nothing after a GOAWAY of the client, and who sends one is about to leave.
                self._end(None)

    def _begin(self, stream_id: int, headers: Headers) -> None:
        if self._last or not self._host.count_streams(1):
            self.reset(stream_id, ErrorCodes.REFUSED_STREAM)
            return
        fields = [(bytes(name), bytes(value)) for name, value in headers]
        pseudo = {name: value.decode("ascii", "replace") for name, value in fields if name.startswith(b":")}
        stream = _Stream(self, stream_id)
        path = pseudo.get(b":path", "").split("?", 1)[0]
        stream.exchange = Exchange(pseudo.get(b":method", ""), path, fields, stream, self._host.limits.write_s)
        self._streams[stream_id] = stream
        stream.task = self._host.serve_exchange(stream.exchange, functools.partial(self._over, stream_id))

    def _close(self, stream_id: int, *, reset: bool) -> None:
        """The client has ended its half of a stream, or all of it."""
        timer = self._lingering.pop(stream_id, None)
        stream = self._streams.get(stream_id)
        if timer is not None:
            timer.cancel()
            self._host.count_streams(-1)
        elif stream is not None and reset:
            stream.cancel()
        elif stream is not None:
            stream.exchange.end_body()

    def _over(self, stream_id: int) -> None:
        """A request has been answered, or broken off."""
        stream = self._streams.pop(stream_id)
        if stream.exchange.ended and not stream.exchange.received and not self._last:
            # Clients that send before they read see the answer only at the end of what they send.
            self._lingering[stream_id] = asyncio.get_running_loop().call_later(
                self._host.limits.linger_s, self._cut, stream_id
            )
        else:
            self._host.count_streams(-1)
        if self._last and not self._streams:
            self._end(None)
        self._settle()

    def _cut(self, stream_id: int) -> None:
        del self._lingering[stream_id]
        self._host.count_streams(-1)
        self.reset(stream_id, ErrorCodes.NO_ERROR)  # RFC 9113 section 8.1: the answer stands

    def _settle(self) -> None:
        if self._streams:
            self._line.settle(None)
        else:
            self._line.settle(Room.IDLE if self._guard.begun else Room.HEAD)

    def _end(self, code: ErrorCodes | None) -> None:
        """Ends the connection, with a GOAWAY unless that has been sent."""
        self.lost()
        if code is not None:
            self._go_away(code)
        self._line.linger()

    def _go_away(self, code: ErrorCodes) -> None:
        # The parser's own would make it refuse to end the streams under way.
        frame = GoAwayFrame(0, last_stream_id=self._h2.highest_inbound_stream_id, error_code=code)
        self._line.write(frame.serialize())

    def _flush(self) -> None:
        self._line.write(self._h2.data_to_send())


class _Parser(H2Connection):
    """The parser, keeping less than it would by default."""

    DEFAULT_MAX_HEADER_LIST_SIZE = HEAD_BYTES
    MAX_CLOSED_STREAMS = 1024


class _Stream:
    """One stream, as its exchange sees it."""

    __slots__ = ("_connection", "_id", "exchange", "task")

    exchange: Exchange
    task: "asyncio.Task[None]"

    def __init__(self, connection: Http2, stream_id: int) -> None:
        self._connection = connection
        self._id = stream_id

    def want_body(self) -> None:
        """HTTP/2 has flow control for this: the client has begun to send already."""

    def took(self, size: int) -> None:
        """`size` bytes of the body have been used."""
        self._connection.took(self._id, size)

    def head(self, status: int, headers: Headers) -> None:
        """Sends the response's head."""
        self._connection.head(self._id, status, headers)

    def send(self, data: bytes) -> int:
        """Sends as much as the client takes now."""
        return self._connection.send(self._id, data)

    def end(self) -> None:
        """Ends the response."""
        self._connection.end(self._id)

    def reset(self) -> None:
        """Breaks the stream off."""
        self._connection.reset(self._id, ErrorCodes.CANCEL)

    def cancel(self) -> None:
        """The client is not interested any more."""
        self.task.cancel()
