"""Which node a device believes."""

import time

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tie.daemon.errors import ConfigError, PeerError
from tie.device import Client
from tie.device.errors import EnvelopeRefusedError
from tie.device.nodes import Nodes
from tie.device.trust import Trust
from tie.envelope import statement
from tie.envelope.sealing import PrivateKey
from tie.envelope.statement import StatementError

SIGNER = Ed25519PrivateKey.generate()
PINNED = SIGNER.public_key().public_bytes_raw()
KEY = PrivateKey.generate().public


def signed(lifetime: int = 3600) -> bytes:
    now = int(time.time())
    return statement.sign(SIGNER, "node-0", KEY, not_before=now, not_after=now + lifetime).SerializeToString()


def test_a_statement_is_kept_while_it_holds() -> None:
    node = Nodes("http://127.0.0.1:1", 1.0, Trust(PINNED, trust_on_first_use=False)).first
    assert node.key is None
    assert node.accept(signed()) == node.key
    assert not node.outdated(EnvelopeRefusedError("", code="replayed"))
    assert node.key is not None
    assert node.outdated(EnvelopeRefusedError("", code="unknown_key"))
    assert node.key is None
    node.accept(signed(lifetime=20))  # good, and so nearly over that the next request asks again
    assert node.key is None


def test_nothing_is_trusted_unasked() -> None:
    with pytest.raises(ConfigError, match="no statement key"):
        Trust(None, trust_on_first_use=False)
    trust = Trust(None, trust_on_first_use=True)
    with pytest.raises(StatementError):
        trust.verify(signed())
    with pytest.raises(PeerError):
        trust.pin(b"short")
    trust.pin(PINNED)
    assert trust.verify(signed()).node_id == "node-0"


@pytest.mark.parametrize("data", [b"", b"\xff\xff", b"<html>", signed()[:-1]])
def test_bytes_that_are_no_statement(data: bytes) -> None:
    with pytest.raises((PeerError, StatementError)):
        Trust(PINNED, trust_on_first_use=False).verify(data)


def test_key_files(tmp_path) -> None:
    path = tmp_path / "statement.pub"
    with pytest.raises(ConfigError, match="cannot read"):
        Trust(path, trust_on_first_use=False)
    path.write_bytes(b"x" * 31)
    with pytest.raises(ConfigError, match="31 bytes"):
        Trust(str(path), trust_on_first_use=False)
    path.write_bytes(PINNED)
    assert Trust(path, trust_on_first_use=False).pinned == PINNED


def test_a_key_file_that_says_another_key_by_now(tmp_path) -> None:
    path = tmp_path / "statement.pub"
    path.write_bytes(bytes(32))
    trust = Trust(path, trust_on_first_use=False)
    with pytest.raises(StatementError):
        trust.verify(signed())
    path.unlink()
    with pytest.raises(StatementError):
        trust.verify(signed())
    path.write_bytes(PINNED)  # the node has started anew
    assert trust.verify(signed()).node_id == "node-0"
    assert trust.pinned == PINNED
    path.write_bytes(bytes(32))
    assert trust.verify(signed()).node_id == "node-0"  # no reason to look


@pytest.mark.parametrize("url", ["", "127.0.0.1:8443", "ftp://host", "http://", "http://[::1", "unix:/x"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match="address"):
        Client(url, PINNED)


def test_somebody_must_be_asked() -> None:
    with pytest.raises(ConfigError, match="no node"):
        Client([], PINNED)
