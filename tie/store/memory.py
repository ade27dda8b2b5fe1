"""The memfds of entries: made with all their pages, and sealed for good. Neither keeps the event loop busy for long."""

import asyncio
import os
from typing import Final

from kvxfer import seals
from kvxfer.errors import SealError

_INLINE_BYTES: Final = 1 << 20  # the kernel prepares so much in less time than a thread takes to start
_NAME: Final = "tie-entry"  # shows in /proc/PID/maps


async def make(size: int) -> int:
    """A memfd of which every page is present, so that it is charged to this process's cgroup and not to the client's.

    Raises:
        OSError: there is not so much memory.
    """
    if size <= _INLINE_BYTES:
        return _present(size)
    making = asyncio.create_task(asyncio.to_thread(_present, size))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(_close_result)
        raise


def _present(size: int) -> int:
    descriptor = seals.create(_NAME, size)
    try:
        seals.add(descriptor, seals.SIZE)  # the size is what was counted
        os.posix_fallocate(descriptor, 0, size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


async def seal(descriptor: int, size: int) -> None:
    """Makes it unchangeable.

    Raises:
        SealError: it is mapped for writing, or the client has sealed it.
    """
    if size <= _INLINE_BYTES:
        seals.add(descriptor, seals.IMMUTABLE)
        return
    # The kernel looks at every page for somebody who still writes to it behind its back, by DMA for example.
    copy = os.dup(descriptor)  # should the client leave meanwhile, and the other be closed

    def add() -> SealError | None:
        try:
            seals.add(copy, seals.IMMUTABLE)
        except SealError as error:
            return error
        finally:
            os.close(copy)
        return None

    error = await asyncio.shield(asyncio.create_task(asyncio.to_thread(add)))
    if error:
        raise error


def _close_result(making: "asyncio.Task[int]") -> None:
    if not making.cancelled() and making.exception() is None:
        os.close(making.result())
