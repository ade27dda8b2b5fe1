r"""The header page of a buffer: what its blocks are, checked before anybody maps them.

Version 1, little-endian, at offset 0 (docs/kvxfer.md has the table):

    0    8    magic "kvxfer\r\n"
    8    2    version, 1
    10   2    reserved, 0
    12   4    block_tokens
    16   4    block_count
    20   4    reserved, 0
    24   8    block_bytes
    32   8    first_token
    40   8    token_count
    48   128  model, UTF-8, padded with zeros
    176  128  release
    304  128  layout
    432  4    CRC-32 (ISO-HDLC, as zlib's) of bytes 0 … 431
    436  588  zeros
    1024 4    committed: how many leading blocks may be read. The only field that changes.
    1028 …    zeros

The CRC is against accidents, not against an adversary: kvxfer trusts no field for what the seals and the size of the
memfd already prove.
"""

import struct
import zlib
from dataclasses import dataclass
from typing import Final, Self

from kvxfer.errors import HeaderError

VERSION: Final = 1
MAGIC: Final = b"kvxfer\r\n"  # a transfer that mangles line ends shows at once
PAGE: Final = 4096
HUGE_PAGE: Final = 1 << 21  # x86-64, and arm64 with pages of 4 KiB; elsewhere no more than an alignment
LARGE: Final = 4 * HUGE_PAGE  # less than this stays in small pages, which are protected one by one
HEADER_BYTES: Final = PAGE
COMMITTED_OFFSET: Final = 1024
COMMITTED: Final = struct.Struct("<I")
TEXT_BYTES: Final = 128
MAX_BLOCKS: Final = 1 << 20
MAX_BLOCK_TOKENS: Final = 1 << 16
MAX_BLOCK_BYTES: Final = 1 << 30
MAX_TOKENS: Final = 1 << 40
MAX_BUFFER_BYTES: Final = 1 << 40

_FIXED: Final = struct.Struct(f"<8sHHIIIQQQ{TEXT_BYTES}s{TEXT_BYTES}s{TEXT_BYTES}s")
_CRC: Final = struct.Struct("<I")
_END: Final = _FIXED.size + _CRC.size


@dataclass(frozen=True, slots=True)
class Header:
    """What a buffer holds.

    Attributes:
        model: model id, at most 128 bytes of UTF-8.
        release: of the model.
        layout: how a block's bytes are laid out, and over which ranks they are split.
        block_tokens: positions in one block.
        block_bytes: bytes of one block.
        block_count: blocks in the buffer.
        first_token: which position of its sequence the first block begins with; a multiple of `block_tokens`.
        token_count: positions that the blocks hold; only the last block may be partly filled.

    Raises:
        HeaderError: a value is impossible.
    """

    model: str
    release: str
    layout: str
    block_tokens: int
    block_bytes: int
    block_count: int
    first_token: int
    token_count: int

    def __post_init__(self) -> None:
        for text in (self.model, self.release, self.layout):
            if not 0 < len(text.encode(errors="replace")) <= TEXT_BYTES or "\0" in text or not text.isprintable():
                raise HeaderError("a name is empty, too long, or not printable")
        if not (
            0 < self.block_tokens <= MAX_BLOCK_TOKENS
            and 0 < self.block_bytes <= MAX_BLOCK_BYTES
            and 0 < self.block_count <= MAX_BLOCKS
            and 0 <= self.first_token <= MAX_TOKENS
            and self.first_token % self.block_tokens == 0
            and (self.block_count - 1) * self.block_tokens < self.token_count <= self.block_count * self.block_tokens
            and buffer_bytes(self.block_bytes, self.block_count) <= MAX_BUFFER_BYTES
        ):
            raise HeaderError("a number is outside its range")

    @property
    def buffer_bytes(self) -> int:
        """The exact size of the memfd."""
        return buffer_bytes(self.block_bytes, self.block_count)

    def offset(self, block: int) -> int:
        """Where a block begins: on a page of its own, so that it can be protected alone."""
        return HEADER_BYTES + block * _stride(self.block_bytes)

    def pack(self) -> bytes:
        """The header page, with no block committed."""
        fixed = _FIXED.pack(
            MAGIC,
            VERSION,
            0,
            self.block_tokens,
            self.block_count,
            0,
            self.block_bytes,
            self.first_token,
            self.token_count,
            self.model.encode(),
            self.release.encode(),
            self.layout.encode(),
        )
        return (fixed + _CRC.pack(zlib.crc32(fixed))).ljust(HEADER_BYTES, b"\0")

    @classmethod
    def unpack(cls, page: bytes) -> Self:
        """Reads a header page. The commit counter in it is left to the caller: it changes.

        Raises:
            HeaderError: the page is not a header, is damaged, of another version, or holds an impossible value.
        """
        if len(page) != HEADER_BYTES:
            raise HeaderError("a header has exactly one page")
        fixed = page[: _FIXED.size]
        (crc,) = _CRC.unpack_from(page, _FIXED.size)
        magic, version, reserved, tokens, blocks, reserved_too, size, first, count, *names = _FIXED.unpack(fixed)
        if magic != MAGIC:
            raise HeaderError("not a kvxfer buffer")
        if version != VERSION:
            raise HeaderError("another version of kvxfer")
        if crc != zlib.crc32(fixed):
            raise HeaderError("the header is damaged")
        unused = page[_END:COMMITTED_OFFSET] + page[COMMITTED_OFFSET + COMMITTED.size :]
        if reserved or reserved_too or any(unused):
            raise HeaderError("a reserved field is used")
        model, release, layout = map(_text, names)
        return cls(
            model=model,
            release=release,
            layout=layout,
            block_tokens=tokens,
            block_bytes=size,
            block_count=blocks,
            first_token=first,
            token_count=count,
        )


def buffer_bytes(block_bytes: int, block_count: int) -> int:
    """The size of the memfd for so many blocks: a header page, then each block on pages of its own.

    A large one is filled up to whole huge pages: up to 511 small ones at its end would cost both ends more than half as
    many huge ones do.
    """
    size = HEADER_BYTES + block_count * _stride(block_bytes)
    return _up(size, HUGE_PAGE) if size >= LARGE else size


def _stride(block_bytes: int) -> int:
    return _up(block_bytes, PAGE)


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _text(field: bytes) -> str:
    text = field.rstrip(b"\0")
    try:
        return text.decode()
    except UnicodeDecodeError:
        raise HeaderError("a name is not UTF-8") from None
