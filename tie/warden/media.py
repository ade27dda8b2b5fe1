"""Where the bytes of an entry lie that is to be opened: in a memfd of the cache store's. Pieces are copied out.

Copying is deliberate. What is decrypted is a copy that nobody else can reach, so that plaintext and tag are of the same
bytes whoever else has the memory. It is also no slower: a page is read once, and to map it, fault it in and unmap it
costs more than to copy it through a buffer that stays in the processor's cache.
"""

import os

from tie.warden.errors import EntryError


class InFile:
    """One entry to be opened.

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
        """Fills `into` with what is at `offset`.

        Raises:
            EntryError: there is not so much: a file that has shrunk is an error, and no SIGBUS.
        """
        while len(into):
            count = os.preadv(self._descriptor, [into], offset)
            if not count:
                raise EntryError
            into, offset = into[count:], offset + count
