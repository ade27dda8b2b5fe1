"""Keys of cached conversations: HKDF-SHA256 (RFC 5869) from the device's turn key, or from a request's own key.

Every derivation is in one table, `LABELS`. What can be wiped is: keys live in bytearrays, and a copy is beyond reach
only where a library makes one (the AES key schedule; the message that a turn key arrived in).
"""

import enum
import hmac
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final, NoReturn, Self

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from tie.envelope.secret import Secret

ROOT_BYTES: Final = 32
SALT_BYTES: Final = 32
INDEX_BYTES: Final = 32
COMMITMENT_BYTES: Final = 32
_KEY_BYTES: Final = 32


class Root(enum.IntEnum):
    """Where a conversation's keys come from. The number stands in each entry's header."""

    TURN = 1  # the device's turn key: any later turn that brings it can open the entry
    REQUEST = 2  # the request's data encryption key: nobody can open the entry once the request has ended


class Purpose(enum.Enum):
    """What is derived."""

    INDEX = "index"  # under which index the head is stored; no salt
    KV = "kv"  # the AES-256-GCM key of one entry; salted with the entry's salt
    COMMIT = "commit"  # the key commitment of one entry; salted with the entry's salt
    IMAGE = "image"  # the key of the digests of a conversation's images; no salt


# Everything that is ever derived from a turn key, and from a request key for caches: HKDF's `info`. The envelope
# derives from the request key too; its infos all begin with a length, so that none of them can be one of these.
LABELS: Final[Mapping[tuple[Root, Purpose], bytes]] = MappingProxyType(
    {
        (Root.TURN, Purpose.INDEX): b"tie/1/warden/turn/index",
        (Root.TURN, Purpose.KV): b"tie/1/warden/turn/kv",
        (Root.TURN, Purpose.COMMIT): b"tie/1/warden/turn/commit",
        (Root.TURN, Purpose.IMAGE): b"tie/1/warden/turn/image",
        (Root.REQUEST, Purpose.INDEX): b"tie/1/warden/request/index",
        (Root.REQUEST, Purpose.KV): b"tie/1/warden/request/kv",
        (Root.REQUEST, Purpose.COMMIT): b"tie/1/warden/request/commit",
        (Root.REQUEST, Purpose.IMAGE): b"tie/1/warden/request/image",
    }
)


class ConversationKey:
    """The one secret that a conversation's entries hang on. Wiped by `close`, and at the end of a `with` block.

    Args:
        root: what kind of secret it is.
        secret: its 32 bytes; copied.

    Raises:
        ValueError: it has another length.
    """

    __slots__ = ("_secret", "root")

    def __init__(self, root: Root, secret: bytes | bytearray) -> None:
        if len(secret) != ROOT_BYTES:
            raise ValueError("a conversation key has 32 bytes")
        self.root = root
        self._secret = Secret(secret)

    def index(self) -> bytes:
        """Where the store keeps the conversation's head: no secret, and nothing that leads back to the key."""
        with self._derive(Purpose.INDEX, b"", INDEX_BYTES) as index:
            return bytes(index.reveal())

    def commitment(self, salt: bytes) -> bytes:
        """What binds an entry of this salt to this key and no other; GCM alone does not (RFC 9771, key commitment)."""
        with self._derive(Purpose.COMMIT, salt, COMMITMENT_BYTES) as commitment:
            return bytes(commitment.reveal())

    def cipher(self, salt: bytes) -> AESGCM:
        """AES-256-GCM under the key of the entry with this salt."""
        with self._derive(Purpose.KV, salt, _KEY_BYTES) as key:
            return AESGCM(key.reveal())

    def digests(self, images: Iterable[bytes]) -> list[bytes]:
        """What tells this conversation's images apart (HMAC-SHA256), and means nothing in another conversation."""
        with self._derive(Purpose.IMAGE, b"", _KEY_BYTES) as key:
            return [hmac.digest(bytes(key.reveal()), image, "sha256") for image in images]

    def close(self) -> None:
        """Wipes the secret."""
        self._secret.close()

    def _derive(self, purpose: Purpose, salt: bytes, length: int) -> Secret:
        derived = Secret(bytes(length))
        HKDF(algorithm=SHA256(), length=length, salt=salt or None, info=LABELS[self.root, purpose]).derive_into(
            self._secret.reveal(), derived.reveal()
        )
        return derived

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ConversationKey {self.root.name}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a key is never serialized")
