"""Tells a file's format by its content. What it is called or said to be does not matter."""

import re
from typing import Final, Literal

from tie.runtime.images.refusals import ImageRefusedError, Refusal

Format = Literal["jpeg", "png"]

# Brands of the ISO base media file format (ISO/IEC 14496-12) that hold pictures. Sequences count as their format.
_BRANDS: Final = {
    b"heic": Refusal.FORMAT_HEIC, b"heix": Refusal.FORMAT_HEIC, b"heim": Refusal.FORMAT_HEIC,
    b"heis": Refusal.FORMAT_HEIC, b"hevc": Refusal.FORMAT_HEIC, b"hevx": Refusal.FORMAT_HEIC,
    b"mif1": Refusal.FORMAT_HEIC, b"msf1": Refusal.FORMAT_HEIC,
    b"avif": Refusal.FORMAT_AVIF, b"avis": Refusal.FORMAT_AVIF,
}  # fmt: skip
_OTHERS: Final = (
    (re.compile(rb"GIF8[79]a"), Refusal.FORMAT_GIF),
    (re.compile(rb"RIFF....WEBP", re.DOTALL), Refusal.FORMAT_WEBP),
    (re.compile(rb"II[*+]\0|MM\0[*+]"), Refusal.FORMAT_TIFF),
    (re.compile(rb"BM.{12}[\x0c-\x7f]\0\0\0", re.DOTALL), Refusal.FORMAT_BMP),
    (re.compile(rb"%PDF-"), Refusal.FORMAT_PDF),
    (re.compile(rb"\s*(<\?xml|<!--|<!DOCTYPE svg|<svg)"), Refusal.FORMAT_SVG),
)
_SVG_TEXT: Final = 4096  # bytes within which an SVG says that it is one


def format_of(data: bytes) -> Format:
    """The format of a file that is decoded here.

    Raises:
        ImageRefusedError: it is of another.
    """
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "png"
    if data.startswith(b"\xff\xd8\xff"):
        return "jpeg"
    raise ImageRefusedError(_other(data))


def _other(data: bytes) -> Refusal:
    if not data:
        return Refusal.EMPTY
    if data[4:8] == b"ftyp":
        # The major brand, or, where that is a general one, the compatible ones; AVIF may call itself mif1 as well.
        brands = [data[8:12], *(data[at : at + 4] for at in range(16, min(64, len(data)), 4))]
        known = [_BRANDS[brand] for brand in brands if brand in _BRANDS]
        if known:
            return Refusal.FORMAT_AVIF if Refusal.FORMAT_AVIF in known else Refusal.FORMAT_HEIC
    for pattern, refusal in _OTHERS:
        if pattern.match(data):
            if refusal is Refusal.FORMAT_SVG and b"<svg" not in data[:_SVG_TEXT]:
                continue
            return refusal
    # Cut within the first bytes of one of ours.
    if b"\x89PNG\r\n\x1a\n".startswith(data) or b"\xff\xd8\xff".startswith(data):
        return Refusal.TRUNCATED
    return Refusal.FORMAT_UNKNOWN
