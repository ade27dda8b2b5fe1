"""The controller's clock, and whether the controller itself was awake.

A process that was stopped, or whose machine slept, finds all its deadlines passed when it wakes, though its peers may
have been well all along. Who would blame a peer for silence asks here first.
"""

import time
from collections.abc import Callable
from typing import Final

STILL_S: Final = 2.0  # the controller looks four times a second: this long without a look is no load


def boottime() -> float:
    """Seconds since boot, time asleep included: a suspended machine still holds what it served."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Wakefulness:
    """Notices gaps between looks. `look` is called a few times a second.

    Args:
        clock: seconds; one that counts while the process is stopped.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last = clock()
        self._woke: float | None = None
        self._still_s = 0.0

    def look(self) -> None:
        """Notes a gap, if there was one."""
        now = self._clock()
        gap, self._last = now - self._last, now
        if gap >= STILL_S:
            self._woke = now
            self._still_s += gap

    def excuses(self, within_s: float) -> bool:
        """Whether it woke so short a time ago that no peer is to blame for its silence yet."""
        self.look()
        return self._woke is not None and self._clock() - self._woke < within_s

    def take(self) -> float:
        """For how long it stood still since it was asked last; zero when it did not."""
        self.look()
        still, self._still_s = self._still_s, 0.0
        return still
