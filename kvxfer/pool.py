"""Buffers made ahead of need: the kernel's zeroing of fresh pages costs several times what a cipher or a copy does.

A buffer is used once and never comes back: whoever got its descriptor may still hold it, so what another peer's
transfer wrote into it would be his to read. Only fresh pages, which the kernel has zeroed, are handed out.
"""

import os
import threading
from collections import deque
from typing import Final

from kvxfer import seals
from kvxfer.header import PAGE
from kvxfer.mapping import make_present

_LEAST_PART: Final = 4


class BufferPool:
    """Keeps a few populated memfds of one size ready, made by a thread of its own: at first, and after each `refill`.

    Args:
        size: bytes of each, rounded up to whole pages. A smaller buffer is cut from it, but for one so small that
            giving the rest back would cost more than making it.
        spare: how many are kept ready; 0 keeps none, and makes each when it is asked for.
        name: of each; shows in /proc/PID/maps.
    """

    def __init__(self, size: int, spare: int, name: str = "kvxfer") -> None:
        self._name = name
        self._size = -(-size // PAGE) * PAGE
        self._spare = spare
        self._ready: deque[int] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._filling = True
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
            fits = self._size // _LEAST_PART <= size <= self._size
            descriptor = self._ready.popleft() if self._ready and fits else None
        made = descriptor is None
        if descriptor is None:
            descriptor = seals.create(self._name, size)
        try:
            if made:
                make_present(descriptor, size)
            else:
                os.ftruncate(descriptor, size)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def refill(self) -> None:
        """Has what was taken made anew. Call it when there is nothing else to do: it is as much work as was saved."""
        with self._changed:
            # Decided here: what is taken a moment later is not made beside the transfer that took it.
            self._filling = len(self._ready) < self._spare
            self._changed.notify()

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
                self._changed.wait_for(lambda: self._closed or self._filling)
                if self._closed:
                    return
                self._filling = False
            try:
                descriptor = _populated(self._name, self._size)
            except OSError:
                continue  # no memory: the next refill tries again, be it one that came meanwhile
            with self._changed:
                self._ready.append(descriptor)
                self._filling = len(self._ready) < self._spare


def _populated(name: str, size: int) -> int:
    descriptor = seals.create(name, size)
    try:
        make_present(descriptor, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
