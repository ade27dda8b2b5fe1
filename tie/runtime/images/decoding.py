"""From a file's bytes to upright RGB pixels, by decoders written in Rust: no codec of this path is C.

Of kornia_rs exactly three functions are called, which are zune-jpeg and the `png` crate; a faster JPEG decoder lies
beside them in that package and is C: it has no place here. Runs where a crash of it costs nobody anything but its own
request: see `decoder_process`.
"""

from typing import Any

import numpy as np
from kornia_rs import io

from tie.runtime.images import jpeg, png
from tie.runtime.images.exif import Pixels, upright
from tie.runtime.images.formats import format_of
from tie.runtime.images.limits import Limits
from tie.runtime.images.refusals import ImageRefusedError, Refusal


def decode(data: bytes, limits: Limits) -> Pixels:
    """The picture, `[height, width, 3]`, contiguous.

    Raises:
        ImageRefusedError: it is not decoded.
    """
    if len(data) > limits.file_bytes:
        raise ImageRefusedError(Refusal.FILE_TOO_LARGE)
    if format_of(data) == "png":
        drawing = png.read(data, limits)
        plan = drawing.plan()
        decoder = io.decode_image_png_u8 if plan.depth == 8 else io.decode_image_png_u16
        return upright(drawing.finish(_decoded(decoder, plan)), drawing.orientation)
    photo = jpeg.read(data, limits)
    pixels = _checked(_call(io.decode_image_jpeg, photo.file), (photo.height, photo.width, photo.components), np.uint8)
    if photo.components == 1:
        pixels = np.repeat(pixels, 3, axis=-1)
    return upright(pixels, photo.orientation)


def _decoded(decoder: Any, plan: png.Plan) -> Any:
    shape = (plan.height, plan.width, {"mono": 1, "rgb": 3, "rgba": 4}[plan.mode])
    array = _call(decoder, plan.file, shape[:2], plan.mode)
    return _checked(array, shape, np.uint8 if plan.depth == 8 else np.uint16)


def _call(decoder: Any, *arguments: Any) -> Any:
    try:
        return decoder(*arguments)
    except MemoryError:
        raise ImageRefusedError(Refusal.TOO_MANY_PIXELS) from None
    except BaseException as error:
        # A panic comes as an exception that is no Exception. Whichever it is, its text may quote the file.
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise ImageRefusedError(Refusal.CORRUPT) from None


def _checked(array: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """What came, which must be what the file's own header made us expect."""
    if not isinstance(array, np.ndarray) or array.shape != shape or array.dtype != dtype:
        raise ImageRefusedError(Refusal.CORRUPT)
    return array
