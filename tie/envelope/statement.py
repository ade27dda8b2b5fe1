"""The key statement: what a node's current public key is, signed (Ed25519) by the fleet's statement key.

A device pins the statement key; whoever sits between cannot give it another key to seal to.
"""

from dataclasses import dataclass
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from tie.daemon.errors import RefusedError
from tie.envelope.errors import EnvelopeError
from tie.envelope.framing import join, number
from tie.envelope.sealing import VERSION, Label, PublicKey
from tie.proto import kps_pb2

STATEMENT_KEY_BYTES: Final = 32
MAX_LIFETIME_S: Final = 366 * 86400
_CLOCK_SKEW_S: Final = 300.0  # devices' clocks are not exact


class StatementError(RefusedError):
    """A key statement is not to be believed: wrong signature, wrong version, not valid now."""


@dataclass(frozen=True)
class NodeKey:
    """A verified statement.

    Attributes:
        node_id: whose key it is.
        public: the key to seal to.
        not_after: unix seconds; the device does not seal to it after that.
    """

    node_id: str
    public: PublicKey
    not_after: int


def sign(
    signer: Ed25519PrivateKey, node_id: str, public: PublicKey, *, not_before: int, not_after: int
) -> kps_pb2.KeyStatement:
    """A statement valid from `not_before` to `not_after` (unix seconds)."""
    statement = kps_pb2.KeyStatement(
        version=VERSION,
        node_id=node_id,
        key_id=public.key_id,
        public_key=public.raw,
        not_before=not_before,
        not_after=not_after,
    )
    statement.signature = signer.sign(_message(statement))
    return statement


def verify(statement: kps_pb2.KeyStatement, pinned: bytes, *, now: float) -> NodeKey:
    """Checks a statement against the pinned statement key.

    Args:
        statement: as received.
        pinned: the raw Ed25519 public key, 32 bytes.
        now: unix seconds.

    Raises:
        StatementError: it is not to be believed; the message says why.
    """
    try:
        Ed25519PublicKey.from_public_bytes(pinned).verify(statement.signature, _message(statement))
    except ValueError:
        raise StatementError("the pinned statement key is not an Ed25519 public key") from None
    except InvalidSignature:
        raise StatementError(
            "the node's key statement is not signed by the pinned statement key",
            hint="either the address leads to another fleet's node, or the pinned key file is old",
        ) from None
    if statement.version != VERSION:
        raise StatementError("the node speaks another version of the sealed protocol", hint="update the client")
    lifetime = statement.not_after - statement.not_before
    if not 0 < lifetime <= MAX_LIFETIME_S:
        raise StatementError("the key statement's validity times are impossible")
    if not statement.not_before - _CLOCK_SKEW_S <= now < statement.not_after:
        raise StatementError("the node's key statement is not valid now", hint="check this machine's clock")
    try:
        public = PublicKey(statement.public_key)
    except EnvelopeError:
        raise StatementError("the key statement holds no usable public key") from None
    if statement.key_id != public.key_id:
        raise StatementError("the key statement's key id does not belong to its key")
    return NodeKey(node_id=statement.node_id, public=public, not_after=statement.not_after)


def _message(statement: kps_pb2.KeyStatement) -> bytes:
    return join(
        Label.STATEMENT.value,
        number(statement.version),
        statement.node_id.encode(),
        statement.key_id,
        statement.public_key,
        number(statement.not_before),
        number(statement.not_after),
    )
