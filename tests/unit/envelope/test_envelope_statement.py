"""The key statement: believed only when signed by the pinned key and valid now."""

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tie.envelope import statement
from tie.envelope.sealing import PRIVATE_KEY_BYTES, PrivateKey
from tie.envelope.statement import StatementError
from tie.proto import kps_pb2

SIGNER = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PINNED = SIGNER.public_key().public_bytes_raw()
KEY = PrivateKey.from_raw(bytes(PRIVATE_KEY_BYTES)).public


def signed(**changes: int) -> kps_pb2.KeyStatement:
    times = {"not_before": 1_000_000, "not_after": 1_086_400} | changes
    return statement.sign(SIGNER, "node-0", KEY, **times)


def test_golden_signature() -> None:
    # Ed25519 is deterministic: a change here is a change of the protocol.
    assert signed().signature.hex() == (
        "6e53fe79158fc369f1dcb6af516b3ae70d248b8c8f92760198223a5f0f71957d"
        "fb1f1279e1ea1fd2283a5528bd65bb2127e8bb5fb260e852e9fcea5ceadf4109"
    )


def test_verifies() -> None:
    node = statement.verify(signed(), PINNED, now=1_000_001)
    assert (node.node_id, node.public.raw, node.not_after) == ("node-0", KEY.raw, 1_086_400)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", 2),
        ("node_id", "node-1"),
        ("key_id", b"x" * 16),
        ("public_key", PrivateKey.generate().public.raw),
        ("not_before", 1),
        ("not_after", 2_000_000),
        ("signature", bytes(64)),
        ("signature", b""),
    ],
)
def test_no_field_can_be_changed(field: str, value: object) -> None:
    changed = signed()
    setattr(changed, field, value)
    with pytest.raises(StatementError, match="not signed"):
        statement.verify(changed, PINNED, now=1_000_001)


def test_another_signer_is_refused() -> None:
    other = Ed25519PrivateKey.generate().public_key().public_bytes_raw()
    with pytest.raises(StatementError, match="not signed"):
        statement.verify(signed(), other, now=1_000_001)
    with pytest.raises(StatementError, match="not an Ed25519 public key"):
        statement.verify(signed(), b"short", now=1_000_001)


@pytest.mark.parametrize("now", [0, 1_000_000 - 301, 1_086_400, 2_000_000])
def test_outside_its_validity(now: int) -> None:
    with pytest.raises(StatementError, match="not valid now"):
        statement.verify(signed(), PINNED, now=now)


@pytest.mark.parametrize("changes", [{"not_after": 999_999}, {"not_after": 1_000_000 + 10**9}])
def test_impossible_times(changes: dict[str, int]) -> None:
    with pytest.raises(StatementError, match="impossible"):
        statement.verify(signed(**changes), PINNED, now=1_000_001)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("version", 2, "another version"),
        ("key_id", bytes(16), "key id"),
        ("public_key", b"short", "no usable public key"),
    ],
)
def test_signed_nonsense_is_refused_too(field: str, value: object, text: str) -> None:
    changed = signed()
    setattr(changed, field, value)
    changed.signature = SIGNER.sign(statement._message(changed))
    with pytest.raises(StatementError, match=text):
        statement.verify(changed, PINNED, now=1_000_001)
