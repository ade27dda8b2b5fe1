"""What the model sees of a request: vectors, and the positions of the prompt that they stand at."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tie.bones.batch import Floats, Given
from tie.proto import runtime_pb2
from tie.runtime.request import Bounds, Request, RequestRefusedError


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Seen:
    """One image.

    Attributes:
        rows: of squares; 0 where it is not cut.
        columns: of squares.
        vectors: of all squares one after the other, `[n, hidden_size]`.
    """

    rows: int
    columns: int
    vectors: Floats


class Sight:
    """All vectors of a prompt.

    Args:
        prompt: with as many image tokens as there are vectors.
        token_id: the image token.
        vectors: `[n, hidden_size]`, in order.

    Raises:
        ValueError: there are more or fewer.
    """

    def __init__(self, prompt: Sequence[int], token_id: int, vectors: Floats) -> None:
        self._places = [place for place, token in enumerate(prompt) if token == token_id]
        if len(self._places) != len(vectors):
            raise ValueError("an image's vectors and its places in the prompt differ in number")
        self._vectors = vectors

    def within(self, start: int, count: int) -> tuple[Given, ...]:
        """What belongs to so many positions from `start` on, as runs."""
        first, end = bisect_left(self._places, start), bisect_left(self._places, start + count)
        return tuple(self._runs(first, end, start))

    def _runs(self, first: int, end: int, start: int) -> Iterator[Given]:
        while first < end:
            after = first + 1
            while after < end and self._places[after] == self._places[after - 1] + 1:
                after += 1
            yield Given(self._places[first] - start, self._vectors[first:after])
            first = after


def placed(request: Request, seen: Sequence[Seen], bounds: Bounds) -> tuple[Request, Sight]:
    """The request with all places of its images in the prompt, and what has been seen.

    Raises:
        RequestRefusedError: with them the prompt is too long.
        ValueError: the model has no places for images.
    """
    if bounds.placeholders is None:
        raise ValueError("a model that takes no images has seen some")
    prompt = bounds.placeholders.expanded(request.prompt, [(one.rows, one.columns) for one in seen])
    if len(prompt) >= bounds.max_length:
        detail = f"images: {len(prompt)} tokens with them leave no room for an answer within {bounds.max_length}"
        raise RequestRefusedError(runtime_pb2.CODE_PROMPT_TOO_LONG, detail)
    sight = Sight(prompt, bounds.placeholders.token_id, np.concatenate([one.vectors for one in seen]))
    return replace(request, prompt=tuple(prompt), images=()), sight
