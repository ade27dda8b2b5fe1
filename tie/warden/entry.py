r"""Sealed entries: a header in clear, a sealed manifest, sealed blocks. docs/warden.md is the specification.

    header     96 bytes: magic "warden\r\n", version, suite, kind, root, salt, block count, manifest bytes, block bytes,
               key commitment; little-endian
    manifest   AES-256-GCM: length, manifest, zeros; tag; so long that header and sealed manifest fill whole pages
    blocks     AES-256-GCM: block, tag; block count times

Nonce: the number of the sealed piece, manifest 0, blocks from 1, as 12 bytes big-endian. Associated data: SHA-256 of
the header, that number (4 bytes, big-endian), and 1 if it is the entry's last piece, else 0. The key is fresh for each
entry, because the salt is.

Ciphertext is opened where it lies, in memory that nobody can change (tie.warden.media); no plaintext is left where a
tag did not fit.
"""

import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Self

from cryptography.exceptions import InvalidTag

from tie.warden.errors import EntryError
from tie.warden.keys import COMMITMENT_BYTES, SALT_BYTES, ConversationKey
from tie.warden.media import SealedMemory

VERSION: Final = 1
MAGIC: Final = b"warden\r\n"
SUITE: Final = 1  # HKDF-SHA256, AES-256-GCM
TAG_BYTES: Final = 16
PAGE: Final = 4096
MAX_BLOCKS: Final = 1 << 20
MAX_BLOCK_BYTES: Final = 1 << 30
MAX_ENTRY_BYTES: Final = 1 << 40  # of one key: far below what GCM allows
MAX_MANIFEST_BYTES: Final = 1 << 26

_HEADER: Final = struct.Struct(f"<8sHHBBH{SALT_BYTES}sIIQ{COMMITMENT_BYTES}s")
HEADER_BYTES: Final = _HEADER.size
_LENGTH: Final = struct.Struct("<I")
_AD: Final = struct.Struct(">IB")


