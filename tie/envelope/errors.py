"""What goes wrong with sealed bytes."""

from tie.daemon.errors import ProtocolError


class EnvelopeError(ProtocolError):
    """Sealed bytes did not verify.

    One error for every cause (wrong key, flipped bit, reordered, repeated, cut short), always with the same text:
    telling the causes apart would tell an attacker how far a forgery got.
    """

    def __init__(self) -> None:
        super().__init__("the sealed data does not verify")


class SealUsageError(ProtocolError):
    """Our own side used a sealer or opener out of turn: after its end, after its close, or past a size limit."""
