"""Pictures of every kind that a user may send, made here: `python tests/helpers/image_corpus.py DIRECTORY` writes them.

Each has a name that says what it is, and what must become of it: `None`, decoded as Pillow decodes it, or the refusal.
"""

import io
import itertools
import struct
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from tie.runtime.images.refusals import Refusal

CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
SOF = (b"\xff\xc0", b"\xff\xc2")


@dataclass(frozen=True)
class Case:
    """One file; `refusal` is None where it must be decoded."""

    name: str
    data: bytes
    refusal: Refusal | None = None


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(
    width: int, height: int, depth: int, colour: int, stream: bytes, *, extra: bytes = b"", adam7: int = 0
) -> bytes:
    """A PNG of an uncompressed stream of filtered rows."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, adam7)
    body = chunk(b"IHDR", header) + extra + chunk(b"IDAT", zlib.compress(stream)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def random_rows(random: np.random.Generator, width: int, height: int, depth: int, colour: int) -> bytes:
    """Rows of random bytes, each with a filter."""
    size = (width * CHANNELS[colour] * depth + 7) // 8
    return b"".join(bytes([random.integers(5)]) + random.bytes(size) for _ in range(height) if width)


def interlaced_rows(random: np.random.Generator, width: int, height: int, depth: int, colour: int) -> bytes:
    """The same for Adam7's seven passes."""
    return b"".join(
        random_rows(random, -(-(width - x) // across), -(-(height - y) // down), depth, colour)
        for x, y, across, down in ADAM7
        if width > x and height > y
    )


def photograph(width: int, height: int, seed: int = 0) -> np.ndarray:
    """Soft colours and some structure, `[height, width, 3]`."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    waves = [
        127 + 60 * np.sin(x / 19 + phase) + 50 * np.cos(y / 23 + x / 57) + random.normal(0, 3, (height, width))
        for phase in (0, 2, 4)
    ]
    return np.stack(waves, -1).clip(0, 255).astype(np.uint8)


def saved(picture: np.ndarray, kind: str, *, mode: str = "RGB", **options: object) -> bytes:
    """As Pillow writes it."""
    file = io.BytesIO()
    Image.fromarray(picture).convert(mode).save(file, kind, **options)
    return file.getvalue()


def cases() -> Iterator[Case]:
    """All of them; the same each time."""
    yield from _pngs()
    yield from _jpegs()
    yield from _orientations()
    yield from _cut()
    yield from _other_formats()
    yield from bombs()


def _pngs() -> Iterator[Case]:
    random = np.random.default_rng(1)
    for colour, depths in DEPTHS.items():
        for depth, (width, height) in itertools.product(depths, ((1, 1), (13, 7), (9, 40), (67, 33))):
            entries = 1 << min(depth, 8)
            colours = chunk(b"PLTE", random.bytes(3 * entries)) if colour == 3 else b""
            name = f"png-colour{colour}-depth{depth}-{width}x{height}"
            yield Case(
                name,
                png(width, height, depth, colour, random_rows(random, width, height, depth, colour), extra=colours),
            )
            rows = interlaced_rows(random, width, height, depth, colour)
            refusal = Refusal.PNG_VARIANT if depth < 8 else None
            yield Case(f"{name}-adam7", png(width, height, depth, colour, rows, extra=colours, adam7=1), refusal)
            key = {0: b"\0\1", 2: b"\0\1\0\2\0\3", 3: random.bytes(max(1, entries // 2))}.get(colour)
            if key and (colour != 0 or depth >= 8):  # Pillow takes the key of grey with less for another one
                rows = random_rows(random, width, height, depth, colour)
                yield Case(f"{name}-trns", png(width, height, depth, colour, rows, extra=colours + chunk(b"tRNS", key)))
    rows = random_rows(random, 9, 9, 8, 2)
    texts = chunk(b"tEXt", b"Comment\0secret") + chunk(b"gAMA", struct.pack(">I", 45455)) + chunk(b"abCd", b"?")
    good = png(9, 9, 8, 2, rows, extra=texts)
    yield Case("png-with-texts", good)
    yield Case("png-bad-crc", good.replace(b"secret", b"sEcret"), Refusal.CORRUPT)
    yield Case("png-unknown-critical-chunk", png(9, 9, 8, 2, rows, extra=chunk(b"ABCD", b"")), Refusal.CORRUPT)
    yield Case("png-short-stream", png(9, 9, 8, 2, rows[:40]), Refusal.CORRUPT)
    yield Case("png-no-palette", png(9, 9, 8, 3, random_rows(random, 9, 9, 8, 3)), Refusal.CORRUPT)
    yield Case(
        "png-palette-too-small",
        png(9, 9, 8, 3, b"\0" + b"\xff" * 9 + b"\0" * 80, extra=chunk(b"PLTE", b"abc")),
        Refusal.CORRUPT,
    )
    yield Case("png-depth-that-is-none", png(9, 9, 3, 0, rows), Refusal.CORRUPT)
    yield Case("png-no-pixels", png(0, 9, 8, 2, b""), Refusal.CORRUPT)
    yield Case("png-trailing-zip", good + b"PK\3\4" + bytes(40), Refusal.TRAILING_BYTES)
    yield Case("png-trailing-byte", good + b"\0", Refusal.TRAILING_BYTES)


def _jpegs() -> Iterator[Case]:
    for mode, progressive, sampling, size in itertools.product(
        ("L", "RGB"), (False, True), (0, 1, 2), ((1, 1), (8, 8), (17, 3), (33, 31), (160, 121))
    ):
        data = saved(photograph(*size), "JPEG", mode=mode, progressive=progressive, subsampling=sampling, quality=88)
        yield Case(f"jpeg-{mode}-progressive{progressive:d}-sampling{sampling}-{size[0]}x{size[1]}", data)
    square = photograph(64, 64)
    for progressive in (False, True):
        for sampling, factors in ((1, 0x12), (2, 0x41)):
            data = bytearray(saved(square, "JPEG", subsampling=sampling, progressive=progressive))
            data[next(at for kind in SOF if (at := data.find(kind)) > 0) + 11] = factors
            yield Case(f"jpeg-factors{factors:x}-progressive{progressive:d}", bytes(data))
        data[next(at for kind in SOF if (at := data.find(kind)) > 0) + 11] = 0x14
        yield Case(f"jpeg-factors14-progressive{progressive:d}", bytes(data), Refusal.JPEG_VARIANT)
        yield Case(
            f"jpeg-cmyk-progressive{progressive:d}",
            saved(square, "JPEG", mode="CMYK", progressive=progressive),
            Refusal.CMYK,
        )
        restarts = saved(photograph(160, 121), "JPEG", restart_marker_blocks=3, progressive=progressive)
        yield Case(f"jpeg-restarts-progressive{progressive:d}", restarts)
    yield Case("jpeg-rgb", saved(square, "JPEG", keep_rgb=True))
    for quality in (1, 10, 50, 100):
        yield Case(f"jpeg-quality{quality}", saved(photograph(97, 75), "JPEG", quality=quality))
    plain = saved(square, "JPEG")
    at = plain.find(SOF[0])
    variants = {"lossless": 0xC3, "hierarchical": 0xC5, "arithmetic": 0xC9}
    for name, kind in variants.items():
        yield Case(f"jpeg-{name}", plain[: at + 1] + bytes([kind]) + plain[at + 2 :], Refusal.JPEG_VARIANT)
    yield Case("jpeg-12-bits", plain[: at + 4] + b"\x0c" + plain[at + 5 :], Refusal.JPEG_VARIANT)
    yield Case("jpeg-height-later", plain[: at + 5] + b"\0\0" + plain[at + 7 :], Refusal.JPEG_VARIANT)
    yield Case("jpeg-comment", plain[:2] + b"\xff\xfe\0\x08secret" + plain[2:])
    yield Case("jpeg-fill-bytes", plain[:at] + b"\xff\xff\xff" + plain[at:])
    yield Case("jpeg-no-tables", plain[:2] + plain[at:], Refusal.CORRUPT)
    yield Case("jpeg-two-in-one", plain + plain, Refusal.TRAILING_BYTES)
    yield Case("jpeg-trailing-zip", plain + b"PK\3\4" + bytes(40), Refusal.TRAILING_BYTES)
    yield Case("jpeg-leading-byte", b"\0" + plain, Refusal.FORMAT_UNKNOWN)


def _orientations() -> Iterator[Case]:
    for number in (0, *range(1, 9), 9):
        exif = Image.Exif()
        exif[0x0112] = number
        for kind in ("JPEG", "PNG"):
            yield Case(f"{kind.lower()}-orientation{number}", saved(photograph(41, 23), kind, exif=exif))
    for kind, (width, height) in itertools.product(("JPEG", "PNG"), ((10_000, 1), (1, 10_000))):
        yield Case(f"{kind.lower()}-{width}x{height}", saved(photograph(width, height), kind))


def _cut() -> Iterator[Case]:
    """Cut at every kilobyte."""
    for kind, options in (("JPEG", {"quality": 92}), ("JPEG", {"progressive": True}), ("PNG", {})):
        data = saved(photograph(320, 240), kind, **options)
        name = f"{kind.lower()}{'-progressive' if 'progressive' in options else ''}"
        for at in range(1024, len(data), 1024 if len(data) < 65_536 else 4096):
            yield Case(f"{name}-cut-at-{at}", data[:at], Refusal.TRUNCATED)
        for at in (1, 2, 3, 7, len(data) - 1):
            yield Case(f"{name}-cut-at-{at}", data[:at], Refusal.TRUNCATED)


def _other_formats() -> Iterator[Case]:
    picture, other = photograph(32, 24), photograph(32, 24, seed=1)
    more = Image.fromarray(other)
    yield Case("empty", b"", Refusal.EMPTY)
    yield Case("gif", saved(picture, "GIF"), Refusal.FORMAT_GIF)
    yield Case("gif-animated", saved(picture, "GIF", save_all=True, append_images=[more]), Refusal.FORMAT_GIF)
    yield Case("webp", saved(picture, "WEBP"), Refusal.FORMAT_WEBP)
    yield Case("webp-lossless", saved(picture, "WEBP", lossless=True), Refusal.FORMAT_WEBP)
    yield Case("tiff", saved(picture, "TIFF"), Refusal.FORMAT_TIFF)
    yield Case("tiff-big-endian", b"MM\0*" + bytes(64), Refusal.FORMAT_TIFF)
    yield Case("bmp", saved(picture, "BMP"), Refusal.FORMAT_BMP)
    yield Case("avif", struct.pack(">I", 28) + b"ftypavif\0\0\0\0avifmif1miaf" + bytes(64), Refusal.FORMAT_AVIF)
    yield Case("heic", struct.pack(">I", 24) + b"ftypheic\0\0\0\0mif1heic" + bytes(64), Refusal.FORMAT_HEIC)
    yield Case("heif-mif1", struct.pack(">I", 24) + b"ftypmif1\0\0\0\0mif1heic" + bytes(64), Refusal.FORMAT_HEIC)
    yield Case("svg", b'<svg xmlns="http://www.w3.org/2000/svg"/>', Refusal.FORMAT_SVG)
    yield Case("svg-with-declaration", b'<?xml version="1.0"?>\n<svg/>', Refusal.FORMAT_SVG)
    yield Case("pdf", saved(picture, "PDF"), Refusal.FORMAT_PDF)
    yield Case("apng", saved(picture, "PNG", save_all=True, append_images=[more]), Refusal.ANIMATED)
    for kind in ("ICO", "PPM", "TGA", "JPEG2000"):
        yield Case(kind.lower(), saved(picture, kind), Refusal.FORMAT_UNKNOWN)
    yield Case("text", b"data:image/png;base64,iVBORw0KGgo=", Refusal.FORMAT_UNKNOWN)


def bombs() -> Iterator[Case]:
    """Small files that would be large pictures."""
    zeros = bytes(1 << 24)
    wide = 1 << 31
    yield Case("bomb-png-claims-everything", png(wide - 1, wide - 1, 16, 6, b""), Refusal.TOO_LONG_A_SIDE)
    yield Case("bomb-png-claims-a-lot", png(16_000, 16_000, 8, 2, b""), Refusal.TOO_MANY_PIXELS)
    yield Case("bomb-png-real", png(11_585, 11_585, 1, 0, zeros + bytes(65_536)), Refusal.TOO_MANY_PIXELS)
    yield Case("bomb-png-claims-within-limits", png(4000, 4000, 16, 6, zeros[:4096]), Refusal.IMPOSSIBLE_RATIO)
    yield Case("bomb-png-text", png(9, 9, 8, 0, bytes(90), extra=chunk(b"zTXt", b"k\0\0" + zlib.compress(zeros))))
    yield Case("bomb-png-profile", png(9, 9, 8, 0, bytes(90), extra=chunk(b"iCCP", b"k\0\0" + zlib.compress(zeros))))
    yield Case("bomb-png-longer-than-it-says", png(9, 9, 8, 0, zeros))
    flat = np.zeros((64, 64, 3), dtype=np.uint8)
    jpeg = saved(flat, "JPEG")
    progressive = saved(flat, "JPEG", progressive=True)
    for name, data in (("baseline", jpeg), ("progressive", progressive)):
        at = next(at for kind in SOF if (at := data.find(kind)) > 0) + 5
        for side, refusal in (
            (65_500, Refusal.TOO_LONG_A_SIDE),
            (16_000, Refusal.TOO_MANY_PIXELS),
            (4000, Refusal.IMPOSSIBLE_RATIO),
        ):
            claimed = data[:at] + struct.pack(">HH", side, side) + data[at + 4 :]
            yield Case(f"bomb-jpeg-{name}-claims-{side}", claimed, refusal)
    start = progressive.rfind(b"\xff\xda")
    yield Case("bomb-jpeg-scans", progressive[:-2] + progressive[start:-2] * 5000 + b"\xff\xd9", Refusal.TOO_MANY_SCANS)


def main() -> None:
    """Writes them."""
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    count = 0
    for case in cases():
        (directory / f"{case.name}.{case.refusal.code if case.refusal else 'good'}").write_bytes(case.data)
        count += 1
    print(f"{count} files in {directory}")


if __name__ == "__main__":
    main()
