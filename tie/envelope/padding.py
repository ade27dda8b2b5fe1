"""Requests of few sizes: the serialized InferenceRequest is padded to a power of two, 1 KiB at least.

Powers of two rather than PADMÉ's finer steps (Nikitin et al. 2019): a prompt is small against what a node does with
it, and fewer sizes say less about it.
"""

from typing import Final

from tie.envelope.errors import SealUsageError
from tie.proto import request_pb2

SMALLEST: Final = 1024
_TAG_BYTES: Final = 2  # `padding` is field 100


def pad_request(request: request_pb2.InferenceRequest) -> bytes:
    """Serializes `request` with padding: 1024, 2048, 4096, … bytes. The message itself is left without padding.

    Raises:
        SealUsageError: `request` carries padding already.
    """
    if request.padding:
        raise SealUsageError("the request is already padded")
    size = request.ByteSize()
    bucket = SMALLEST
    while (filler := _filler(bucket - size)) is None:
        bucket *= 2
    request.padding = bytes(filler)
    payload: bytes = request.SerializeToString(deterministic=True)
    request.ClearField("padding")
    return payload


def _filler(gap: int) -> int | None:
    """How many zeros make the field take `gap` bytes (tag, length, zeros); None where none does."""
    if gap == 0:
        return 0
    for length_bytes in range(1, 6):
        filler = gap - _TAG_BYTES - length_bytes
        if filler > 0 and max(1, (filler.bit_length() + 6) // 7) == length_bytes:
            return filler
    return None
