"""kvxfer's exception tree.

KvxferError
├── PeerDiedError      the channel ended before the transfer did
├── PeerTimeoutError   a deadline passed
├── TransferAbortedError  the other end gave the transfer up, and said why
├── ChannelError       a message too large, of the wrong shape, or out of order
├── HeaderError        a buffer's header is not one, or not intact
└── SealError          a memfd lacks the seals, or has not the size, that its sender promised
"""

from enum import IntEnum


class AbortReason(IntEnum):
    """Why a transfer was given up: a closed set, because it may be logged."""

    UNSPECIFIED = 0
    CANCELLED = 1  # not wanted any more
    INCOMPATIBLE = 2  # the header does not describe what the other end holds
    CORRUPT = 3  # the source of the blocks turned out not to be intact
    OVERLOADED = 4  # no room for the blocks
    PROTOCOL = 5  # the other end broke the protocol
    TIMEOUT = 6  # the other end was too slow


class KvxferError(Exception):
    """Base of every error of this library."""


class PeerDiedError(KvxferError):
    """The channel ended before the transfer did."""


class PeerTimeoutError(KvxferError):
    """A deadline passed."""


class TransferAbortedError(KvxferError):
    """The other end gave the transfer up.

    Attributes:
        reason: what it said.
    """

    def __init__(self, reason: AbortReason) -> None:
        super().__init__(f"the other end gave the transfer up: {reason.name}")
        self.reason = reason


class ChannelError(KvxferError):
    """A message is too large, has the wrong shape, or comes out of order."""


class HeaderError(KvxferError):
    """A buffer's header is not one, or not intact."""


class SealError(KvxferError):
    """A memfd lacks the seals, or has not the size, that its sender promised."""
