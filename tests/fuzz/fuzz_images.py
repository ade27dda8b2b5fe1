"""Files that claim to be pictures, at the decoder's own entry: mutated where a decoder is likely to care.

A byte changed anywhere in a PNG breaks a check sum and is seen at once, so nothing beyond it is ever tried. Hence the
input is a list of orders to change the structure of a good file, and the sums are made good afterwards.
"""

import contextlib
import os
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np

# Where this runs as a script there is nobody else who says where the helpers are.
sys.path.append(str(Path(__file__).parents[1] / "helpers"))

from image_corpus import cases
from tie.runtime.images.decoding import decode
from tie.runtime.images.limits import Limits
from tie.runtime.images.orders import Preparation
from tie.runtime.images.preparing import prepare
from tie.runtime.images.refusals import ImageRefusedError

LIMITS: Final = Limits(file_bytes=1 << 16, pixels=1 << 13, side=128)
_HOW: Final = Preparation("tiles", 16, 32, split=True, resample=1)
_ORDER: Final = 5  # bytes: what, where (2), with which value (2)
_INTERESTING: Final = (0, 1, 2, 3, 4, 7, 8, 15, 16, 17, 64, 127, 128, 255, 1000, 1024, 8192, 0x7FFF, 0x8000, 0xFFFF)


@cache
def bases() -> tuple[bytes, ...]:
    """Good files, small ones: an input is tried in a moment."""
    return tuple(case.data for case in cases() if case.refusal is None and len(case.data) < 4096)


class Part:
    """A chunk of a PNG, or a segment of a JPEG with the scan behind it: what can be moved as a whole."""

    def __init__(self, kind: bytes, content: bytes, tail: bytes = b"") -> None:
        self.kind, self.content, self.tail = kind, bytearray(content), bytearray(tail)


def image(data: bytes) -> None:
    """Byte 0 and 1 choose a file, bit 7 of byte 1 makes its check sums good; orders of five bytes follow."""
    if len(data) < 2:
        return
    files = bases()
    file = files[(data[0] | (data[1] & 0x7F) << 8) % len(files)]
    orders = [data[at : at + _ORDER] for at in range(2, len(data) - _ORDER + 1, _ORDER)][:24]
    check(_changed(file, orders, good_sums=bool(data[1] & 0x80)))


def check(file: bytes) -> None:
    """Whatever comes of it is a refusal of the closed set, or a picture of the size that was allowed."""
    with contextlib.suppress(ImageRefusedError):
        picture = decode(file, LIMITS)
        height, width, channels = picture.shape
        assert 0 < width * height <= LIMITS.pixels
        assert max(width, height) <= LIMITS.side
        assert (channels, picture.dtype) == (3, np.uint8)
        prepared = prepare(picture, _HOW)
        assert 1 <= len(prepared.tiles) <= _HOW.most_tiles


