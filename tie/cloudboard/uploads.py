"""Requests on their way in: how much memory they may hold together, and how fast they must come."""

from types import TracebackType
from typing import Final, Self

from tie.daemon.config import NodeConfig
from tie.envelope.stream import Direction
from tie.http.limits import Pace
from tie.http.reply import RefusedRequestError
from tie.proto import envelope_pb2

FRAME_LIMIT: Final = Direction.REQUEST.max_ciphertext_bytes + 4096


class Uploads:
    """All uploads of the ingress.

    An upload has no place among the requests in flight: it becomes one when it is whole. What it holds is the memory of
    what has really come of it, so that a slow client costs what it has sent and nothing more.

    Attributes:
        held: bytes that all uploads hold together.
        largest: the size of one; a larger one cannot be a request within `app.max_request_bytes`.
        pace: how fast each must come.
    """

    def __init__(self, config: NodeConfig) -> None:
        self.held = 0
        self.pace = Pace(idle_s=config.app.idle_timeout_s, whole_s=config.cloudboard.upload_deadline_s)
        # Beside the plaintext: authentication tags, frames, a header. The jobhelper counts the plaintext exactly.
        self.largest = config.app.max_request_bytes + config.app.max_request_bytes // 8 + FRAME_LIMIT
        self._limit = max(config.cloudboard.upload_bytes, self.largest)

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
        segments: what has come, in order.
    """

    def __init__(self, uploads: Uploads) -> None:
        self.segments: list[envelope_pb2.SealedSegment] = []
        self._uploads = uploads
        self._held = 0

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
        self._uploads.take(size)
        self._held += size

    def drop(self) -> None:
        """It is not needed any more."""
        self.segments.clear()
        self._uploads.give(self._held)
        self._held = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.drop()
