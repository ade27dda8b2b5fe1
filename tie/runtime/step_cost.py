"""What a step costs by the number of its rows, learned from the steps themselves. Pure.

A row is one token of one sequence. On a processor that streams the weights once per step, a few rows more cost little;
how little depends on the machine and on who else uses it, so it is measured. Two decisions rest on it: how much of a
prompt fits beside answers that are being written (`rows_within`), and whether verifying a draft pays (`seconds`).
"""

import bisect
from typing import Final

_WEIGHT: Final = 0.2  # of a new measurement in the running average
_OUTLIER: Final = 4.0  # a measurement counts as at most this many times the average: something else ran


class StepCost:
    """A running average of seconds for each count of rows, coarser where there are many."""

    def __init__(self) -> None:
        self._rows: list[int] = []  # ascending
        self._seconds: dict[int, float] = {}

    def record(self, rows: int, seconds: float) -> None:
        """Takes a measurement of one step."""
        key = _bucket(rows)
        seconds *= key / rows if rows > 16 else 1.0
        if key not in self._seconds:
            bisect.insort(self._rows, key)
            self._seconds[key] = seconds
        else:
            average = self._seconds[key]
            self._seconds[key] += _WEIGHT * (min(seconds, _OUTLIER * average) - average)

    def seconds(self, rows: int) -> float | None:
        """The cost of `rows`, None while nothing is known. Beyond the most rows seen: as these, so that it is tried."""
        if not self._rows:
            return None
        right = bisect.bisect_left(self._rows, rows)
        if right == len(self._rows):
            return self._seconds[self._rows[-1]]
        high = self._rows[right]
        if right == 0 or high == rows:
            return self._seconds[high]
        low = self._rows[right - 1]
        share = (rows - low) / (high - low)
        return (1 - share) * self._seconds[low] + share * self._seconds[high]

    def rows_within(self, seconds: float, most: int) -> int:
        """How many rows, up to `most`, cost no more than `seconds`; at least 1. Cautious beyond what has been seen.

        Where rows are missing they are taken to cost in proportion, so that a first long prompt feels its way up.
        """
        known = [rows for rows in self._rows if self._seconds[rows] <= seconds]
        if not known:
            return 1
        low = known[-1]
        above = bisect.bisect_right(self._rows, low)
        if above < len(self._rows):
            high = self._rows[above]
            share = (seconds - self._seconds[low]) / (self._seconds[high] - self._seconds[low])
            return min(most, low + int(share * (high - low)))
        return min(most, int(low * seconds / self._seconds[low]))


def _bucket(rows: int) -> int:
    """Exact up to 16, then steps of an eighth to a quarter."""
    if rows <= 16:
        return rows
    step = 1 << (rows.bit_length() - 3)
    return -(-rows // step) * step
