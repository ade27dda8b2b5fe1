"""Watches the headers of HTTP/2 frames as they come in, before anything parses the frames: floods end here.

Legal frames in illegal numbers are the stuff of most attacks on HTTP/2: streams that are opened and reset at once
(CVE-2023-44487), header blocks without end (CVE-2024-27316), and floods of pings, settings, priorities, window updates
and empty frames (CVE-2019-9511 to -9518). They have one cure: each such frame costs something, from an account that
fills up slowly. And since a parser waits for whole frames, this is also where a client that begins with no HTTP/2, or
with a frame larger than any that it may send, is noticed at its first nine bytes.
"""

from typing import Final

from h2.errors import ErrorCodes

from tie.http.limits import FRAME_BYTES, HEAD_BYTES

_DATA, _HEADERS, _PRIORITY, _RST_STREAM, _SETTINGS, _PUSH, _PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = range(10)
_COST: Final = {_HEADERS: 1, _RST_STREAM: 10, _SETTINGS: 10, _WINDOW_UPDATE: 1, _CONTINUATION: 4}
_OTHER_COST: Final = 2
_SMALL_BYTES: Final = 64  # data frames below this cost as well
_ACCOUNT: Final = 1024.0
_INCOME_PER_S: Final = 256.0
_SETTINGS_BYTES: Final = 64 * 6  # of the first frame: far more settings than there are
_HEADER: Final = 9
_END_HEADERS: Final = 0x4
_ACK: Final = 0x1


class FloodError(Exception):
    """The connection must end.

    Attributes:
        code: what to tell the client.
    """

    def __init__(self, code: ErrorCodes) -> None:
        super().__init__(code.name)
        self.code = code


class FrameGuard:
    """Reads along on one connection, after the preface.

    Attributes:
        begun: whether the client has begun with its settings, as it must.
    """

    __slots__ = ("_account", "_block", "_checked", "_header", "_left", "begun")

    def __init__(self, now: float) -> None:
        self._account = _ACCOUNT
        self._checked = now
        self._header = b""  # what has come of a frame's header
        self._left = 0  # of a frame's payload, still to come
        self._block = 0  # bytes of a header block that has begun and not ended
        self.begun = False

    def earn(self, frames: int) -> None:
        """Data went out, which a client may acknowledge with window updates."""
        self._account = min(_ACCOUNT, self._account + frames * 2)

    def watch(self, data: bytes, now: float) -> None:
        """Takes bytes as they come.

        Raises:
            FloodError: they must not be parsed.
        """
        self._account = min(_ACCOUNT, self._account + (now - self._checked) * _INCOME_PER_S)
        self._checked = now
        at = 0
        while at < len(data):
            if self._left:
                step = min(self._left, len(data) - at)
                self._left -= step
                at += step
                continue
            taken = data[at : at + _HEADER - len(self._header)]
            at += len(taken)
            self._header += taken
            if len(self._header) == _HEADER:
                header, self._header = self._header, b""
                self._left = int.from_bytes(header[:3], "big")
                self._frame(self._left, header[3], header[4], int.from_bytes(header[5:], "big"))

    def _frame(self, length: int, kind: int, flags: int, stream: int) -> None:
        if not self.begun:
            self.begun = True
            if kind != _SETTINGS or flags & _ACK or stream or length % 6 or length > _SETTINGS_BYTES:
                raise FloodError(ErrorCodes.PROTOCOL_ERROR)
        if length > FRAME_BYTES:
            raise FloodError(ErrorCodes.FRAME_SIZE_ERROR)
        if kind in {_HEADERS, _CONTINUATION}:
            self._block += length
            if self._block > HEAD_BYTES:
                raise FloodError(ErrorCodes.ENHANCE_YOUR_CALM)
            if flags & _END_HEADERS:
                self._block = 0
        self._account -= int(length < _SMALL_BYTES) if kind == _DATA else _COST.get(kind, _OTHER_COST)
        if self._account < 0:
            raise FloodError(ErrorCodes.ENHANCE_YOUR_CALM)