def _changed(file: bytes, orders: list[bytes], *, good_sums: bool) -> bytes:
    parts, joined = _parsed(file)
    raw: list[tuple[int, int]] = []
    for what, where, value in (struct.unpack("<BHH", order) for order in orders):
        if what & 15 < 3 or not parts:
            raw.append((where, value))
        else:
            _CHANGES[what & 15](parts, where, value, what >> 4)
    out = bytearray(joined(parts, good_sums))
    for where, value in raw:
        if out:
            out[where % len(out)] ^= value & 255 or 1
    if orders and orders[-1][0] == 255:
        del out[len(out) * orders[-1][1] // 255 :]
    return bytes(out)


def _parsed(file: bytes) -> tuple[list[Part], Callable[[list[Part], bool], bytes]]:
    if file.startswith(b"\x89PNG"):
        return list(_chunks(file)), _png
    if file.startswith(b"\xff\xd8"):
        return list(_segments(file)), _jpeg
    return [], lambda _, __: file


def _chunks(file: bytes) -> Iterator[Part]:
    at = 8
    while at + 12 <= len(file):
        (length,) = struct.unpack_from(">I", file, at)
        yield Part(file[at + 4 : at + 8], file[at + 8 : at + 8 + length], file[at + 8 + length : at + 12 + length])
        at += 12 + length


def _png(parts: list[Part], good_sums: bool) -> bytes:
    out = bytearray(b"\x89PNG\r\n\x1a\n")
    for part in parts:
        total = zlib.crc32(part.kind + part.content).to_bytes(4, "big") if good_sums else bytes(part.tail)
        out += len(part.content).to_bytes(4, "big") + part.kind + part.content + total
    return bytes(out)


def _segments(file: bytes) -> Iterator[Part]:
    at = 2
    while at + 4 <= len(file) and file[at + 1] != 0xD9:
        length = int.from_bytes(file[at + 2 : at + 4], "big")
        end = at + 2 + length
        behind = end
        if file[at + 1] == 0xDA:
            while behind + 1 < len(file) and (file[behind] != 0xFF or file[behind + 1] in {0, *range(0xD0, 0xD8)}):
                behind += 1
        yield Part(file[at + 1 : at + 2], file[at + 4 : end], file[end:behind])
        at = max(behind, at + 2)


def _jpeg(parts: list[Part], good_sums: bool) -> bytes:
    out = bytearray(b"\xff\xd8")
    for part in parts:
        length = len(part.content) + 2 + (0 if good_sums else len(part.content) & 1)
        out += b"\xff" + part.kind + (length & 0xFFFF).to_bytes(2, "big") + part.content + part.tail
    return bytes(out + b"\xff\xd9")


# --- changes: of parts, at a place, with a value and a number of 4 bits ---


def _pick(parts: list[Part], number: int) -> Part:
    return parts[number % len(parts)]


def _bytes_of(part: Part) -> bytearray:
    """The scan or stream where there is one, else the content."""
    return part.tail if len(part.tail) > 4 else part.content


def _flip(parts: list[Part], where: int, value: int, which: int) -> None:
    target = _pick(parts, which).content
    if target:
        target[where % len(target)] ^= value & 255 or 1


def _flip_stream(parts: list[Part], where: int, value: int, which: int) -> None:
    target = _bytes_of(max(parts, key=lambda part: len(_bytes_of(part))))
    if target:
        target[where % len(target)] ^= value & 255 or 1 + which


def _interesting(parts: list[Part], where: int, value: int, which: int) -> None:
    target, number = _pick(parts, which).content, _INTERESTING[value % len(_INTERESTING)]
    width = 1 + (value >> 8) % 2
    if len(target) >= width:
        at = where % (len(target) - width + 1)
        target[at : at + width] = (number & ((1 << 8 * width) - 1)).to_bytes(width, "big")


def _drop(parts: list[Part], where: int, _: int, __: int) -> None:
    del parts[where % len(parts)]


def _repeat(parts: list[Part], where: int, value: int, _: int) -> None:
    part = _pick(parts, where)
    parts.insert(value % (len(parts) + 1), Part(part.kind, part.content, part.tail))


def _swap(parts: list[Part], where: int, value: int, _: int) -> None:
    one, other = where % len(parts), value % len(parts)
    parts[one], parts[other] = parts[other], parts[one]


def _rename(parts: list[Part], where: int, value: int, _: int) -> None:
    part = _pick(parts, where)
    kinds = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND", b"acTL", b"eXIf", b"zTXt")
    part.kind = kinds[value % len(kinds)] if len(part.kind) == 4 else bytes([0xC0 + value % 64])


def _shorten(parts: list[Part], where: int, value: int, which: int) -> None:
    target = _bytes_of(_pick(parts, which))
    if target:
        at = where % len(target)
        del target[at : at + 1 + value % 64]


def _lengthen(parts: list[Part], where: int, value: int, which: int) -> None:
    target = _bytes_of(_pick(parts, which))
    target[where % (len(target) + 1) : where % (len(target) + 1)] = bytes([value & 255]) * (1 + value // 1024)


def _deflate(parts: list[Part], where: int, value: int, _: int) -> None:
    """Rows of another picture in the stream of a PNG: what inflates, and does not fit."""
    streams = [part for part in parts if part.kind == b"IDAT"]
    if streams:
        with contextlib.suppress(zlib.error):
            rows = bytearray(zlib.decompress(bytes(streams[0].content)))
            if rows:
                rows[where % len(rows)] = value & 255
                streams[0].content = bytearray(zlib.compress(bytes(rows[: len(rows) - (value >> 8) % 64])))


_CHANGES: Final = {
    3: _flip, 4: _flip, 5: _flip_stream, 6: _flip_stream, 7: _interesting, 8: _interesting, 9: _drop, 10: _repeat,
    11: _swap, 12: _rename, 13: _shorten, 14: _lengthen, 15: _deflate,
}  # fmt: skip


def main() -> None:
    """Blind mutation, as fast as it goes: `python tests/fuzz/fuzz_images.py RUNS [SEED]`.

    The decoders are compiled, so there is no coverage of them to be guided by. A process for each core; one that ends
    otherwise than by itself, or an input that takes more than ten seconds, is what is looked for.
    """
    import multiprocessing
    import time

    runs, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    cores = len(os.sched_getaffinity(0))
    began = time.monotonic()
    with multiprocessing.get_context("fork").Pool(cores) as pool:
        found = pool.starmap(_campaign, [(runs // cores, seed * 1000 + number) for number in range(cores)])
    took = time.monotonic() - began
    done, decoded, slowest = sum(one[0] for one in found), sum(one[1] for one in found), max(one[2] for one in found)
    print(
        f"image: {done} inputs in {took:.0f} s ({done / took:.0f}/s), seed {seed}; {decoded} decoded, "
        f"the slowest took {slowest * 1000:.0f} ms; no crash, no hang, nothing but refusals and pictures"
    )


def _campaign(runs: int, seed: int) -> tuple[int, int, float]:
    import random
    import signal
    import time

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    chance, slowest, decoded = random.Random(seed), 0.0, 0  # noqa: S311 (a seed gives the same inputs)
    files = bases()
    for number in range(runs):
        orders = [chance.randbytes(_ORDER) for _ in range(1 + chance.getrandbits(3))]
        file = _changed(chance.choice(files), orders, good_sums=chance.random() < 0.95)
        signal.setitimer(signal.ITIMER_REAL, 10)
        began = time.perf_counter()
        try:
            check(file)
        except AssertionError:
            Path(f"image-{seed}-{number}").write_bytes(file)
            raise
        slowest = max(slowest, time.perf_counter() - began)
        with contextlib.suppress(ImageRefusedError):
            decoded += number % 100 == 0 and decode(file, LIMITS) is not None
    return runs, decoded * 100, slowest


if __name__ == "__main__":
    main()
