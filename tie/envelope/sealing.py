"""Keys of one request: the DEK sealed to a node by HPKE (RFC 9180), and what is derived from it.

Suite: ML-KEM-768 with X25519, HKDF-SHA256, AES-256-GCM, single shot. `info` binds the protocol version, the node and
the key, so that an envelope made for one of them opens under no other.
"""

import hashlib
from dataclasses import dataclass
from enum import Enum
from typing import Final, Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric import mlkem, x25519
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hpke import (
    AEAD,
    KDF,
    KEM,
    MLKEM768X25519PrivateKey,
    MLKEM768X25519PublicKey,
    Suite,
)
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from tie.envelope.errors import EnvelopeError
from tie.envelope.framing import join, number
from tie.envelope.secret import Secret

VERSION: Final = 1
DEK_BYTES: Final = 32
SALT_BYTES: Final = 32
KEY_ID_BYTES: Final = 16
_MLKEM_PUBLIC, _MLKEM_SEED, _X25519 = 1184, 64, 32
PUBLIC_KEY_BYTES: Final = _MLKEM_PUBLIC + _X25519
PRIVATE_KEY_BYTES: Final = _MLKEM_SEED + _X25519
SEALED_DEK_BYTES: Final = 1120 + DEK_BYTES + 16  # encapsulated key, ciphertext, tag

_SUITE: Final = Suite(KEM.MLKEM768_X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)


class Label(Enum):
    """Every label that separates one use of a key from another: nothing else may derive or bind."""

    SEAL_DEK = b"tie/1/seal-dek"  # HPKE info, device to node
    BIND_DEK = b"tie/1/bind-dek"  # HPKE info, key protection service to jobhelper
    HEADER = b"tie/1/header"
    REQUEST = b"tie/1/request"  # HKDF info
    RESPONSE = b"tie/1/response"  # HKDF info
    STATEMENT = b"tie/1/statement"  # Ed25519 message


class PublicKey:
    """A node's HPKE public key: the raw ML-KEM-768 key (1184 bytes), then the raw X25519 key (32 bytes)."""

    def __init__(self, raw: bytes) -> None:
        """Checks and takes the raw bytes.

        Raises:
            EnvelopeError: `raw` is not such a key.
        """
        if len(raw) != PUBLIC_KEY_BYTES:
            raise EnvelopeError
        try:
            self._key = MLKEM768X25519PublicKey(
                mlkem.MLKEM768PublicKey.from_public_bytes(raw[:_MLKEM_PUBLIC]),
                x25519.X25519PublicKey.from_public_bytes(raw[_MLKEM_PUBLIC:]),
            )
        except ValueError:
            raise EnvelopeError from None
        self.raw = raw
        self.key_id = hashlib.sha256(raw).digest()[:KEY_ID_BYTES]

    def seal(self, plaintext: bytes | bytearray, info: bytes) -> bytes:
        """HPKE single shot: encapsulated key, then ciphertext.

        Raises:
            EnvelopeError: the key cannot be sealed to (an X25519 point of low order).
        """
        try:
            return _SUITE.encrypt(plaintext, self._key, info=info)
        except ValueError:
            raise EnvelopeError from None


class PrivateKey:
    """The private half: ML-KEM-768 seed (64 bytes) and X25519 scalar (32 bytes), in the library's memory."""

    def __init__(self, mlkem_key: mlkem.MLKEM768PrivateKey, x25519_key: x25519.X25519PrivateKey) -> None:
        self._parts = (mlkem_key, x25519_key)
        self._key = MLKEM768X25519PrivateKey(mlkem_key, x25519_key)
        self.public = PublicKey(mlkem_key.public_key().public_bytes_raw() + x25519_key.public_key().public_bytes_raw())

    @classmethod
    def generate(cls) -> Self:
        """A new key."""
        return cls(mlkem.MLKEM768PrivateKey.generate(), x25519.X25519PrivateKey.generate())

    @classmethod
    def from_raw(cls, raw: bytes | bytearray) -> Self:
        """The key that `raw` gave.

        Raises:
            EnvelopeError: `raw` has the wrong length.
        """
        if len(raw) != PRIVATE_KEY_BYTES:
            raise EnvelopeError
        return cls(
            mlkem.MLKEM768PrivateKey.from_seed_bytes(bytes(raw[:_MLKEM_SEED])),
            x25519.X25519PrivateKey.from_private_bytes(bytes(raw[_MLKEM_SEED:])),
        )

    def raw(self) -> Secret:
        """Seed and scalar, for a key file."""
        mlkem_key, x25519_key = self._parts
        return Secret(mlkem_key.private_bytes_raw() + x25519_key.private_bytes_raw())

    def open(self, sealed: bytes, info: bytes) -> Secret:
        """Undoes `PublicKey.seal`.

        Raises:
            EnvelopeError: anything at all is wrong with `sealed`.
        """
        try:
            return Secret(_SUITE.decrypt(sealed, self._key, info=info))
        except (InvalidTag, ValueError):
            raise EnvelopeError from None

    def __repr__(self) -> str:
        return "<PrivateKey>"


