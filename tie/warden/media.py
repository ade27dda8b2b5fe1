"""Where the bytes of an entry lie that is to be opened: in a memfd of the cache store's that nobody can change.

Pieces are decrypted where they lie, and an implementation of AES-GCM may read its ciphertext twice, once to decrypt it
and once for the tag. So the memory must be the same both times whoever else has it: what lacks one of the seals that
promise that (memfd_create(2), F_SEAL_WRITE and its like) is not opened. The kernel grants F_SEAL_WRITE only when nobody
has a mapping that can write, and allows none after it.
"""

from typing import Final, Self

from kvxfer import seals
from kvxfer.errors import SealError
from kvxfer.header import PAGE
from kvxfer.mapping import Mapping
from tie.warden.errors import EntryError

_AHEAD: Final = 4 << 20  # bytes that are mapped beyond what is asked for: a system call for each block costs more


class SealedMemory:
    """One entry to be opened, mapped. Closed once it is.

    Attributes:
        size: its bytes.

    Args:
        descriptor: of it; stays the caller's, and is not needed any more.
        size: bytes that it must have.

    Raises:
        EntryError: it has not, or somebody could change it.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        try:
            seals.require(descriptor, seals.IMMUTABLE, size)
            self._mapping = Mapping(descriptor, size, writable=False)
        except (SealError, OSError, ValueError):  # ValueError: nothing is not mapped
            raise EntryError from None
        self.size = size
        self._mapped = 0

    def piece(self, start: int, size: int) -> memoryview:
        """Bytes of it, read-only; mapped in one go, with those that follow. Release them before `close`."""
        end = start + size
        if end > self._mapped:
            first = self._mapped - self._mapped % PAGE
            self._mapped = min(self.size, end + _AHEAD)
            self._mapping.populate(first, self._mapped - first)
        return self._mapping.view[start:end]

    def close(self) -> None:
        """Unmaps it."""
        self._mapping.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
