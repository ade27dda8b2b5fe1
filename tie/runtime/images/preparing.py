"""From a picture to what a vision encoder takes: squares of one size, as the model's own image processor makes them.

Two ways. `tiles`, of Idefics3 and SmolVLM (Laurençon et al. 2024, arXiv 2408.12637): the picture is enlarged or shrunk
until its longer side is `longest_edge`, then to whole multiples of the square, cut, and as a whole shrunk to one more
square. `square`, of LLaVA with a SigLIP tower: the whole picture as one square. Pillow resizes arrays, and decodes
nothing.
"""

import math

import numpy as np
from PIL import Image

from tie.runtime.images.exif import Pixels
from tie.runtime.images.orders import Preparation, Prepared


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
