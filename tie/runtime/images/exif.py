"""The one thing that is wanted of Exif data: which way up the picture is.

Exif (JEITA CP-3451, a TIFF structure) is written by anybody, so this reads no more than the first directory, and takes
whatever it cannot read as "upright", as viewers do.
"""

import struct
from typing import Final

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]

UPRIGHT: Final = 1
_ORIENTATION: Final = 0x0112
_SHORT: Final = 3
_MOST_ENTRIES: Final = 256


def orientation(tiff: bytes) -> int:
    """The orientation, 1 to 8, that a TIFF structure states; `UPRIGHT` where it states none."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None:
        return UPRIGHT
    try:
        (start,) = struct.unpack_from(f"{order}I", tiff, 4)
        (count,) = struct.unpack_from(f"{order}H", tiff, start)
        for number in range(min(count, _MOST_ENTRIES)):
            tag, kind, values, value = struct.unpack_from(f"{order}HHIH", tiff, start + 2 + 12 * number)
            if tag == _ORIENTATION:
                return value if kind == _SHORT and values == 1 and 1 <= value <= 8 else UPRIGHT
    except struct.error:
        pass
    return UPRIGHT


def upright(pixels: Pixels, orientation_: int) -> Pixels:
    """The picture `[height, width, 3]` as it is to be seen, contiguous.

    Args:
        pixels: as stored.
        orientation_: where the stored first row and first column are: see Exif's table of the tag.
    """
    if orientation_ in {5, 6, 7, 8}:
        pixels = pixels.swapaxes(0, 1)
    if orientation_ in {3, 4, 7, 8}:
        pixels = pixels[::-1]
    if orientation_ in {2, 3, 6, 7}:
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)
