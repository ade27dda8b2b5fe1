"""kvxfer's exception tree.

KvxferError
├── PeerDiedError      the channel ended before the transfer did
├── PeerTimeoutError   a deadline passed
├── ChannelError       a message too large, or of the wrong shape
└── SealError          a memfd lacks the seals, or has not the size, that its sender promised
"""


class KvxferError(Exception):
    """Base of every error of this library."""


class PeerDiedError(KvxferError):
    """The channel ended before the transfer did."""


class PeerTimeoutError(KvxferError):
    """A deadline passed."""


class ChannelError(KvxferError):
    """A message is too large or has the wrong shape."""


class SealError(KvxferError):
    """A memfd lacks the seals, or has not the size, that its sender promised."""
