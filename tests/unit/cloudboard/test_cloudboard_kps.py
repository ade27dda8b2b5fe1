"""The key protection service: what it opens, what it refuses, and when it makes a new key."""

from collections.abc import Callable

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from tie.cloudboard.kps import ON_ITS_WAY_S, KeyProtection, RateLimit
from tie.daemon.config import CloudBoardConfig, KpsConfig, NodeConfig
from tie.envelope import sealing, statement
from tie.envelope.secret import Secret
from tie.proto import kps_pb2

SIGNER = Ed25519PrivateKey.generate()
BINDING = sealing.PrivateKey.generate()
DEK = bytes(range(32))
UPLOAD_S = 50.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def service(clock: Callable[[], float] | None = None, **kwargs: int) -> KeyProtection:
    config = NodeConfig(
        kps=KpsConfig(key_lifetime_s=100.0, max_opens_per_s=kwargs.pop("rate", 1000)),
        cloudboard=CloudBoardConfig(upload_deadline_s=UPLOAD_S),
    )
    return KeyProtection(config, SIGNER, BINDING.public, clock=clock or Clock(), **kwargs)


def sealed(protection: KeyProtection, **changes: object) -> kps_pb2.OpenDekRequest:
    public = sealing.PublicKey(protection.statement().public_key)
    fields: dict[str, object] = {
        "node_id": "node-0",
        "key_id": public.key_id,
        "version": 1,
        "sealed_dek": sealing.seal_dek(Secret(DEK), "node-0", public),
    }
    return kps_pb2.OpenDekRequest(**(fields | changes))  # type: ignore[arg-type]


def test_opens_once_and_binds_to_the_node() -> None:
    protection = service()
    request = sealed(protection)
    reply = protection.open_dek(request)
    assert reply.outcome == kps_pb2.OUTCOME_OK
    assert DEK not in reply.bound_dek
    assert sealing.unbind_dek(reply.bound_dek, request.sealed_dek, "node-0", BINDING).reveal() == DEK
    again = protection.open_dek(request)
    assert (again.outcome, again.bound_dek) == (kps_pb2.OUTCOME_REPLAYED, b"")


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({"node_id": "node-1"}, kps_pb2.OUTCOME_REFUSED),
        ({"version": 2}, kps_pb2.OUTCOME_REFUSED),
        ({"sealed_dek": b""}, kps_pb2.OUTCOME_REFUSED),
        ({"sealed_dek": bytes(sealing.SEALED_DEK_BYTES)}, kps_pb2.OUTCOME_REFUSED),
        ({"key_id": bytes(16)}, kps_pb2.OUTCOME_UNKNOWN_KEY),
        ({"key_id": b""}, kps_pb2.OUTCOME_UNKNOWN_KEY),
    ],
)
def test_refuses(change: dict[str, object], outcome: int) -> None:
    protection = service()
    assert protection.open_dek(sealed(protection, **change)) == kps_pb2.OpenDekReply(outcome=outcome)  # type: ignore[arg-type]


@given(st.binary(max_size=sealing.SEALED_DEK_BYTES + 5))
def test_any_bytes_are_refused_and_not_remembered(data: bytes) -> None:
    for _ in range(2):
        assert SHARED.open_dek(sealed(SHARED, sealed_dek=data)).outcome == kps_pb2.OUTCOME_REFUSED


SHARED = service(rate=10**9)


def test_the_statement_is_signed_and_its_key_changes_with_its_lifetime() -> None:
    clock = Clock()
    protection = service(clock)
    first = protection.statement()
    pinned = SIGNER.public_key().public_bytes_raw()
    assert statement.verify(first, pinned, now=first.not_before).node_id == "node-0"
    assert first.not_after - first.not_before == 100
    clock.now += 99
    assert protection.statement() == first
    clock.now += 1
    assert protection.statement().key_id != first.key_id


def test_the_key_before_still_opens_what_is_on_its_way() -> None:
    clock = Clock()
    protection = service(clock)
    opened, late, slow, too_late = (sealed(protection) for _ in range(4))
    assert protection.open_dek(opened).outcome == kps_pb2.OUTCOME_OK
    clock.now += 100
    assert protection.open_dek(late).outcome == kps_pb2.OUTCOME_OK
    assert protection.open_dek(sealed(protection)).outcome == kps_pb2.OUTCOME_OK
    for request in (opened, late):
        assert protection.open_dek(request).outcome == kps_pb2.OUTCOME_REPLAYED
    clock.now += UPLOAD_S
    assert protection.open_dek(slow).outcome == kps_pb2.OUTCOME_OK
    clock.now += ON_ITS_WAY_S
    assert protection.open_dek(too_late).outcome == kps_pb2.OUTCOME_UNKNOWN_KEY
    assert protection.open_dek(opened).outcome == kps_pb2.OUTCOME_UNKNOWN_KEY


def test_a_full_replay_set_changes_the_key() -> None:
    protection = service(max_replay_entries=2)
    first = protection.statement().key_id
    requests = [sealed(protection) for _ in range(5)]
    outcomes = [protection.open_dek(request).outcome for request in requests[:2]]
    assert protection.statement().key_id != first
    outcomes += [protection.open_dek(request).outcome for request in requests[2:]]
    # On their way when it changed, and no more of them than once more the same.
    assert outcomes == [kps_pb2.OUTCOME_OK] * 4 + [kps_pb2.OUTCOME_UNKNOWN_KEY]


def test_two_keys_are_the_most() -> None:
    protection = service(max_replay_entries=1)
    first = [sealed(protection) for _ in range(2)]
    for _ in range(3):
        assert protection.open_dek(sealed(protection)).outcome == kps_pb2.OUTCOME_OK
    assert protection.open_dek(first[0]).outcome == kps_pb2.OUTCOME_UNKNOWN_KEY


def test_two_services_have_different_keys() -> None:
    assert service().statement().key_id != service().statement().key_id


def test_rate_limit() -> None:
    clock = Clock()
    protection = service(clock, rate=2)
    outcomes = [protection.open_dek(sealed(protection)).outcome for _ in range(3)]
    assert outcomes == [kps_pb2.OUTCOME_OK, kps_pb2.OUTCOME_OK, kps_pb2.OUTCOME_RATE_LIMITED]
    clock.now += 0.5
    assert protection.open_dek(sealed(protection)).outcome == kps_pb2.OUTCOME_OK


@given(st.lists(st.floats(0, 2), max_size=50), st.integers(1, 5))
def test_rate_limit_never_admits_more_than_saved_up(steps: list[float], rate: int) -> None:
    clock = Clock()
    limit = RateLimit(rate, clock)
    admitted = 0
    for step in steps:
        clock.now += step
        admitted += limit.admit()
    assert admitted <= rate + rate * sum(steps) + 1e-6


def test_counts_say_no_more_than_outcomes() -> None:
    protection = service()
    request = sealed(protection)
    protection.open_dek(request)
    protection.open_dek(request)
    text = protection.metrics()
    assert 'tie_kps_opens_total{outcome="ok"} 1.0' in text
    assert 'tie_kps_opens_total{outcome="replayed"} 1.0' in text
    assert "tie_kps_replay_entries 1.0" in text
    assert protection.statement().key_id.hex() not in text
