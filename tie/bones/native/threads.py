"""How many threads a step gets: as many as make it fastest, on a machine that others use as well.

All threads of a step meet several times in each layer, so that one whose core somebody else has taken holds up the
rest: beside a busy neighbour fewer threads are faster than one for each core. Whether there is one does not show in any
number that a sandboxed process may read for certain; it shows in the time that steps take. So now and then a few steps
run with more or fewer threads, and where that is clearly faster it stays so. Trials get rarer as long as they change
nothing, and come at once when steps become slower than they were. Pure: time is told to it.

Where many sequences are computed together, their tokens also have to be sealed and sent, by other processes of the same
node: a core is left to those. Alone a step takes a third longer by that; the node as a whole gains a fifth (two cores,
16 streams).
"""

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Final

_MANY: Final = 4  # sequences of a step
_STEPS: Final = 3  # of a trial, and of what it is compared with: their median, for anything may interrupt one step
_CLEARLY: Final = 0.93  # what a trial must take of the usual time to change anything
_SLOWER: Final = 1.25  # times the usual: a reason to try at once
_SOON: Final = 32  # steps between trials, at first
_LATE: Final = 512  # and when they keep changing nothing


@dataclass(slots=True)
class _Times:
    """Of the last steps of one size with the usual threads; and what they took when the last trial of it ended."""

    last: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS))
    usual: float | None = None


class StepThreads:
    """Chooses for each step, and learns from what it took; apart for steps of few and of many sequences.

    Args:
        most: threads at most.
        adapt: whether fewer are taken at all.
    """

    def __init__(self, most: int, *, adapt: bool) -> None:
        self._few = ThreadChoice(most, adapt=adapt)
        self._many = ThreadChoice(most - 1, adapt=True) if adapt and most > 1 else self._few

    def choose(self, sequences: int, rows: int) -> int:
        """Threads for a step of so many sequences and rows; `record` must follow."""
        return self._of(sequences).choose(rows)

    def record(self, sequences: int, rows: int, threads: int, seconds: float) -> None:
        """Takes what a step took with the threads that were chosen for it."""
        self._of(sequences).record(rows, threads, seconds)

    def _of(self, sequences: int) -> "ThreadChoice":
        return self._many if sequences >= _MANY else self._few


class ThreadChoice:
    """Chooses by what steps took.

    Args:
        most: threads at most, and at first.
        adapt: whether fewer are tried at all.
    """

    def __init__(self, most: int, *, adapt: bool) -> None:
        self._ladder = sorted({1, most // 4 or 1, most // 2 or 1, max(1, most - 1), most}) if adapt else [most]
        self._place = len(self._ladder) - 1
        self._times: dict[int, _Times] = {}
        self._trial: tuple[int, int] | None = None  # size of the steps, and the place that is tried
        self._tried: list[float] = []
        self._down = True  # where the next trial goes
        self._period, self._wait = _SOON, _SOON

    @property
    def usual(self) -> int:
        """Threads of a step that tries nothing."""
        return self._ladder[self._place]

    def choose(self, rows: int) -> int:
        """Threads for a step of so many rows; `record` must follow."""
        if self._trial and self._trial[0] == _size(rows):
            return self._ladder[self._trial[1]]
        return self.usual

    def record(self, rows: int, threads: int, seconds: float) -> None:
        """Takes what a step took with the threads that were chosen for it."""
        if len(self._ladder) == 1:
            return
        size = _size(rows)
        if self._trial and self._trial[0] == size and threads == self._ladder[self._trial[1]]:
            self._tried.append(seconds)
            if len(self._tried) == _STEPS:
                self._judge(size, self._trial[1])
            return
        times = self._times.setdefault(size, _Times())
        times.last.append(seconds)
        self._wait -= 1
        slower = times.usual is not None and min(times.last) > _SLOWER * times.usual
        if not self._trial and len(times.last) == _STEPS and (self._wait <= 0 or slower):
            if slower:
                self._period = _SOON
            self._trial, self._tried = (size, self._next()), []

    def _next(self) -> int:
        """Down and up the ladder in turn."""
        lowest, highest = self._place == 0, self._place == len(self._ladder) - 1
        down = not lowest and (self._down or highest)
        self._down = not down
        return self._place - 1 if down else self._place + 1

    def _judge(self, size: int, place: int) -> None:
        before, tried = statistics.median(self._times[size].last), statistics.median(self._tried)
        if tried < _CLEARLY * before:
            self._place = place
            self._times = {size: _Times(usual=tried)}  # what steps took with other threads says nothing any more
            self._period = _SOON
        else:
            self._times[size].usual = before
            self._period = min(2 * self._period, _LATE)
        self._trial, self._wait = None, self._period


def _size(rows: int) -> int:
    """Steps that are compared: exact up to 16 rows, then within a power of 2."""
    return rows if rows <= 16 else 16 + rows.bit_length()
