"""The messages of a transfer: 8 bytes each, little-endian: kind (1), zero (1), reason (2), count (4)."""

import enum
import os
import struct
import time
from contextlib import suppress
from typing import Final

from kvxfer.channel import Channel
from kvxfer.errors import AbortReason, ChannelError, KvxferError, TransferAbortedError
from kvxfer.header import MAX_BLOCKS

_MESSAGE: Final = struct.Struct("<BBHI")


class Kind(enum.IntEnum):
    """What a message says."""

    REQUEST = 1
    OFFER = 2
    COMMIT = 3
    FINISH = 4
    ABORT = 5


def message(kind: Kind, count: int = 0, reason: int = 0) -> bytes:
    """The bytes of a message."""
    return _MESSAGE.pack(kind, 0, reason, count)


def parse(received: bytes) -> tuple[Kind, int]:
    """Kind and count.

    Raises:
        TransferAbortedError: it is an abort.
        ChannelError: it is no message of this protocol.
    """
    try:
        number, zero, reason, count = _MESSAGE.unpack(received)
        kind = Kind(number)
    except (struct.error, ValueError):
        raise ChannelError("not a message of a transfer") from None
    if zero or count > MAX_BLOCKS or (reason and kind is not Kind.ABORT):
        raise ChannelError("a message of a transfer holds an impossible value")
    if kind is Kind.ABORT:
        known = reason in AbortReason.__members__.values()
        raise TransferAbortedError(AbortReason(reason) if known else AbortReason.UNSPECIFIED)
    return kind, count


def receive(channel: Channel, deadline: float) -> tuple[Kind, int]:
    """The next message, which must bring no descriptor. Raises as `parse` and `Channel.receive` do."""
    received, descriptors = channel.receive(timeout=left(deadline))
    if descriptors:
        for descriptor in descriptors:
            os.close(descriptor)
        raise ChannelError("a descriptor that nobody asked for")
    return parse(received)


def abort(channel: Channel, reason: AbortReason) -> None:
    """Tells the other end that there will be no transfer, if it still listens."""
    with suppress(KvxferError):
        channel.send(message(Kind.ABORT, reason=reason), timeout=0)


def left(deadline: float) -> float:
    """Seconds until `deadline`, on the monotonic clock; never less than none."""
    return max(0.0, deadline - time.monotonic())
