"""The memfds of entries: made with all their pages, sealed, let go of. Nothing here keeps the event loop for long."""

import asyncio
import os
import queue
import threading
from typing import Final

from kvxfer import seals
from kvxfer.pool import BufferPool

_INLINE_BYTES: Final = 1 << 20  # the kernel makes or frees so much in less time than a thread takes to start
NAME: Final = "tie-entry"  # shows in /proc/PID/maps


def spares(size: int) -> BufferPool:
    """Keeps one memfd of `size` bytes ready for the next large entry."""
    return BufferPool(size, 1 if size else 0, NAME)


async def make(size: int, pool: BufferPool) -> int:
    """A memfd of which every page is present, so that it is charged to this process's cgroup and not to the client's.

    Raises:
        OSError: there is not so much memory.
    """
    if size <= _INLINE_BYTES:
        return _present(size, pool)
    making = asyncio.create_task(asyncio.to_thread(_present, size, pool))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(_close_result)
        raise


def _present(size: int, pool: BufferPool) -> int:
    descriptor = pool.take(size)
    try:
        seals.add(descriptor, seals.SIZE)  # the size is what was counted
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def seal(descriptor: int) -> int:
    """Makes it unchangeable for good, once its client has sealed its content; gives one for reading only in its stead.

    That seal costs a walk over all pages (kvxfer.seals.CONTENT), and the client has it done in its own process: here
    it is one look at a flag, whatever the size.

    Raises:
        SealError: the client has not sealed the content, or has sealed it for itself alone. What was given stays open.
        OSError: there is no descriptor left. Likewise.
    """
    seals.require_any_size(descriptor, seals.CONTENT)
    seals.add(descriptor, seals.FIXED)
    sealed = seals.read_only(descriptor)
    os.close(descriptor)
    return sealed


class Reaper:
    """Closes memfds. The last one to close a large one pays for freeing its pages: a thread does."""

    def __init__(self) -> None:
        self._closing: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="store-reaper", daemon=True)
        self._thread.start()

    def close(self, descriptor: int, size: int) -> None:
        """Closes it, soon."""
        if size <= _INLINE_BYTES:
            os.close(descriptor)
        else:
            self._closing.put(descriptor)

    def stop(self) -> None:
        """Closes what is left and ends the thread."""
        self._closing.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (descriptor := self._closing.get()) is not None:
            os.close(descriptor)


def _close_result(making: "asyncio.Task[int]") -> None:
    if not making.cancelled() and making.exception() is None:
        os.close(making.result())
