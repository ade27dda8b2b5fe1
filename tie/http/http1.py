"""HTTP/1.1 on one connection (RFC 9112): one request after another, the errors of the protocol as JSON."""

import asyncio
from typing import Final

import h11

from tie.http.contracts import Host, Line
from tie.http.exchange import Exchange, Headers, beginning, reply_headers
from tie.http.limits import HEAD_BYTES, UNREAD_BYTES
from tie.http.rooms import Room

_CLOSE: Final = (b"connection", b"close")
_VERSIONS: Final = (b"1.0", b"1.1")
_BAD: Final = 400
_TOO_LARGE: Final = 431


class Http1:
    """One connection. It is its own `exchange.Stream`: there is one request at a time."""

    __slots__ = ("_deaf", "_exchange", "_h11", "_host", "_last", "_line", "_task", "_unread")

    def __init__(self, line: Line, host: Host) -> None:
        self._line = line
        self._host = host
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES)
        self._exchange: Exchange | None = None
        self._task: asyncio.Task[None] | None = None
        self._unread = 0  # of the request's body
        self._deaf = False  # what comes is no HTTP any more
        self._last = False  # no further request is served here

    def receive(self, data: bytes) -> None:
        """Bytes have come."""
        if self._deaf:
            return
        try:
            self._h11.receive_data(data)
        except h11.RemoteProtocolError:
            return  # after the client has ended its half: there is nothing that it could still ask
        self._advance()

    def eof(self) -> None:
        """The client has closed its half: with a request that is not whole it gets an answer, else it is gone."""
        if self._exchange is not None and not self._exchange.received:
            self._last = True
            self._exchange.end_body("truncated")
        else:
            self._line.close()
            self.lost()

    def lost(self) -> None:
        """The connection is gone."""
        self._last = True
        if self._task is not None:
            self._task.cancel()

    def wake(self) -> None:
        """The client reads again."""
        if self._exchange is not None:
            self._exchange.wake()

    def late(self) -> None:
        """The client has waited long enough with a request, or with the rest of one's head."""
        if self._h11.trailing_data[0]:
            self._refuse("timeout")
        else:
            self._line.close()

    def drain(self) -> None:
        """The server stops."""
        self._last = True
        if self._exchange is None:
            self._line.close()

    # The exchange's side.

    def want_body(self) -> None:
        """Asks a client for the body that waits to be asked for it."""
        if self._h11.they_are_waiting_for_100_continue:
            self._send(h11.InformationalResponse(status_code=100, headers=[]))

    def took(self, size: int) -> None:
        """Some of the body has been used."""
        self._unread -= size
        self._meter()

    def head(self, status: int, headers: Headers) -> None:
        """Sends the response's head."""
        unfinished = self._exchange is not None and not self._exchange.received
        self._last = self._last or unfinished or self._host.draining
        self._send(h11.Response(status_code=status, headers=[*headers, _CLOSE] if self._last else list(headers)))

    def send(self, data: bytes) -> int:
        """Sends a piece of the response, unless the client does not read."""
        if self._line.held:
            return 0
        self._send(h11.Data(data=data))
        return len(data)

    def end(self) -> None:
        """Ends the response."""
        self._send(h11.EndOfMessage())

    def reset(self) -> None:
        """Breaks the response off: in HTTP/1.1 only the end of the connection says so."""
        self._last = True
        self._line.abort()

    # Between requests.

    def _advance(self) -> None:
        """Takes what has come as far as possible."""
        while True:
            try:
                event = self._h11.next_event()
            except h11.RemoteProtocolError as error:
                self._malformed(error.error_status_hint)
                return
            match event:
                case h11.Request() if event.http_version not in _VERSIONS:
                    self._malformed(_BAD)
                    return
                case h11.Request():
                    self._begin(event)
                case h11.Data():
                    self._unread += len(event.data)
                    if self._exchange is not None:
                        self._exchange.feed(bytes(event.data), len(event.data))
                case h11.EndOfMessage():
                    if self._exchange is not None:
                        self._exchange.end_body()
                case _:
                    break
        if self._exchange is None:
            self._line.settle(Room.HEAD if self._h11.trailing_data[0] else Room.IDLE)
        self._meter()

    def _meter(self) -> None:
        """Takes no more in than is asked for soon: of a body, and of what a client sends after its request."""
        self._line.pause(max(self._unread, len(self._h11.trailing_data[0])) > UNREAD_BYTES)

    def _begin(self, request: h11.Request) -> None:
        self._line.settle(None)
        path = request.target.split(b"?", 1)[0].decode("ascii", "replace")
        self._exchange = Exchange(
            request.method.decode("ascii", "replace"), path, list(request.headers), self, self._host.limits.write_s
        )
        self._unread = 0
        self._task = self._host.serve_exchange(self._exchange, self._over)

    def _over(self) -> None:
        """A request has been answered, or broken off."""
        exchange, self._exchange, self._task = self._exchange, None, None
        if exchange is None or not exchange.ended:
            return
        if self._last or self._h11.our_state is not h11.DONE or self._h11.their_state is not h11.DONE:
            self._line.linger()
            return
        self._h11.start_next_cycle()
        self._advance()

    def _malformed(self, status: int) -> None:
        code = "headers_too_large" if status == _TOO_LARGE else "bad_request"
        self._deaf = self._last = True
        if self._exchange is None:
            self._refuse(code)
        elif not self._exchange.received:
            self._exchange.end_body(code)

    def _refuse(self, code: str) -> None:
        """Answers what never became a request."""
        reply = self._host.reply(code)
        headers = [*beginning("application/json"), *reply_headers(reply), _CLOSE]
        self._send(h11.Response(status_code=reply.status, headers=headers))
        self._send(h11.Data(data=reply.body))
        self._send(h11.EndOfMessage())
        self._line.linger()

    def _send(self, event: h11.Event) -> None:
        try:
            data = self._h11.send(event)
        except h11.LocalProtocolError:
            # The state of a broken connection allows nothing any more.
            self._line.abort()
            return
        self._line.write(data or b"")