@dataclass(frozen=True)
class Header:
    """What travels in clear with a sealed request. All of it is bound into the keys of the request and the response.

    Attributes:
        node_id: the node that the envelope is for.
        key_id: which of its keys.
        sealed_dek: HPKE encapsulated key and ciphertext of the DEK.
        model: the model id, for routing.
    """

    node_id: str
    key_id: bytes
    sealed_dek: bytes
    model: str

    def digest(self) -> bytes:
        """SHA-256 over every field and the version."""
        return hashlib.sha256(
            join(
                Label.HEADER.value,
                number(VERSION),
                self.node_id.encode(),
                self.key_id,
                self.sealed_dek,
                self.model.encode(),
            )
        ).digest()


def seal_dek(dek: Secret, node_id: str, key: PublicKey) -> bytes:
    """Seals a DEK to a node's key: `SEALED_DEK_BYTES` bytes."""
    return key.seal(dek.reveal(), _dek_info(node_id, key))


def open_dek(sealed_dek: bytes, node_id: str, key: PrivateKey) -> Secret:
    """Undoes `seal_dek`.

    Raises:
        EnvelopeError: not sealed to this node and key, or not intact.
    """
    return _of_dek_size(key.open(sealed_dek, _dek_info(node_id, key.public)))


def bind_dek(dek: Secret, sealed_dek: bytes, node_id: str, binding: PublicKey) -> bytes:
    """Seals an opened DEK to the node's binding key, as the answer to this `sealed_dek` and no other."""
    return binding.seal(dek.reveal(), _binding_info(sealed_dek, node_id, binding))


def unbind_dek(bound_dek: bytes, sealed_dek: bytes, node_id: str, binding: PrivateKey) -> Secret:
    """Undoes `bind_dek`.

    Raises:
        EnvelopeError: not the answer to `sealed_dek`, or not for this binding key.
    """
    return _of_dek_size(binding.open(bound_dek, _binding_info(sealed_dek, node_id, binding.public)))


def request_key(dek: Secret, header: Header) -> Secret:
    """The AES-256 key of the request's segments."""
    return _derive(dek, Label.REQUEST, header, salt=b"")


def response_key(dek: Secret, header: Header, salt: bytes) -> Secret:
    """The AES-256 key of the response's segments.

    Args:
        dek: the request's data encryption key.
        header: as the node received it.
        salt: `SALT_BYTES` fresh bytes of the node, so that a replayed request cannot make a key and nonce serve twice.
    """
    return _derive(dek, Label.RESPONSE, header, salt=salt)


def _derive(dek: Secret, label: Label, header: Header, *, salt: bytes) -> Secret:
    info = join(label.value, header.digest())
    return Secret(HKDF(algorithm=SHA256(), length=32, salt=salt or None, info=info).derive(dek.reveal()))


def _dek_info(node_id: str, key: PublicKey) -> bytes:
    return join(Label.SEAL_DEK.value, number(VERSION), node_id.encode(), key.key_id)


def _binding_info(sealed_dek: bytes, node_id: str, binding: PublicKey) -> bytes:
    digest = hashlib.sha256(sealed_dek).digest()
    return join(Label.BIND_DEK.value, number(VERSION), node_id.encode(), binding.key_id, digest)


def _of_dek_size(dek: Secret) -> Secret:
    if len(dek) != DEK_BYTES:
        dek.close()
        raise EnvelopeError
    return dek
