"""Derivations against an implementation of RFC 5869 that shares nothing with the code; and what must not show."""

import copy
import hashlib
import hmac
import pickle

import pytest

from tie.warden.keys import LABELS, ConversationKey, Purpose, Root

SECRET = bytes(range(32))
SALT = bytes(range(100, 132))


def hkdf(secret: bytes, salt: bytes, info: bytes) -> bytes:
    """One block of HKDF-SHA256, straight from the RFC."""
    extracted = hmac.new(salt or bytes(32), secret, hashlib.sha256).digest()
    return hmac.new(extracted, info + b"\x01", hashlib.sha256).digest()


# Fixed for ever: a node with other values cannot open what this one sealed.
GOLDEN = {
    (Root.TURN, Purpose.INDEX): "e229a62125684b0bae80069b3b6be127fa41e0fb56fc3c6a3efef8d72c966296",
    (Root.TURN, Purpose.KV): "b9235e06cc29aaf5d9522ebb43b0fe3acb2d10b2eac58966b2d8fcda4fe147d0",
    (Root.TURN, Purpose.COMMIT): "5fc77fd046c55bee71c88e0c3aa94e5d075cb946a625348d7e337086f9808609",
    (Root.TURN, Purpose.IMAGE): "4c9a631cb5932340cfc8c412b5eca8487c095d6e921a19c3eee0bbc54d73f674",
    (Root.REQUEST, Purpose.INDEX): "0d2af4a152df78a5dcdf6057d96816c5e42d2ed40240200edd72ab90a4f0f7a8",
    (Root.REQUEST, Purpose.KV): "32b0c2b2a760ef63e9832830243dc6d564fb69ec03b1a6431bf1d9ed643c19ab",
    (Root.REQUEST, Purpose.COMMIT): "dfdabd8500e738f483ba8f183b4d0c34ad591891f573d35687ff03a2764d3b55",
    (Root.REQUEST, Purpose.IMAGE): "6b0c9e86cebde14bf9903c484ea54197c7556a08137fca1aa7a6adb082ec0b24",
}


@pytest.mark.parametrize("root", list(Root))
@pytest.mark.parametrize("purpose", list(Purpose))
def test_golden_vectors(root, purpose):
    salt = b"" if purpose in {Purpose.INDEX, Purpose.IMAGE} else SALT
    info = f"tie/1/warden/{root.name.lower()}/{purpose.value}".encode()
    assert hkdf(SECRET, salt, info).hex() == GOLDEN[root, purpose]
    with ConversationKey(root, SECRET) as key, key._derive(purpose, salt, 32) as derived:
        assert derived.reveal().hex() == GOLDEN[root, purpose]


def test_the_methods_use_the_table():
    for root in Root:
        with ConversationKey(root, SECRET) as key:
            assert key.index().hex() == GOLDEN[root, Purpose.INDEX]
            assert key.commitment(SALT).hex() == GOLDEN[root, Purpose.COMMIT]
            digest = hmac.new(bytes.fromhex(GOLDEN[root, Purpose.IMAGE]), b"image", hashlib.sha256).digest()
            assert key.digests([b"image", b"other"])[0] == digest


def test_every_purpose_of_every_root_has_a_label_of_its_own():
    assert set(LABELS) == {(root, purpose) for root in Root for purpose in Purpose}
    assert len(set(LABELS.values())) == len(LABELS)


@pytest.mark.parametrize("size", [0, 16, 31, 33, 64])
def test_other_lengths_are_refused_without_showing_them(size):
    with pytest.raises(ValueError, match="32 bytes") as caught:
        ConversationKey(Root.TURN, b"s" * size)
    assert "ss" not in str(caught.value)


def test_a_key_shows_itself_nowhere():
    key = ConversationKey(Root.TURN, SECRET)
    assert repr(key) == "<ConversationKey TURN>"
    for send in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError):
            send(key)


def test_closing_wipes_the_secret():
    key = ConversationKey(Root.TURN, SECRET)
    buffer = key._secret.reveal()
    key.close()
    assert buffer == bytes(32)
    with pytest.raises(ValueError, match="wiped"):
        key.index()