class Kind(IntEnum):
    """What an entry is. The number stands in its header."""

    HEAD = 1  # names the tokens of a conversation and the segments that hold their blocks
    SEGMENT = 2  # some blocks


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of an entry.

    Attributes:
        manifest_bytes: of the padded plaintext.
        block_count: blocks; 0 in a head.
        block_bytes: plaintext bytes of one; 0 in a head.

    Raises:
        EntryError: they are impossible.
    """

    manifest_bytes: int
    block_count: int
    block_bytes: int

    def __post_init__(self) -> None:
        if not (
            _LENGTH.size <= self.manifest_bytes <= MAX_MANIFEST_BYTES
            and self.offset(0) % PAGE == 0
            and 0 <= self.block_count <= MAX_BLOCKS
            and 0 <= self.block_bytes <= MAX_BLOCK_BYTES
            and (self.block_count == 0) == (self.block_bytes == 0)
            and self.entry_bytes <= MAX_ENTRY_BYTES
        ):
            raise EntryError

    @classmethod
    def of(cls, manifest: bytes, block_count: int, block_bytes: int) -> Self:
        """The shape of an entry with this manifest and so many blocks."""
        whole = HEADER_BYTES + _LENGTH.size + len(manifest) + TAG_BYTES
        padded = -(-whole // PAGE) * PAGE
        return cls(padded - HEADER_BYTES - TAG_BYTES, block_count, block_bytes)

    def offset(self, block: int) -> int:
        """Where a sealed block begins; at `block_count`, the end of the entry."""
        return HEADER_BYTES + self.manifest_bytes + TAG_BYTES + block * (self.block_bytes + TAG_BYTES)

    @property
    def entry_bytes(self) -> int:
        """The exact size of the entry."""
        return self.offset(self.block_count)


class Sealer:
    """Seals one entry, block by block, into memory of exactly its size.

    Args:
        key: the conversation's; used here and not kept.
        kind: what the entry is.
        manifest: its plaintext.
        shape: its sizes, from `Shape.of`.
        out: writable memory of exactly `shape.entry_bytes`.

    Raises:
        ValueError: `out` has another size.
    """

    def __init__(self, key: ConversationKey, kind: Kind, manifest: bytes, shape: Shape, out: memoryview) -> None:
        if len(out) != shape.entry_bytes:
            raise ValueError("an entry is sealed into exactly its size")
        self._out = out
        self._shape = shape
        self._next = 0
        salt = secrets.token_bytes(SALT_BYTES)
        header = _HEADER.pack(
            MAGIC,
            VERSION,
            SUITE,
            kind,
            key.root,
            0,
            salt,
            shape.block_count,
            shape.manifest_bytes,
            shape.block_bytes,
            key.commitment(salt),
        )
        self.header_sha256 = hashlib.sha256(header).digest()
        self._cipher = key.cipher(salt)
        out[:HEADER_BYTES] = header
        padded = (_LENGTH.pack(len(manifest)) + manifest).ljust(shape.manifest_bytes, b"\0")
        self._seal(0, padded, HEADER_BYTES, shape.offset(0))

    def seal(self, block: memoryview) -> None:
        """Seals the next block.

        Raises:
            ValueError: there is none left, or `block` has another size.
        """
        if self._next >= self._shape.block_count or len(block) != self._shape.block_bytes:
            raise ValueError("one block too many, or of another size")
        start = self._shape.offset(self._next)
        self._next += 1
        self._seal(self._next, block, start, self._shape.offset(self._next))

    @property
    def complete(self) -> bool:
        """Whether all blocks are sealed."""
        return self._next == self._shape.block_count

    def _seal(self, number: int, plaintext: bytes | memoryview, start: int, end: int) -> None:
        nonce, associated = _bound(self.header_sha256, number, self._shape.block_count)
        with self._out[start:end] as target:
            self._cipher.encrypt_into(nonce, plaintext, associated, target)


class Opener:
    """Opens one entry. Its manifest is open when this is made; its blocks follow one by one, in any order.

    Attributes:
        manifest: its plaintext.
        shape: its sizes.
        header_sha256: what a head names a segment by.

    Args:
        key: the conversation's; used here and not kept.
        kind: what the entry must be.
        sealed: the whole entry; stays the caller's, and is needed until the last block is open.

    Raises:
        EntryError: whatever is wrong with it.
    """

    def __init__(self, key: ConversationKey, kind: Kind, sealed: SealedMemory) -> None:
        if sealed.size < PAGE:
            raise EntryError
        with sealed.piece(0, HEADER_BYTES) as clear:
            header = bytes(clear)
        magic, version, suite, its_kind, root, reserved, salt, count, length, size, commitment = _HEADER.unpack(header)
        if (magic, version, suite, its_kind, root, reserved) != (MAGIC, VERSION, SUITE, kind, key.root, 0):
            raise EntryError
        self.shape = Shape(length, count, size)
        if sealed.size != self.shape.entry_bytes or not hmac.compare_digest(commitment, key.commitment(salt)):
            raise EntryError
        self.header_sha256 = hashlib.sha256(header).digest()
        self._sealed = sealed
        self._cipher = key.cipher(salt)
        padded = bytearray(self.shape.manifest_bytes)
        with memoryview(padded) as target:
            self._open(0, HEADER_BYTES, target)
        (used,) = _LENGTH.unpack_from(padded)
        if used > len(padded) - _LENGTH.size:
            raise EntryError
        self.manifest = bytes(padded[_LENGTH.size : _LENGTH.size + used])

    def open(self, block: int, into: memoryview) -> None:
        """Opens a block into memory of exactly its size. Where it does not open, that memory is zeroed.

        Raises:
            EntryError: it does not open.
            ValueError: no such block, or memory of another size.
        """
        if not 0 <= block < self.shape.block_count or len(into) != self.shape.block_bytes:
            raise ValueError("no such block, or memory of another size")
        self._open(block + 1, self.shape.offset(block), into)

    def _open(self, number: int, start: int, into: memoryview) -> None:
        nonce, associated = _bound(self.header_sha256, number, self.shape.block_count)
        with self._sealed.piece(start, len(into) + TAG_BYTES) as sealed:
            try:
                self._cipher.decrypt_into(nonce, sealed, associated, into)
            except InvalidTag:
                # The library decrypts before it has checked: what is not authentic is nobody's to read.
                into[:] = bytes(len(into))
                raise EntryError from None


def _bound(header_sha256: bytes, number: int, block_count: int) -> tuple[bytes, bytes]:
    """Nonce and associated data of a piece."""
    return number.to_bytes(12, "big"), header_sha256 + _AD.pack(number, number == block_count)
