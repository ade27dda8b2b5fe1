"""Buffers made ahead of need: the kernel's zeroing of fresh pages costs several times what a cipher or a copy does.

A buffer is used once and never comes back: whoever got its descriptor may still hold it, so what another peer's
transfer wrote into it would be his to read. Only fresh pages, which the kernel has zeroed, are handed out.
"""

import mmap
import os
import threading
from collections import deque
from typing import Final

from kvxfer import pages, seals
from kvxfer.header import PAGE

_NAME: Final = "kvxfer"


class BufferPool:
    """Keeps a few populated memfds of one size ready, made by a thread of its own.

    Args:
        size: bytes of each, rounded up to whole pages. A smaller buffer is cut from it.
        spare: how many are kept ready; 0 keeps none, and makes each when it is asked for.
    """

    def __init__(self, size: int, spare: int) -> None:
        self._size = -(-size // PAGE) * PAGE
        self._spare = spare
        self._ready: deque[int] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._fill, name="kvxfer-pool", daemon=True)
        if spare:
            self._thread.start()

    @property
    def ready(self) -> int:
        """Buffers ready now."""
        return len(self._ready)

    def take(self, size: int) -> int:
        """A zeroed memfd of exactly `size` bytes, unsealed; the caller closes it. One that is not ready is made here.

        Raises:
            OSError: there is no memory for it.
        """
        with self._changed:
            descriptor = self._ready.popleft() if self._ready and size <= self._size else None
            self._changed.notify()
        made = descriptor is None
        if descriptor is None:
            descriptor = seals.create(_NAME, size)
        try:
            if made:
                # Present, so that it is charged to this process's cgroup and not to the peer's.
                os.posix_fallocate(descriptor, 0, size)
            else:
                os.ftruncate(descriptor, size)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def close(self) -> None:
        """Lets go of what is ready and ends the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()
        while self._ready:
            os.close(self._ready.popleft())

    def _fill(self) -> None:
        while True:
            with self._changed:
                while len(self._ready) >= self._spare and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
            descriptor = _populated(self._size)
            with self._changed:
                self._ready.append(descriptor)


def _populated(size: int) -> int:
    descriptor = seals.create(_NAME, size)
    with mmap.mmap(descriptor, size) as mapping:
        pages.populate_write(pages.address(mapping), size)
    return descriptor
