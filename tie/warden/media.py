"""Where the bytes of an entry lie: in memory, or in a file. Pieces are copied in and out of it.

Copying is deliberate. What is decrypted is a copy that nobody else can reach, so that plaintext and tag are of the same
bytes whoever else has the memory. And it is faster: entries are read and written once, and to map, fault in and unmap
small pages costs more than to copy them through a buffer that stays in the processor's cache.
"""

import os
from typing import Protocol

from tie.warden.errors import EntryError


class Medium(Protocol):
    """Holds one entry."""

    @property
    def size(self) -> int:
        """Its bytes."""

    def read(self, offset: int, into: memoryview) -> None:
        """Fills `into` with what is at `offset`.

        Raises:
            EntryError: there is not so much.
        """

    def write(self, offset: int, piece: memoryview) -> None:
        """Puts a piece to `offset`.

        Raises:
            OSError: it cannot be written.
        """


class InMemory:
    """An entry in this process's memory.

    Args:
        view: all of it.
    """

    def __init__(self, view: memoryview) -> None:
        self._view = view

    @property
    def size(self) -> int:
        """Its bytes."""
        return len(self._view)

    def read(self, offset: int, into: memoryview) -> None:
        """As `Medium.read`."""
        if offset + len(into) > len(self._view):
            raise EntryError
        into[:] = self._view[offset : offset + len(into)]

    def write(self, offset: int, piece: memoryview) -> None:
        """As `Medium.write`."""
        self._view[offset : offset + len(piece)] = piece


class InFile:
    """An entry in a file of a fixed size: a memfd of the cache store's.

    Args:
        descriptor: of it; stays the caller's.
        size: its bytes.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self._size = size

    @property
    def size(self) -> int:
        """Its bytes."""
        return self._size

    def read(self, offset: int, into: memoryview) -> None:
        """As `Medium.read`."""
        while len(into):
            count = os.preadv(self._descriptor, [into], offset)
            if not count:
                raise EntryError
            into, offset = into[count:], offset + count

    def write(self, offset: int, piece: memoryview) -> None:
        """As `Medium.write`."""
        while len(piece):
            count = os.pwrite(self._descriptor, piece, offset)
            piece, offset = piece[count:], offset + count
