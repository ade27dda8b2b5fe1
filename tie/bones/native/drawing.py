"""Drawing a token in compiled code, for the sampler: two passes over a vocabulary, where NumPy takes ten.

The sampler draws by itself what this cannot, and everything where the library is not built.
"""

import ctypes
import functools
from typing import Final

import numpy as np

from tie.bones.native import library
from tie.bones.native.library import RawDraw
from tie.bones.sampling import Floats, SamplingParams

NEIGHBOURS: Final = 256
"""Tokens of a bucket in the race: `kNeighbours` of sampling.h."""


@functools.cache
def loaded() -> ctypes.CDLL | None:
    """The library, where there is one for this machine."""
    try:
        return library.load(library.choose())
    except OSError:
        return None


class Drawer:
    """Draws from rows of one vocabulary, one after another.

    Args:
        compiled: the library.
        weights: of a row's tokens, float32; overwritten by each draw.
    """

    def __init__(self, compiled: ctypes.CDLL, weights: Floats) -> None:
        self._draw = compiled.tie_native_draw
        self.buckets = -(-len(weights) // NEIGHBOURS)
        self._sums = np.empty(self.buckets, dtype=np.float32)
        self._raw = RawDraw(weights=weights.ctypes.data, sums=self._sums.ctypes.data, count=len(weights))
        self._row, self._size = ctypes.byref(self._raw), ctypes.sizeof(RawDraw)

    def draw(
        self, logits: Floats, largest: float, dice: np.random.Generator, params: SamplingParams
    ) -> tuple[int, bool]:
        """One token, and whether it is in the nucleus; if not, it is to be drawn again from what is likelier.

        Args:
            logits: `[vocab_size]` float32, contiguous; none is NaN or infinite, but for what may not be chosen.
            largest: of them.
            dice: set to where the row's numbers begin.
            params: temperature, which is not that of greedy ones, top-p and min-p of them.
        """
        raw = self._raw
        times = dice.standard_exponential(self.buckets + NEIGHBOURS)
        raw.logits, raw.times = logits.ctypes.data, times.ctypes.data
        raw.largest, raw.scale = largest, 1 / params.temperature
        raw.least, raw.top_p = params.min_p, params.top_p
        if problem := self._draw(self._row, self._size):
            raise RuntimeError(problem.decode())
        return raw.token, bool(raw.inside)
