"""Every frame that an app sends has one of a few sizes, whatever it says.

Sizes of streamed deltas have been used to reconstruct answers (Weiss et al. 2024, arXiv 2403.09751), so the serialized
`AppOut` is brought to exactly one bucket by a field of zeros. A frame that cannot be padded is not sent: fail closed.
"""

from collections.abc import Sequence
from typing import Final

from tie.daemon.errors import TieError
from tie.proto import app_pb2

_TAG: Final = bytes([app_pb2.AppOut.PADDING_FIELD_NUMBER << 3 | 2])  # wire type 2: length-delimited


class PaddingError(TieError):
    """A frame does not fit the largest bucket: the caller must split it first."""


def pad(message: app_pb2.AppOut, buckets: Sequence[int]) -> bytes:
    """Serializes `message` with padding; the result's length is the smallest bucket that holds it.

    Raises:
        PaddingError: no bucket holds it, or the result is not of a bucket's size (which would be a bug: fail closed).
    """
    if message.padding:
        raise PaddingError("the frame is already padded")
    payload: bytes = message.SerializeToString(deterministic=True)
    for bucket in buckets:
        field = _field(bucket - len(payload))
        if field is not None:
            padded = payload + field
            if len(padded) != bucket:
                raise PaddingError("padding missed its bucket")
            return padded
    raise PaddingError("the frame is larger than the largest bucket")


def room(buckets: Sequence[int]) -> int:
    """The largest size such that every message up to it, before padding, fits the largest bucket."""
    return buckets[-1] - 2


def _field(gap: int) -> bytes | None:
    """The field `padding`, serialized in exactly `gap` bytes; None where that is impossible (below 0, and 1).

    A field of n zeros takes a tag, n as a varint, and n bytes. Where the varint grows, one gap cannot be met by the
    shortest varint; the wire format also allows a longer one with leading zeros, so those are met too.
    """
    if gap == 0:
        return b""
    for width in (1, 2, 3, 4):
        zeros = gap - len(_TAG) - width
        if 0 <= zeros < 1 << 7 * width:
            return _TAG + _varint(zeros, width) + bytes(zeros)
    return None


def _varint(value: int, width: int) -> bytes:
    groups = [value >> 7 * place & 0x7F for place in range(width)]
    return bytes([*(group | 0x80 for group in groups[:-1]), groups[-1]])
