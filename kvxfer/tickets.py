"""Tickets: names of things that a peer was promised on one connection and may claim once, over another.

A ticket is random, so it cannot be guessed; it is good once; and it ends with the connection that it was given on, so
that nothing waits for somebody who has left.
"""

import secrets
import threading
from typing import Final, Generic, TypeVar

TICKET_BYTES: Final = 32
T = TypeVar("T")


class Tickets(Generic[T]):
    """The tickets that are out. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._issued: dict[bytes, tuple[object, T]] = {}

    def issue(self, connection: object, promised: T) -> bytes:
        """A new ticket for `promised`, bound to `connection` (any object that stands for it)."""
        ticket = secrets.token_bytes(TICKET_BYTES)
        with self._lock:
            self._issued[ticket] = (connection, promised)
        return ticket

    def claim(self, ticket: bytes) -> T | None:
        """What the ticket was given for; None when it was never given, was claimed before, or its connection ended."""
        with self._lock:
            entry = self._issued.pop(ticket, None)
        return entry[1] if entry else None

    def count(self, connection: object) -> int:
        """How many tickets of a connection are out."""
        with self._lock:
            return sum(bound is connection for bound, _ in self._issued.values())

    def end(self, connection: object) -> list[T]:
        """Ends the tickets of a connection; gives what they were for, to be let go of."""
        with self._lock:
            ended = [ticket for ticket, (bound, _) in self._issued.items() if bound is connection]
            return [self._issued.pop(ticket)[1] for ticket in ended]
