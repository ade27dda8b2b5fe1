"""Page-wise system calls on a mapping, without holding the interpreter's lock while the kernel works."""

import ctypes
import mmap
import os
from typing import Final

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
# linux/mman.h: one system call instead of one fault for each page. Linux 5.14; an older kernel faults them in.
_MADV_POPULATE_READ: Final = 22
_MADV_POPULATE_WRITE: Final = 23


def address(mapping: mmap.mmap) -> int:
    """Where a mapping begins. Writable mappings only; ask before anything is exported from it."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def populate_write(start: int, size: int) -> None:
    """Makes pages present and writable; where the kernel cannot, they will be when they are written."""
    _LIBC.madvise(start, size, _MADV_POPULATE_WRITE)


def populate_read(mapping: mmap.mmap, offset: int, size: int) -> None:
    """Maps pages for reading; where the kernel cannot, they will be when they are read."""
    try:
        mapping.madvise(_MADV_POPULATE_READ, offset, size)
    except OSError:
        return


def protect(start: int, size: int) -> None:
    """Takes the right to write away.

    Raises:
        OSError: the range is not mapped, or splits one mapping too many.
    """
    if _LIBC.mprotect(start, size, mmap.PROT_READ) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
