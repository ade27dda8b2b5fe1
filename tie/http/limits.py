"""Every limit of a server's HTTP in one place, with its default. Times are seconds, sizes bytes."""

from dataclasses import dataclass
from typing import Final

HEAD_BYTES: Final = 16 * 1024  # of one request's head
WINDOW_BYTES: Final = 256 * 1024  # of one upload on its way (HTTP/2 flow control, RFC 9113 section 5.2)
CONNECTION_WINDOW_BYTES: Final = 1024 * 1024  # of all uploads of a connection
FRAME_BYTES: Final = 16 * 1024  # payload of one HTTP/2 frame
WRITE_BUFFER_BYTES: Final = 64 * 1024  # written and not taken by the peer: beyond that writers wait
UNREAD_BYTES: Final = 64 * 1024  # received over HTTP/1.1 and not asked for yet: beyond that reading stops


@dataclass(frozen=True)
class Limits:
    """What one server allows.

    Attributes:
        connections: at once. Beyond that the one that has waited longest makes room.
        connections_per_peer: at once from one address; 0: no limit of its own.
        streams: requests at once on one HTTP/2 connection.
        all_streams: requests at once on all of them, those that are refused and still come in among them.
        idle_s: without a request.
        head_s: from the first byte of a request's head to its last.
        write_s: for the client to take one piece of a response.
        linger_s: for the rest of a request that has its answer already.
        drain_s: for the requests under way when the server stops.
    """

    connections: int = 512
    connections_per_peer: int = 0
    streams: int = 64
    all_streams: int = 16_384
    idle_s: float = 60.0
    head_s: float = 10.0
    write_s: float = 30.0
    linger_s: float = 30.0
    drain_s: float = 5.0


@dataclass(frozen=True)
class Pace:
    """How fast a request's body must come.

    Attributes:
        idle_s: between two pieces.
        whole_s: for all of it.
        grace_s: before the rate counts.
        bytes_per_s: the lowest rate on average, after the grace.
    """

    idle_s: float = 30.0
    whole_s: float = 120.0
    grace_s: float = 10.0
    bytes_per_s: float = 4096.0

    def until(self, begun: float, now: float, received: int) -> float:
        """When the next piece must be here (all on one clock, in seconds)."""
        slowest = begun + self.grace_s + received / self.bytes_per_s
        return min(now + self.idle_s, begun + self.whole_s, slowest)
