"""A bell: whoever waits for a condition looks again when it rings. And what all watchers of peers have in common."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from controllerd.clock import Wakefulness


class Bell:
    """Rings for all waiters at once."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        """Wakes everyone who waits now."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout: float) -> None:
        """Waits for the next ring, at most `timeout` seconds."""
        event = self._event
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await event.wait()

    async def until(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Waits until `condition` holds, looking at each ring.

        Returns:
            Whether it holds; False when `timeout` seconds passed first.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while not condition():
            left = deadline - loop.time()
            if left <= 0:
                return False
            await self.wait(left)
        return True


@dataclass(frozen=True, slots=True)
class Watching:
    """What all watchers share.

    Attributes:
        heartbeat_s: how often a peer says something, at least.
        bell: rung at every change.
        wake: knows whether it is this process that stood still; then a peer is tried again before it counts as lost.
    """

    heartbeat_s: float
    bell: Bell
    wake: Wakefulness
