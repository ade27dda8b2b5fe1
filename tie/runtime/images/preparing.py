"""From a picture to what a vision encoder takes: squares of one size, as the model's own image processor makes them.

Two ways. `tiles`, of Idefics3 and SmolVLM (Laurençon et al. 2024, arXiv 2408.12637): the picture is enlarged or shrunk
until its longer side is `longest_edge`, then to whole multiples of the square, cut, and as a whole shrunk to one more
square. `square`, of LLaVA with a SigLIP tower: the whole picture as one square. Pillow resizes arrays, and decodes
nothing.
"""

import math
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from PIL import Image

from tie.runtime.images.exif import Pixels

_LONGEST: Final = 4096  # whatever `longest_edge` says
_MOST_SIDE: Final = 2048
MOST_TILES: Final = 65


@dataclass(frozen=True, slots=True)
class Preparation:
    """How a model wants its pictures.

    Attributes:
        kind: see above.
        side: of a square, in pixels.
        longest_edge: of the picture before it is cut; of `tiles` only.
        split: whether it is cut; of `tiles` only.
        resample: Pillow's number of the filter.
    """

    kind: Literal["tiles", "square"]
    side: int
    longest_edge: int
    split: bool
    resample: int

    def __post_init__(self) -> None:
        """Raises ValueError where no picture could be prepared so."""
        if not 1 <= self.side <= _MOST_SIDE or not 0 <= self.resample <= 5:
            raise ValueError("an image processor of this kind is not supported")
        if self.kind == "tiles" and not 1 <= self.longest_edge <= _LONGEST:
            raise ValueError("longest_edge must be from 1 to 4096")
        if self.most_tiles > MOST_TILES:
            raise ValueError("an image would become too many squares")

    @property
    def most_tiles(self) -> int:
        """Squares that a picture can become."""
        return 1 if self.kind == "square" or not self.split else (self.longest_edge // self.side + 1) ** 2 + 1


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Prepared:
    """A picture in squares.

    Attributes:
        tiles: `[n, side, side, 3]` of 8 bits; row by row, and then the whole picture.
        rows: of squares; 0 where there is only the whole picture.
        columns: of squares.
    """

    tiles: Pixels
    rows: int
    columns: int


def prepare(picture: Pixels, how: Preparation) -> Prepared:
    """Resizes and cuts a picture `[height, width, 3]`."""
    if how.kind == "square":
        return Prepared(_resized(picture, how.side, how.side, how)[None], 0, 0)
    height, width = _longest_edge(picture.shape[0], picture.shape[1], how.longest_edge)
    picture = _resized(picture, height, width, how)
    if not how.split:
        return Prepared(_resized(picture, how.side, how.side, how)[None], 0, 0)
    height, width = _multiples(height, width, how.side)
    picture = _resized(picture, height, width, how)
    rows, columns = height // how.side, width // how.side
    if rows == columns == 1:
        return Prepared(picture[None], 0, 0)
    cut = picture.reshape(rows, how.side, columns, how.side, 3).swapaxes(1, 2).reshape(-1, how.side, how.side, 3)
    whole = _resized(picture, how.side, how.side, how)
    return Prepared(np.concatenate((cut, whole[None])), rows, columns)


def _longest_edge(height: int, width: int, longest: int) -> tuple[int, int]:
    """Height and width with the longer side as wanted, and the other even: as the processor computes them."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        height, width = longest, int(longest * ratio)
        width += width % 2
    return max(1, height), max(1, width)


def _multiples(height: int, width: int, side: int) -> tuple[int, int]:
    """Height and width as whole multiples of a side, the longer first."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / side) * side
        height = math.ceil(int(width / ratio) / side) * side
    else:
        height = math.ceil(height / side) * side
        width = math.ceil(int(height * ratio) / side) * side
    return max(side, height), max(side, width)


def _resized(picture: Pixels, height: int, width: int, how: Preparation) -> Pixels:
    if picture.shape[:2] == (height, width):
        return picture
    image = Image.fromarray(picture).resize((width, height), Image.Resampling(how.resample))
    return np.asarray(image)
