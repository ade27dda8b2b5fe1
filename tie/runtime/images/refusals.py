"""Why an image is not decoded: a closed set, whose codes a user's program can rely on (docs/images.md has the list)."""

import enum
from types import MappingProxyType
from typing import Final


class Refusal(enum.IntEnum):
    """One reason. Its number passes between processes; its code, the name in lower case, goes to the user."""

    EMPTY = 1
    FILE_TOO_LARGE = 2
    FORMAT_UNKNOWN = 3
    FORMAT_HEIC = 4
    FORMAT_AVIF = 5
    FORMAT_GIF = 6
    FORMAT_WEBP = 7
    FORMAT_TIFF = 8
    FORMAT_BMP = 9
    FORMAT_SVG = 10
    FORMAT_PDF = 11
    ANIMATED = 12
    TRUNCATED = 13
    CORRUPT = 14
    TRAILING_BYTES = 15
    TOO_MANY_PIXELS = 16
    TOO_LONG_A_SIDE = 17
    IMPOSSIBLE_RATIO = 18
    TOO_MANY_SCANS = 19
    CMYK = 20
    JPEG_VARIANT = 21
    PNG_VARIANT = 22
    TOO_SLOW = 23
    DECODER_DIED = 24

    @property
    def code(self) -> str:
        """As users see it."""
        return self.name.lower().replace("_", "-")

    @property
    def text(self) -> str:
        """What a user can do about it; no user data."""
        return _TEXTS[self]


_CONVERT: Final = "is not decoded here: send it as JPEG or PNG"
_TEXTS: Final = MappingProxyType(
    {
        Refusal.EMPTY: "has no bytes",
        Refusal.FILE_TOO_LARGE: "has more bytes than an image may have",
        Refusal.FORMAT_UNKNOWN: f"is of no format that is known, and {_CONVERT}",
        Refusal.FORMAT_HEIC: f"is HEIC, which {_CONVERT}",
        Refusal.FORMAT_AVIF: f"is AVIF, which {_CONVERT}",
        Refusal.FORMAT_GIF: f"is GIF, which {_CONVERT}",
        Refusal.FORMAT_WEBP: f"is WebP, which {_CONVERT}",
        Refusal.FORMAT_TIFF: f"is TIFF, which {_CONVERT}",
        Refusal.FORMAT_BMP: f"is BMP, which {_CONVERT}",
        Refusal.FORMAT_SVG: f"is SVG, which {_CONVERT}",
        Refusal.FORMAT_PDF: f"is PDF, which {_CONVERT}",
        Refusal.ANIMATED: "is animated: send one picture of it",
        Refusal.TRUNCATED: "ends too early",
        Refusal.CORRUPT: "is damaged",
        Refusal.TRAILING_BYTES: "has bytes after its end: save it anew",
        Refusal.TOO_MANY_PIXELS: "has more pixels than an image may have: scale it down",
        Refusal.TOO_LONG_A_SIDE: "is wider or higher than an image may be: scale it down",
        Refusal.IMPOSSIBLE_RATIO: "claims more pixels than its bytes can hold",
        Refusal.TOO_MANY_SCANS: "comes in more scans than an image may have: save it as a baseline JPEG",
        Refusal.CMYK: "is in print colours (CMYK): save it as RGB",
        Refusal.JPEG_VARIANT: "is a JPEG of a rare kind: save it as a baseline or progressive one with 8 bits",
        Refusal.PNG_VARIANT: "is interlaced with less than 8 bits a pixel: save it without interlacing",
        Refusal.TOO_SLOW: "takes too long to decode",
        Refusal.DECODER_DIED: "ended its decoder, which had it alone",
    }
)


class ImageRefusedError(Exception):
    """This image is not decoded.

    Attributes:
        refusal: why.
    """

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.code)
        self.refusal = refusal
