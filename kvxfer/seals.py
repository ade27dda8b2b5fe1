"""memfds and their seals (memfd_create(2), fcntl(2) F_ADD_SEALS)."""

import fcntl
import os
import stat
from typing import Final

from kvxfer.errors import SealError

# CPython 3.11 does not name it; linux/fcntl.h does.
F_SEAL_FUTURE_WRITE: Final = 0x0010
SIZE: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
FIXED: Final = SIZE | fcntl.F_SEAL_SEAL
# No byte can change any more. The kernel refuses it while somebody has a writable mapping, and looks at every page for
# somebody who still writes to it behind its back, by DMA for example: it takes time in proportion to the size.
CONTENT: Final = fcntl.F_SEAL_WRITE
IMMUTABLE: Final = FIXED | CONTENT
# No new writable mapping; the one that exists stays.
READ_ONLY_FOR_OTHERS: Final = FIXED | F_SEAL_FUTURE_WRITE


def create(name: str, size: int) -> int:
    """A memfd of `size` bytes that can be sealed. The name shows in /proc/PID/maps: no user data."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def add(descriptor: int, seals: int) -> None:
    """Adds seals.

    Raises:
        SealError: the kernel refuses, for example while a writable mapping exists.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except OSError as error:
        raise SealError(f"cannot seal: {error.strerror}") from None


def read_only(descriptor: int) -> int:
    """A descriptor of the same memfd that is open for reading only; the caller closes both.

    Before Linux 6.7 the kernel refused even a read-only shared mapping of a write-sealed memfd through a descriptor
    that is open for writing.

    Raises:
        OSError: there is no descriptor left.
    """
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


def require(descriptor: int, seals: int, size: int) -> None:
    """Checks a memfd from another process before it is mapped.

    Raises:
        SealError: it is no memfd, lacks one of `seals`, or has not exactly `size` bytes.
    """
    if require_any_size(descriptor, seals) != size:
        raise SealError("the memfd has another size than announced")


def require_any_size(descriptor: int, seals: int) -> int:
    """Checks a memfd as `require` does, save for its size, which is returned: final where `seals` has `FIXED`.

    Raises:
        SealError: it is no memfd, or lacks one of `seals`.
    """
    try:
        present = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        raise SealError("not a memfd") from None
    if present & seals != seals:
        raise SealError("the memfd lacks a seal")
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise SealError("not a memfd")
    return status.st_size
