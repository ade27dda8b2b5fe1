"""Page-wise system calls on a mapping, without holding the interpreter's lock while the kernel works."""

import ctypes
import mmap
import os
from typing import Final

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_LIBC.mmap.restype = ctypes.c_void_p
_FAILED: Final = ctypes.c_void_p(-1).value
_MAP_FIXED: Final = 0x10  # asm-generic/mman.h
# linux/mman.h: one system call instead of one fault for each page. Linux 5.14; an older kernel faults them in.
_MADV_POPULATE_READ: Final = 22
_MADV_POPULATE_WRITE: Final = 23
_MADV_COLLAPSE: Final = 25  # Linux 6.1


def address(mapping: mmap.mmap) -> int:
    """Where a mapping begins. Writable mappings only; ask before anything is exported from it."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def populate_write(start: int, size: int) -> None:
    """Makes pages present and writable; where the kernel cannot, they will be when they are written."""
    _LIBC.madvise(start, size, _MADV_POPULATE_WRITE)


def populate_read(start: int, size: int) -> None:
    """Maps pages for reading; where the kernel cannot, they will be when they are read."""
    _LIBC.madvise(start, size, _MADV_POPULATE_READ)


def collapse(start: int, size: int) -> None:
    """Puts the pages of a mapping into huge pages; where the kernel cannot, they stay as they are.

    A huge page of which not one small one is present stays empty.
    """
    _LIBC.madvise(start, size, _MADV_COLLAPSE)


def map_at(start: int, descriptor: int, size: int, rights: int) -> None:
    """Maps a file, shared, over memory of at least `size` bytes that this process has mapped for the purpose.

    Raises:
        OSError: it cannot be mapped. The memory may be gone, and its addresses somebody else's (mmap(2), MAP_FIXED).
    """
    if _LIBC.mmap(start, size, rights, mmap.MAP_SHARED | _MAP_FIXED, descriptor, 0) == _FAILED:
        raise _error()


def protect(start: int, size: int) -> None:
    """Takes the right to write away.

    Raises:
        OSError: the range is not mapped, or splits one mapping too many.
    """
    if _LIBC.mprotect(start, size, mmap.PROT_READ) != 0:
        raise _error()


def _error() -> OSError:
    error = ctypes.get_errno()
    return OSError(error, os.strerror(error))
