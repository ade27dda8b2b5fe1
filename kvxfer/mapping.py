"""memfds in memory: made present, and mapped, in huge pages where there is enough to fill some.

A page of 4 KiB costs about a microsecond to make, to map at each end and to free; copying its bytes costs a fifth of
that. A huge page costs the same once, for 512 of them. The kernel gives huge pages to a memfd on request, whatever the
administrator's default is (madvise(2), MADV_COLLAPSE, Linux 6.1), and maps them as such where address and offset agree
modulo their size. Where it does not, all of this works page by page.
"""

import mmap
import os
from typing import Final, Self

from kvxfer import pages
from kvxfer.header import HUGE_PAGE, LARGE, PAGE

# Addresses that may be others' by now: never unmapped. Some address space, in a case that is next to impossible.
_LOST: Final[list[mmap.mmap]] = []
_MAP_NORESERVE: Final = 0x4000  # asm-generic/mman.h; CPython 3.11 does not name it


class Mapping:
    """A memfd, mapped shared and whole; aligned to huge pages where it is `LARGE`.

    Attributes:
        view: its bytes; read-only unless it is writable. `close` insists that all views of it are released.
        grain: what `protect` should be called for: a part of a huge page would have it mapped in small ones.

    Args:
        descriptor: the caller keeps and closes it; the mapping does not need it.
        size: bytes of it, at least one.
        writable: whether they can be written.

    Raises:
        OSError: it cannot be mapped, for example because it is sealed.
    """

    def __init__(self, descriptor: int, size: int, *, writable: bool) -> None:
        self.grain = HUGE_PAGE if size >= LARGE else PAGE
        self._writable = writable
        rights = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        mmap.mmap(descriptor, size, prot=rights).close()  # what is not allowed shows before room is given up for it
        # An object of Python's owns the addresses, counts the views of them, and unmaps whatever lies there at its end.
        # Shared, since private memory that can be written counts against RLIMIT_DATA although nobody touches it.
        self._map = mmap.mmap(-1, size + self.grain - PAGE, mmap.MAP_SHARED | _MAP_NORESERVE)
        start = pages.address(self._map)
        self._address = -(-start // self.grain) * self.grain
        try:
            pages.map_at(self._address, descriptor, size, rights)
        except OSError:
            _LOST.append(self._map)
            raise
        self._whole = memoryview(self._map)
        inner = self._whole[self._address - start : self._address - start + size]
        self.view = inner if writable else inner.toreadonly()
        if not writable:
            inner.release()

    def populate(self, start: int, size: int) -> None:
        """Makes a range present and maps it in one go; where the kernel cannot, it will be when it is touched."""
        (pages.populate_write if self._writable else pages.populate_read)(self._address + start, size)

    def collapse(self, start: int, size: int) -> None:
        """Puts a range of whole huge pages into such, where the kernel can; what is wholly empty it leaves empty."""
        pages.collapse(self._address + start, size)

    def protect(self, start: int, size: int) -> None:
        """Takes this process's right to write to a range away.

        Raises:
            OSError: it splits one mapping too many.
        """
        pages.protect(self._address + start, size)

    def close(self) -> None:
        """Unmaps it.

        Raises:
            BufferError: a view of it is still there; nothing is unmapped.
        """
        self.view.release()
        self._whole.release()
        self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_present(descriptor: int, size: int) -> None:
    """Makes every page of a fresh memfd present, so that it is charged to this process's cgroup and to no peer's.

    No more than `size` is taken: only huge pages that it fills are asked for.

    Raises:
        OSError: there is not so much memory.
    """
    huge = size - size % HUGE_PAGE if size >= LARGE else 0
    if huge:
        with Mapping(descriptor, size, writable=True) as mapping:
            for start in range(0, huge, HUGE_PAGE):
                mapping.populate(start, PAGE)  # one small page makes it not wholly empty; the rest is zeroed once
            mapping.collapse(0, huge)
    os.posix_fallocate(descriptor, 0, size)
