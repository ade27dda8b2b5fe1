"""What a step costs by the number of its rows, learned from the steps themselves. Pure.

A row is one token of one sequence. On a processor that streams the weights once per step, a few rows more cost little;
how little depends on the machine and on who else uses it, so it is measured. Two decisions rest on it: how much of a
prompt fits beside answers that are being written (`rows_within`), and whether verifying a draft pays (`seconds`).
"""

import bisect
import itertools
from typing import Final

_WEIGHT: Final = 0.2  # of a new measurement in the running average
_OUTLIER: Final = 4.0  # a measurement counts as at most this many times the average: something else ran


class StepCost:
    """A running average of seconds for each count of rows, coarser where there are many.

    More rows never count as cheaper: what measured so is an accident of the moment, and the fewer cost as little.

    Steps also get dearer all together, as a prompt's context grows or others use the machine. So a count that costs
    more than it did raises all others in proportion: what was measured of them is as old as their last step.
    """

    def __init__(self) -> None:
        self._rows: list[int] = []  # ascending
        self._seconds: dict[int, float] = {}
        self._curve: list[float] = []  # for each of `_rows`, never falling

    def record(self, rows: int, seconds: float) -> None:
        """Takes a measurement of one step."""
        key = _bucket(rows)
        if key not in self._seconds:
            bisect.insort(self._rows, key)
            self._seconds[key] = seconds
        else:
            average = self._seconds[key]
            change = 1 + _WEIGHT * (min(seconds / average, _OUTLIER) - 1)
            self._seconds = {rows: known * change for rows, known in self._seconds.items()}
        falling = itertools.accumulate((self._seconds[rows] for rows in reversed(self._rows)), min)
        self._curve = list(falling)[::-1]

    def seconds(self, rows: int) -> float | None:
        """The cost of `rows`, None while nothing is known.

        Beyond the most rows seen: as these, so that it is tried. Below the fewest: half of the cost goes with the rows.
        """
        if not self._rows:
            return None
        right = bisect.bisect_left(self._rows, rows)
        if right == len(self._rows):
            return self._curve[-1]
        if self._rows[right] == rows:
            return self._curve[right]
        if right == 0:
            return self._curve[0] * (0.5 + 0.5 * rows / self._rows[0])
        share = (rows - self._rows[right - 1]) / (self._rows[right] - self._rows[right - 1])
        return (1 - share) * self._curve[right - 1] + share * self._curve[right]

    def rows_within(self, seconds: float, most: int) -> int:
        """How many rows, up to `most`, cost no more than `seconds`; at least 1. Cautious beyond what has been seen.

        Where rows are missing they are taken to cost in proportion, so that a first long prompt feels its way up.
        """
        fitting = bisect.bisect_right(self._curve, seconds)
        if fitting == 0:
            return 1
        low, cost = self._rows[fitting - 1], self._curve[fitting - 1]
        if fitting == len(self._rows):
            return min(most, int(low * seconds / cost))
        share = (seconds - cost) / (self._curve[fitting] - cost)
        return min(most, low + int(share * (self._rows[fitting] - low)))


def _bucket(rows: int) -> int:
    """Exact up to 16, then steps of an eighth to a quarter."""
    if rows <= 16:
        return rows
    step = 1 << (rows.bit_length() - 3)
    return -(-rows // step) * step
