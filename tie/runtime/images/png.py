"""PNG (W3C Recommendation, third edition; ISO/IEC 15948): what it claims, and the least of it that a decoder must see.

The decoder never gets the file: it gets a new one, of a header, the compressed pixels and an end. Everything else, be
it profiles, texts or thumbnails, each with a compression and a reader of its own, stays away from it.

The decoder takes pixels of 8 and 16 bits, and no palettes. All other kinds are the same rows of bytes under another
header: a row of 13 pixels with 4 bits each is 7 bytes, which is a row of 7 grey pixels. So the header is written anew,
and what comes back is read as what it was. Only interlacing (Adam7) with less than 8 bits a pixel does not go so.
"""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tie.runtime.images.exif import UPRIGHT, Pixels, orientation
from tie.runtime.images.limits import Limits
from tie.runtime.images.refusals import ImageRefusedError, Refusal

Samples = npt.NDArray[Any]  # of 8 or of 16 bits
SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
_GREY, _RGB, _PALETTE, _GREY_ALPHA, _RGBA = 0, 2, 3, 4, 6
_CHANNELS: Final = {_GREY: 1, _RGB: 3, _PALETTE: 1, _GREY_ALPHA: 2, _RGBA: 4}
_DEPTHS: Final = {
    _GREY: (1, 2, 4, 8, 16), _RGB: (8, 16), _PALETTE: (1, 2, 4, 8), _GREY_ALPHA: (8, 16), _RGBA: (8, 16)
}  # fmt: skip
_MOST_INFLATION: Final = 1032  # of DEFLATE (RFC 1951): 258 bytes for a pair of codes of one bit each
_MOST_CHUNKS: Final = 65_536
_BAND: Final = 1 << 18  # pixels that are mixed with the background at a time


@dataclass(frozen=True, slots=True)
class Plan:
    """What the decoder is asked.

    Attributes:
        file: that it gets.
        width: of the picture in it.
        height: of it.
        mode: kornia_rs' name of its channels.
        depth: 8 or 16.
    """

    file: bytes
    width: int
    height: int
    mode: str
    depth: int


