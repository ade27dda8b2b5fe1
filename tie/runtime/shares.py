"""Shares out a rate among those who want a turn: each soon after the last one, the later the more there are. Pure."""

import heapq
import itertools
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Shares(Generic[T]):
    """Who waits for a turn, and until when. Times are on any one clock, seconds.

    Args:
        per_second: turns of all together.
    """

    def __init__(self, per_second: float) -> None:
        self._per_second = per_second
        self._waiting: list[tuple[float, int, T]] = []  # a heap
        self._order = itertools.count()
        self._next: dict[T, float] = {}  # of those who had a turn a moment ago: when they may have the next

    def add(self, who: T, now: float) -> None:
        """Somebody wants a turn. The first comes at once, then one in an interval: the longer the more have them."""
        due = max(now, self._next.pop(who, now))
        self._next[who] = due + (len(self._next) + 1) / self._per_second
        heapq.heappush(self._waiting, (due, next(self._order), who))

    def due(self, now: float) -> Iterator[T]:
        """Those whose turn has come, the one that waits longest first."""
        while self._waiting and self._waiting[0][0] <= now:
            yield heapq.heappop(self._waiting)[2]
        # What is past holds nobody back. They were entered nearly in order: at worst, some are kept a little longer.
        while self._next and self._next[first := next(iter(self._next))] <= now:
            del self._next[first]

    def take_all(self) -> Iterator[T]:
        """Everybody who waits."""
        while self._waiting:
            yield heapq.heappop(self._waiting)[2]

    def pause(self, now: float, most: float) -> float:
        """Seconds until the next turn, at most `most`."""
        return min(most, max(0.0, self._waiting[0][0] - now)) if self._waiting else most
