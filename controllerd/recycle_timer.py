"""When the next recycle is due. Pure: the clock is passed in.

The timer bounds how long a runtime may hold what it served. Each node draws its own jitter from the kernel's
randomness, anew for every runtime, so that a fleet that booted together does not recycle together.
"""

import random
from collections.abc import Callable

_KERNEL = random.SystemRandom()


class RecycleTimer:
    """Counts down the life of one runtime.

    Args:
        interval_s: the mean life.
        jitter: the share of it by which a life may be shorter or longer.
        draw: a number in [-1, 1]; the kernel's randomness unless a test says otherwise.
    """

    def __init__(
        self, interval_s: float, jitter: float, draw: Callable[[], float] = lambda: _KERNEL.uniform(-1.0, 1.0)
    ) -> None:
        self._interval_s = interval_s
        self._jitter = jitter
        self._draw = draw
        self._due: float | None = None

    def start(self, now: float, age_s: float = 0.0) -> None:
        """A runtime of this age begins to count; a controller that restarts thus does not lengthen its life."""
        self._due = now - age_s + self._interval_s * (1.0 + self._jitter * self._draw())

    def remaining(self, now: float) -> float | None:
        """Seconds until the recycle, zero when due; None before any runtime was seen."""
        return None if self._due is None else max(0.0, self._due - now)

    def due(self, now: float) -> bool:
        """Whether the recycle is due."""
        return self._due is not None and now >= self._due


class ErrorBackoff:
    """Keeps recycles for errors apart: the pause doubles up to ten times the first, and shrinks back after peace.

    Args:
        first_s: the first pause.
    """

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._pause_s = first_s
        self._last: float | None = None

    def allows(self, now: float) -> bool:
        """Whether another error recycle may start."""
        return self._last is None or now - self._last >= self._pause_s

    def remaining(self, now: float) -> float:
        """Seconds until one may."""
        return 0.0 if self._last is None else max(0.0, self._last + self._pause_s - now)

    def spend(self, now: float) -> None:
        """Notes that one starts. The first after peace is followed by the first pause, each further one by twice it."""
        longest = self._first_s * 10
        if self._last is None or now - self._last >= longest * 2:
            self._pause_s = self._first_s
        else:
            self._pause_s = min(self._pause_s * 2, longest)
        self._last = now
