"""JPEG (ITU-T T.81): what it claims, and the least of it that a decoder must see.

As with PNG the decoder gets a new file: tables, one frame, its scans and an end. Thumbnails, profiles and comments stay
away from it. Of the application's segments one is written anew, Adobe's, since it says of which colours the samples
are: what JFIF's, Adobe's and the components' names say together is decided here, by the rules that libjpeg has.
"""

import re
import struct
from dataclasses import dataclass
from typing import Final

from tie.runtime.images.exif import UPRIGHT, orientation
from tie.runtime.images.limits import Limits
from tie.runtime.images.refusals import ImageRefusedError, Refusal

_SOI, _EOI, _SOS, _DQT, _DHT, _DRI, _DNL, _TEM = 0xD8, 0xD9, 0xDA, 0xDB, 0xC4, 0xDD, 0xDC, 0x01
_SOF: Final = range(0xC0, 0xD0)  # with DHT (C4), JPG (C8) and DAC (CC) among them
_BASELINE, _EXTENDED, _PROGRESSIVE = 0xC0, 0xC1, 0xC2
_APP0, _APP1, _APP14 = 0xE0, 0xE1, 0xEE
# The end of a scan: a marker that is neither a stuffed byte, a restart, nor a fill byte before a marker.
_MARKER: Final = re.compile(rb"\xff+[^\x00\xff\xd0-\xd7]", re.DOTALL)
_MOST_SEGMENTS: Final = 4096
_MOST_PIXELS_PER_BYTE: Final = 512  # a block of 64 samples takes a bit at least, in the first scan that has it


@dataclass(frozen=True, slots=True)
class Jpeg:
    """A file that is one still picture, as far as can be seen without decoding it.

    Attributes:
        file: what the decoder gets.
        components: 1, grey, or 3.
        orientation: Exif's.
    """

    width: int
    height: int
    components: int
    file: bytes
    orientation: int


@dataclass(frozen=True, slots=True)
class _Frame:
    kind: int
    width: int
    height: int
    names: bytes

    @classmethod
    def read(cls, kind: int, content: bytes, limits: Limits) -> "_Frame":
        if kind not in {_BASELINE, _EXTENDED, _PROGRESSIVE}:
            raise ImageRefusedError(Refusal.JPEG_VARIANT)
        if len(content) < 6 or len(content) != 6 + 3 * content[5]:
            raise ImageRefusedError(Refusal.CORRUPT)
        precision, height, width, components = struct.unpack_from(">BHHB", content)
        if precision != 8 or not height:  # a height that comes after the first scan (DNL)
            raise ImageRefusedError(Refusal.JPEG_VARIANT)
        limits.check_size(width, height)
        if components == 4:
            raise ImageRefusedError(Refusal.CMYK)
        if components not in {1, 3}:
            raise ImageRefusedError(Refusal.JPEG_VARIANT)
        factors = [(one >> 4, one & 15) for one in content[7::3]]
        if not all(1 <= across <= 4 and 1 <= down <= 4 for across, down in factors):
            raise ImageRefusedError(Refusal.CORRUPT)
        # What cameras and programs write: one or both of the colours' sides halved, or a quarter of a side; or nothing.
        if components == 3 and (
            factors[0] not in {(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)} or factors[1:] != [(1, 1), (1, 1)]
        ):
            raise ImageRefusedError(Refusal.JPEG_VARIANT)
        return cls(kind, width, height, content[6::3])


def read(data: bytes, limits: Limits) -> Jpeg:
    """Walks the segments of a file that begins with a start of image.

    Raises:
        ImageRefusedError: it is not one whole still picture within the limits.
    """
    kept = [b"\xff\xd8"]
    frame: _Frame | None = None
    jfif, adobe, exif, scans, at = False, -1, b"", 0, 2
    for _ in range(_MOST_SEGMENTS):
        kind, at = _marker(data, at)
        if kind == _EOI:
            break
        if kind in {_SOI, _DNL, _TEM, 0x00} or 0xD0 <= kind <= 0xD7:
            raise ImageRefusedError(Refusal.CORRUPT)
        content, at = _segment(data, at)
        if kind in _SOF and kind not in {_DHT, 0xC8, 0xCC}:
            if frame:
                raise ImageRefusedError(Refusal.CORRUPT)
            frame = _Frame.read(kind, content, limits)
        elif kind in {0xC8, 0xCC}:  # reserved; arithmetic coding
            raise ImageRefusedError(Refusal.JPEG_VARIANT)
        elif kind == _APP0:
            jfif = jfif or content.startswith(b"JFIF\0")
        elif kind == _APP14 and content.startswith(b"Adobe") and len(content) >= 12:
            adobe = content[11]
        elif kind == _APP1 and content.startswith(b"Exif\0\0") and not exif:
            exif = content[6:]
        if kind in {_DQT, _DHT, _DRI, _SOS} or kind in _SOF:
            kept.append(data[at - len(content) - 4 : at])
        if kind == _SOS:
            scans += 1
            if not frame:
                raise ImageRefusedError(Refusal.CORRUPT)
            if scans > limits.scans:
                raise ImageRefusedError(Refusal.TOO_MANY_SCANS)
            found = _MARKER.search(data, at)
            if not found:
                raise ImageRefusedError(Refusal.TRUNCATED)
            kept.append(data[at : found.start()])
            at = found.start()
    else:
        raise ImageRefusedError(Refusal.CORRUPT)
    if not frame or not scans:
        raise ImageRefusedError(Refusal.CORRUPT)
    if at < len(data):
        raise ImageRefusedError(Refusal.TRAILING_BYTES)
    size = sum(map(len, kept))
    if frame.width * frame.height > _MOST_PIXELS_PER_BYTE * size:
        raise ImageRefusedError(Refusal.IMPOSSIBLE_RATIO)
    if len(frame.names) == 3:
        kept.insert(1, _adobe(transform=not _is_rgb(frame.names, jfif=jfif, adobe=adobe)))
    kept.append(b"\xff\xd9")
    return Jpeg(frame.width, frame.height, len(frame.names), b"".join(kept), orientation(exif) if exif else UPRIGHT)


def _marker(data: bytes, at: int) -> tuple[int, int]:
    """The marker at a place, which fill bytes may precede, and the place after it."""
    start = at
    while data[at : at + 1] == b"\xff" and data[at + 1 : at + 2] == b"\xff" and at - start < 1024:
        at += 1
    if len(data) < at + 2:
        raise ImageRefusedError(Refusal.TRUNCATED)
    if data[at] != 0xFF:
        raise ImageRefusedError(Refusal.CORRUPT)
    return data[at + 1], at + 2


def _segment(data: bytes, at: int) -> tuple[bytes, int]:
    """A segment's content, and the place after it."""
    if len(data) < at + 2:
        raise ImageRefusedError(Refusal.TRUNCATED)
    length = int.from_bytes(data[at : at + 2], "big")
    if length < 2:
        raise ImageRefusedError(Refusal.CORRUPT)
    if len(data) < at + length:
        raise ImageRefusedError(Refusal.TRUNCATED)
    return data[at + 2 : at + length], at + length


def _is_rgb(names: bytes, *, jfif: bool, adobe: int) -> bool:
    if jfif:
        return False
    return adobe == 0 if adobe >= 0 else names == b"RGB"


def _adobe(*, transform: bool) -> bytes:
    return b"\xff\xee\0\x0eAdobe\0\x64\0\0\0\0" + bytes([transform])