@dataclass(frozen=True, slots=True)
class Png:
    """A file that is one still picture, as far as can be seen without decoding it.

    Attributes:
        orientation: Exif's.
    """

    width: int
    height: int
    depth: int
    colour: int
    interlaced: bool
    palette: bytes
    transparency: bytes
    data: bytes
    orientation: int

    def plan(self) -> Plan:
        """How it is decoded."""
        if self.colour == _GREY_ALPHA:
            # Two bytes a pixel are one grey value of 16 bits; four are four of 8.
            return self._as(_GREY, 16, "mono") if self.depth == 8 else self._as(_RGBA, 8, "rgba")
        if self.depth < 8:
            return self._as(_GREY, 8, "mono", width=-(-self.width * self.depth // 8))
        colour = _GREY if self.colour == _PALETTE else self.colour
        return self._as(colour, self.depth, {_GREY: "mono", _RGB: "rgb", _RGBA: "rgba"}[colour])

    def _as(self, colour: int, depth: int, mode: str, *, width: int = 0) -> Plan:
        width = width or self.width
        header = struct.pack(">IIBBBBB", width, self.height, depth, colour, 0, 0, self.interlaced)
        file = b"".join((SIGNATURE, _chunk(b"IHDR", header), _chunk(b"IDAT", self.data), _chunk(b"IEND", b"")))
        return Plan(file, width, self.height, mode, depth)

    def finish(self, decoded: Samples) -> Pixels:
        """What the decoder gave for `plan`, as `[height, width, 3]`; what is transparent lies on white."""
        values = self._values(decoded)
        if self.colour == _PALETTE:
            return self._from_palette(values[..., 0])
        grey, alpha = self.colour in {_GREY, _GREY_ALPHA}, self.colour in {_GREY_ALPHA, _RGBA}
        if alpha:
            opacity = _high(values[..., -1])
        elif self.transparency:
            key = np.frombuffer(self.transparency, dtype=">u2").astype(values.dtype)
            opacity = np.where((values == key).all(-1), 0, 255).astype(np.uint8)
        else:
            opacity = None
        if grey:
            levels = _high(values[..., 0]) if self.depth >= 8 else values[..., 0] * (255 // ((1 << self.depth) - 1))
            picture = np.repeat(levels.astype(np.uint8)[..., None], 3, axis=-1)
        else:
            picture = np.ascontiguousarray(_high(values[..., :3]))
        return picture if opacity is None else _on_white(picture, opacity)

    def _values(self, decoded: Samples) -> Samples:
        """The picture's own samples, `[height, width, channels]`."""
        if self.colour == _GREY_ALPHA and self.depth == 8:
            both: Samples = np.stack((decoded[..., 0] >> 8, decoded[..., 0] & 255), axis=-1).astype(np.uint8)
            return both
        if self.colour == _GREY_ALPHA:
            upper: Samples = decoded[..., 0::2]  # the lower ones do not reach the result
            return upper
        if self.depth < 8:
            bits = np.unpackbits(decoded[..., 0], axis=-1)[:, : self.width * self.depth]
            places = 1 << np.arange(self.depth - 1, -1, -1, dtype=np.uint8)
            whole: Samples = (bits.reshape(self.height, self.width, self.depth) * places).sum(-1, dtype=np.uint8)
            return whole.reshape(self.height, self.width, 1)
        return decoded

    def _from_palette(self, indices: Pixels) -> Pixels:
        colours = np.frombuffer(self.palette, dtype=np.uint8).reshape(-1, 3)
        if len(colours) <= int(indices.max()):
            raise ImageRefusedError(Refusal.CORRUPT)
        if self.transparency:
            opacity = np.full(len(colours), 255, dtype=np.uint8)
            opacity[: len(self.transparency)] = np.frombuffer(self.transparency, dtype=np.uint8)
            colours = _on_white(colours[None], opacity[None])[0]
        return np.ascontiguousarray(colours[indices])


def read(data: bytes, limits: Limits) -> Png:
    """Walks the chunks of a file that begins with `SIGNATURE`.

    Raises:
        ImageRefusedError: it is not one whole still picture within the limits.
    """
    chunks = _chunks(data)
    if next(chunks, None) != (b"IHDR", head := data[16:29]) or len(head) != 13:
        raise ImageRefusedError(Refusal.TRUNCATED if len(data) < 33 else Refusal.CORRUPT)
    width, height, depth, colour, compression, filtering, interlace = struct.unpack(">IIBBBBB", head)
    limits.check_size(width, height)
    if depth not in _DEPTHS.get(colour, ()) or compression or filtering or interlace > 1:
        raise ImageRefusedError(Refusal.CORRUPT)
    if interlace and depth < 8:
        raise ImageRefusedError(Refusal.PNG_VARIANT)
    palette = transparency = exif = b""
    pieces: list[bytes] = []
    over = False
    for kind, content in chunks:
        if kind == b"IDAT":
            if over:
                raise ImageRefusedError(Refusal.CORRUPT)
            pieces.append(content)
            continue
        over = bool(pieces)
        if kind == b"acTL":
            raise ImageRefusedError(Refusal.ANIMATED)
        if kind == b"eXIf":
            exif = content
        elif kind == b"PLTE" and not pieces:
            palette = content
        elif kind == b"tRNS" and not pieces:
            transparency = content
        elif kind != b"IEND" and not kind[0] & 0x20:  # what must be understood and is not
            raise ImageRefusedError(Refusal.CORRUPT)
    compressed = b"".join(pieces)
    needed = height * (1 + width * _CHANNELS[colour] * depth // 8)
    if needed > _MOST_INFLATION * len(compressed):
        raise ImageRefusedError(Refusal.IMPOSSIBLE_RATIO)
    _check_colours(colour, depth, palette, transparency)
    return Png(
        width, height, depth, colour, bool(interlace), palette, transparency, compressed,
        orientation(exif) if exif else UPRIGHT,
    )  # fmt: skip


def _chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Kind and content of each; the last is IEND, and nothing follows it."""
    at = len(SIGNATURE)
    for _ in range(_MOST_CHUNKS):
        if len(data) < at + 12:
            raise ImageRefusedError(Refusal.TRUNCATED)
        length, kind = struct.unpack_from(">I4s", data, at)
        if length > 0x7FFF_FFFF or not kind.isalpha():
            raise ImageRefusedError(Refusal.CORRUPT)
        end = at + 8 + length
        if len(data) < end + 4:
            raise ImageRefusedError(Refusal.TRUNCATED)
        content = data[at + 8 : end]
        if zlib.crc32(content, zlib.crc32(kind)) != int.from_bytes(data[end : end + 4], "big"):
            raise ImageRefusedError(Refusal.CORRUPT)
        yield kind, content
        at = end + 4
        if kind == b"IEND":
            if at < len(data):
                raise ImageRefusedError(Refusal.TRAILING_BYTES)
            return
    raise ImageRefusedError(Refusal.CORRUPT)


def _check_colours(colour: int, depth: int, palette: bytes, transparency: bytes) -> None:
    if colour == _PALETTE:
        good = 0 < len(palette) <= 3 << depth and not len(palette) % 3 and len(transparency) <= len(palette) // 3
    else:
        good = len(transparency) in {0, {_GREY: 2, _RGB: 6}.get(colour, 0)}
    if not good:
        raise ImageRefusedError(Refusal.CORRUPT)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return b"".join(
        (len(content).to_bytes(4, "big"), kind, content, zlib.crc32(content, zlib.crc32(kind)).to_bytes(4, "big"))
    )


def _high(values: Samples) -> Pixels:
    """The upper 8 bits of samples."""
    return values if values.dtype == np.uint8 else (values >> 8).astype(np.uint8)


def _on_white(picture: Pixels, opacity: Pixels) -> Pixels:
    """The picture mixed with white, by how opaque it is; some rows at a time, for the numbers in between are larger."""
    rows = max(1, _BAND // max(1, picture.shape[1]))
    mixed = np.empty_like(picture)
    for start in range(0, len(picture), rows):
        part = slice(start, start + rows)
        cover = opacity[part, :, None].astype(np.uint16)
        mixed[part] = (picture[part] * cover + 255 * (255 - cover) + 127) // 255
    return mixed
