"""What the model sees of a request: vectors, and the positions of the prompt that they stand at."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from tie.assets.images import Expanded
from tie.bones.batch import Floats, Given


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ImageEmbeddings:
    """One image.

    Attributes:
        rows: of squares; 0 where it is not cut.
        columns: of squares.
        vectors: of all squares one after the other, `[n, hidden_size]`.
    """

    rows: int
    columns: int
    vectors: Floats


class PromptEmbeddings:
    """All vectors of a prompt.

    Args:
        prompt: with the tokens of its images.
        token_id: the image token.
        seen: some of the images, by number.

    Raises:
        ValueError: an image has more or fewer vectors than places.
    """

    def __init__(self, prompt: Expanded, token_id: int, seen: Mapping[int, ImageEmbeddings]) -> None:
        self._places: list[int] = []
        for number in sorted(seen):
            start, end = prompt.spans[number]
            places = [place for place in range(start, end) if prompt.ids[place] == token_id]
            if len(places) != len(seen[number].vectors):
                raise ValueError("an image's vectors and its places in the prompt differ in number")
            self._places += places
        self._vectors = np.concatenate([seen[number].vectors for number in sorted(seen)]) if seen else None

    def within(self, start: int, count: int) -> tuple[Given, ...]:
        """What belongs to so many positions from `start` on, as runs."""
        first, end = bisect_left(self._places, start), bisect_left(self._places, start + count)
        return tuple(self._runs(first, end, start))

    def _runs(self, first: int, end: int, start: int) -> Iterator[Given]:
        while first < end and self._vectors is not None:
            after = first + 1
            while after < end and self._places[after] == self._places[after - 1] + 1:
                after += 1
            yield Given(self._places[first] - start, self._vectors[first:after])
            first = after
