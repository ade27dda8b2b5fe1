"""One unambiguous byte string from several fields, for everything that is hashed, signed or bound.

Every field goes in with its length, so that ("ab", "c") and ("a", "bc") differ.
"""

import struct
from typing import Final

_LENGTH: Final = struct.Struct(">I")


def join(*fields: bytes) -> bytes:
    """Each field as a 4-byte big-endian length and its bytes, one after another."""
    return b"".join(_LENGTH.pack(len(field)) + field for field in fields)


def number(value: int) -> bytes:
    """An unsigned integer as a field: 8 bytes, big-endian."""
    return value.to_bytes(8, "big")
