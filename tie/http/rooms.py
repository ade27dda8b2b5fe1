"""Where connections wait while no request of theirs is served, and which of them has waited long enough.

All in one room have the same patience, so that a room is a queue: entering, leaving and finding the late ones take
constant time, whatever the number of idle connections, and none needs a timer of its own.
"""

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Generic, Protocol, TypeVar


class Room(Enum):
    """Why a connection waits. The order is the one in which they make room for others."""

    IDLE = "idle"  # for a request
    HEAD = "head"  # for the rest of a request's head
    LINGER = "linger"  # for a client to hear what was said, before the connection is closed


class Guest(Protocol):
    """What waits.

    Attributes:
        room: where, or None while it is served. Only `Rooms` writes it.
    """

    room: Room | None


G = TypeVar("G", bound=Guest)


class Rooms(Generic[G]):
    """The rooms of one server, each with its patience in seconds."""

    def __init__(self, patience: Mapping[Room, float]) -> None:
        self._patience = patience
        self._since: dict[Room, dict[G, float]] = {room: {} for room in Room}  # in the order of coming

    def put(self, guest: G, room: Room | None, now: float) -> None:
        """Moves `guest` to a room, or out of all. One that is there already has waited since it came."""
        if guest.room is room:
            return
        if guest.room is not None:
            del self._since[guest.room][guest]
        guest.room = room
        if room is not None:
            self._since[room][guest] = now

    def late(self, now: float) -> Iterator[G]:
        """Those whose time is over. They may be moved while this is iterated."""
        for room, since in self._since.items():
            while since:
                guest, begun = next(iter(since.items()))
                if now < begun + self._patience[room]:
                    break
                yield guest
                if guest.room is room:  # nobody moved it: it must not be found for ever
                    self.put(guest, None, now)

    def first(self) -> G | None:
        """Who has to make room for others."""
        return next((next(iter(since)) for since in self._since.values() if since), None)
