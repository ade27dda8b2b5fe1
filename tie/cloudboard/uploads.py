"""Requests on their way in: how much memory they may hold together, and how fast they must come."""

from typing import Final, Self

from tie.daemon.config import NodeConfig
from tie.envelope.frames import frame
from tie.envelope.stream import TAG_BYTES, Direction
from tie.http.limits import Pace
from tie.http.reply import RefusedRequestError
from tie.proto import envelope_pb2

_SPARE: Final = 8  # a buffer that grows is up to one part in so many larger than what it holds
_FEW_SEGMENTS: Final = 64  # that any request may have, and then one for each so many bytes of the largest request:
_SEGMENT_BYTES: Final = 1024


class Uploads:
    """All uploads of the ingress.

    An upload has no place among the requests in flight: it becomes one when it is whole. What it holds is the memory of
    what has really come of it, so that a slow client costs what it has sent and nothing more.

    Attributes:
        held: bytes that all uploads hold together.
        largest: the size of one; a larger one cannot be a request within `app.max_request_bytes`.
        most_segments: of one. Each costs every process that it passes more than its bytes.
        pace: how fast each must come.
    """

    def __init__(self, config: NodeConfig) -> None:
        self.held = 0
        self.pace = Pace(idle_s=config.app.idle_timeout_s, whole_s=config.cloudboard.upload_deadline_s)
        # Beside the plaintext: authentication tags, frames, a header. The jobhelper counts the plaintext exactly.
        request_bytes = config.app.max_request_bytes
        self.largest = request_bytes + request_bytes // 8 + Direction.REQUEST.max_frame_bytes
        self.most_segments = _FEW_SEGMENTS + request_bytes // _SEGMENT_BYTES
        self._limit = max(config.cloudboard.upload_bytes, _charge(self.largest))

    def begin(self) -> "Upload":
        """A new upload."""
        return Upload(self)

    def take(self, count: int) -> None:
        """Counts `count` more bytes.

        Raises:
            RefusedRequestError: "busy": there is no memory for them.
        """
        if self.held + count > self._limit:
            raise RefusedRequestError("busy")
        self.held += count

    def give(self, count: int) -> None:
        """Counts `count` fewer."""
        self.held -= count


class Upload:
    """One request's sealed segments, for as long as they may be needed: `with uploads.begin() as upload`.

    Attributes:
        body: what has come, as the frames that a jobhelper takes: one buffer, however small the segments are.
    """

    def __init__(self, uploads: Uploads) -> None:
        self.body = bytearray()
        self._uploads = uploads
        self._size = 0
        self._segments = 0

    @property
    def pace(self) -> Pace:
        """How fast it must come."""
        return self._uploads.pace

    @property
    def largest(self) -> int:
        """How large it may become."""
        return self._uploads.largest

    def count(self, size: int) -> None:
        """`size` more bytes have come. Raises as `Uploads.take`."""
        self._uploads.take(_charge(self._size + size) - _charge(self._size))
        self._size += size

    def add(self, segment: envelope_pb2.SealedSegment) -> None:
        """Keeps the next segment. Its bytes have been counted.

        Raises:
            RefusedRequestError: "bad_frame": nothing sealed is that short; "too_large": there are too many.
        """
        if len(segment.ciphertext) < TAG_BYTES:
            raise RefusedRequestError("bad_frame")
        if self._segments == self._uploads.most_segments:
            raise RefusedRequestError("too_large")
        self._segments += 1
        known = envelope_pb2.SealedSegment(ciphertext=segment.ciphertext, last=segment.last)
        self.body += frame(envelope_pb2.JobIn(segment=known).SerializeToString())

    def drop(self) -> None:
        """It is not needed any more."""
        self.body = bytearray()
        self._uploads.give(_charge(self._size))
        self._size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()


def _charge(size: int) -> int:
    """What a body of `size` bytes, as it came, takes of the memory. Its frames for a jobhelper are no longer."""
    return size + size // _SPARE
