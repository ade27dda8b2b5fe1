"""Every frame that an app sends has one of a few sizes, whatever it says.

Sizes of streamed deltas have been used to reconstruct answers (Weiss et al. 2024, arXiv 2403.09751), so the serialized
`AppOut` is brought to exactly one bucket by a field of zeros. A frame that cannot be padded is not sent: fail closed.
"""

from collections.abc import Sequence

from tie.daemon.errors import TieError
from tie.proto import app_pb2

_TAG_BYTES = 1  # `padding` is field 15: the last number whose tag takes one byte


class PaddingError(TieError):
    """A frame does not fit the largest bucket: the caller must split it first."""


def pad(message: app_pb2.AppOut, buckets: Sequence[int]) -> bytes:
    """Serializes `message` with padding; the result's length is the smallest bucket that holds it.

    Raises:
        PaddingError: no bucket holds it, or the result is not of a bucket's size (which would be a bug: fail closed).
    """
    if message.padding:
        raise PaddingError("the frame is already padded")
    size = message.ByteSize()
    for bucket in buckets:
        filler = _filler(bucket - size)
        if filler is not None:
            message.padding = bytes(filler)
            payload: bytes = message.SerializeToString(deterministic=True)
            message.ClearField("padding")
            if len(payload) != bucket:
                raise PaddingError("padding missed its bucket")
            return payload
    raise PaddingError("the frame is larger than the largest bucket")


def room(buckets: Sequence[int]) -> int:
    """The largest serialized size, before padding, that surely fits the largest bucket."""
    return buckets[-1] - 8


def _filler(gap: int) -> int | None:
    """How many zero bytes make the field `padding` take exactly `gap` bytes; None where none does.

    A field of n bytes takes tag + varint(n) + n; an empty one is not written at all. So a gap of 1 or 2, and the one
    just past each growth of the varint, cannot be met: the next bucket is taken.
    """
    if gap == 0:
        return 0
    for varint in (1, 2, 3, 4):
        filler = gap - _TAG_BYTES - varint
        if filler > 0 and _varint_bytes(filler) == varint:
            return filler
    return None


def _varint_bytes(value: int) -> int:
    return max(1, (value.bit_length() + 6) // 7)
