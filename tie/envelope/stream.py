"""A stream of AES-256-GCM segments whose order, completeness and end are authenticated.

Segment n of a stream is sealed under nonce n; direction, n and "this is the last one" are associated data. A segment
that was changed, moved, repeated or left out does not open, and a stream that stops before its last segment is noticed
by `Opener.finish`. The construction is that of STREAM (Hoang, Reyhanitabar, Rogaway, Vizár 2015).
"""

import struct
from enum import IntEnum
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from tie.envelope.errors import EnvelopeError, SealUsageError
from tie.envelope.secret import Secret

TAG_BYTES: Final = 16
_NONCE: Final = struct.Struct(">4xQ")
_ASSOCIATED: Final = struct.Struct(">5sBQB")
_MAGIC: Final = b"tie/1"
_MAX_HEADER_BYTES: Final = 4096


class Direction(IntEnum):
    """Which way a stream runs."""

    REQUEST = 1
    RESPONSE = 2

    @property
    def max_segment_bytes(self) -> int:
        """Of plaintext. A response segment is one frame of the app, whose largest bucket may be this large."""
        return 64 * 1024 if self is Direction.REQUEST else 1024 * 1024

    @property
    def max_ciphertext_bytes(self) -> int:
        """The longest ciphertext of one segment."""
        return self.max_segment_bytes + TAG_BYTES

    @property
    def max_frame_bytes(self) -> int:
        """The longest message with one segment in it, or with a header."""
        return self.max_ciphertext_bytes + _MAX_HEADER_BYTES


class _Stream:
    """What both ends share: key, direction, counter, end."""

    def __init__(self, key: Secret, direction: Direction) -> None:
        self._cipher: AESGCM | None = AESGCM(key.reveal())
        self._direction = direction
        self._number = 0
        self._ended = False
        key.close()

    @property
    def ended(self) -> bool:
        """Whether the last segment has gone through."""
        return self._ended

    def close(self) -> None:
        """Drops the key. Nothing works afterwards."""
        self._cipher = None

    def _turn(self) -> tuple[AESGCM, bytes]:
        if self._cipher is None or self._ended:
            raise SealUsageError("the sealed stream is over")
        return self._cipher, _NONCE.pack(self._number)

    def _associated(self, *, last: bool) -> bytes:
        return _ASSOCIATED.pack(_MAGIC, self._direction, self._number, last)

    def _advance(self, *, last: bool) -> None:
        self._number += 1
        self._ended = last
        if last:
            self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._direction.name} segment={self._number}>"


class Sealer(_Stream):
    """Seals one direction's segments, in order. Takes over `key` and wipes it."""

    def seal(self, plaintext: bytes, *, last: bool) -> bytes:
        """The ciphertext of the next segment: `TAG_BYTES` longer than `plaintext`.

        Raises:
            SealUsageError: the last segment has been sealed already, or `plaintext` is over its size limit.
        """
        cipher, nonce = self._turn()
        if len(plaintext) > self._direction.max_segment_bytes:
            raise SealUsageError("a segment is over the size limit")
        ciphertext = cipher.encrypt(nonce, plaintext, self._associated(last=last))
        self._advance(last=last)
        return ciphertext


class Opener(_Stream):
    """Opens one direction's segments, in order. Takes over `key` and wipes it. After one failure nothing opens."""

    def open(self, ciphertext: bytes, *, last: bool) -> bytes:
        """The plaintext of the next segment.

        Raises:
            EnvelopeError: the segment is not the next one, not intact, or `last` is not what it was sealed with.
        """
        if self._cipher is None or self._ended:
            raise EnvelopeError
        cipher, nonce = self._turn()
        if not TAG_BYTES <= len(ciphertext) <= self._direction.max_ciphertext_bytes:
            self.close()
            raise EnvelopeError
        try:
            plaintext = cipher.decrypt(nonce, ciphertext, self._associated(last=last))
        except InvalidTag:
            self.close()
            raise EnvelopeError from None
        self._advance(last=last)
        return plaintext

    def finish(self) -> None:
        """Says that no more will come.

        Raises:
            EnvelopeError: the last segment has not come: the stream was cut short.
        """
        self.close()
        if not self._ended:
            raise EnvelopeError


def pack_segment(ciphertext: bytes, *, last: bool) -> bytes:
    """A response segment as it travels: one byte, 1 for the last and 0 for any other, then the ciphertext."""
    return bytes([last]) + ciphertext


def unpack_segment(data: bytes) -> tuple[bytes, bool]:
    """Undoes `pack_segment`.

    Raises:
        EnvelopeError: no such segment.
    """
    if not data or data[0] > 1:
        raise EnvelopeError
    return data[1:], data[0] == 1
