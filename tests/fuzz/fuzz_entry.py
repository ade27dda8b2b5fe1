"""What a fuzzer throws at the reader of sealed entries, which opens them where they lie (docs/warden.md)."""

import contextlib
import hashlib
import secrets
import sys
from pathlib import Path
from unittest import mock

from tie.proto import warden_pb2
from tie.warden.entry import HEADER_BYTES, Kind, Opener, Sealer, Shape, _bound
from tie.warden.errors import EntryError
from tie.warden.keys import ConversationKey, Root
from tie.warden.manifest import CacheFormat, Manifest, Segment

# Where this runs as a script there is nobody else who says where the helpers are.
sys.path.append(str(Path(__file__).parents[1] / "helpers"))

from sealed_entries import stored

INDEX = bytes(32)
KEY = ConversationKey(Root.TURN, bytes(range(32)))
FORMAT = CacheFormat("model", "release", "layout", 4, 32)


def _sealed(salt: bytes, kind: Kind, manifest: bytes, blocks: int) -> bytes:
    """An authentic entry, the same each time. The warden itself draws salts at random."""
    shape = Shape.of(manifest, blocks, FORMAT.block_bytes if blocks else 0)
    out = bytearray(shape.entry_bytes)
    with mock.patch.object(secrets, "token_bytes", return_value=salt):
        sealer = Sealer(KEY, kind, manifest, shape, memoryview(out))
    for number in range(blocks):
        sealer.seal(memoryview(bytes([number]) * FORMAT.block_bytes))
    return bytes(out)


_SALT = hashlib.sha256(b"fuzz").digest()
_COMMITMENT = KEY.commitment(_SALT)
SEGMENT = _sealed(_SALT, Kind.SEGMENT, Manifest(FORMAT, 0, tuple(range(12))).encode(), 3)
HEAD = _sealed(_SALT, Kind.HEAD, Manifest(FORMAT, 0, tuple(range(12)), (Segment(INDEX, 3, bytes(32)),)).encode(), 0)
EMPTY = _sealed(_SALT, Kind.HEAD, b"", 0)


def entry(data: bytes) -> None:
    """A sealed entry; the lowest bits of byte 0 say what the rest is.

    0: patches of an authentic segment; 1: of a head; 2: a header that commits to the right key and lies about the rest;
    3: an entry; 4 and 5: the content of an authentic manifest; 6 and 7: all that is sealed in the manifest's place.
    """
    if not data:
        return
    mode, rest = data[0] & 7, data[1:]
    if mode >= 6:
        _in_the_manifest_s_place(rest)
        return
    if mode >= 4:
        _manifest(rest)
        return
    genuine = HEAD if mode == 1 else SEGMENT
    sealed = bytearray(genuine)
    if mode == 2:
        head = bytearray(rest[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0"))
        head[16:48], head[64:96] = _SALT, _COMMITMENT
        sealed[:HEADER_BYTES] = head
        sealed += rest[HEADER_BYTES:]
    elif mode == 3:
        sealed = bytearray(rest)
    else:
        for at in range(0, len(rest) - 2, 3):
            sealed[int.from_bytes(rest[at : at + 2], "little") % len(sealed)] ^= rest[at + 2]
        del sealed[len(sealed) - len(rest) % 3 :]
    for kind in Kind:
        with contextlib.suppress(EntryError):
            _opened(bytes(sealed), kind, genuine)


def _opened(sealed: bytes, kind: Kind, genuine: bytes) -> None:
    with stored(sealed) as memory:  # closes only where the reader has let go of all of it
        opener = Opener(KEY, kind, memory)
        # Whatever opens was sealed with the key: header and manifest are what they were.
        assert sealed[: opener.shape.offset(0)] == genuine[: opener.shape.offset(0)]
        Manifest.decode(opener.manifest, FORMAT)
        for block in range(opener.shape.block_count):
            into = bytearray(b"\xff" * opener.shape.block_bytes)
            try:
                opener.open(block, memoryview(into))
            except EntryError:
                assert not any(into)
            else:
                assert into == bytes([block]) * opener.shape.block_bytes


def _in_the_manifest_s_place(content: bytes) -> None:
    """Whoever has the key may seal what he likes."""
    sealed = bytearray(EMPTY)
    shape = Shape.of(b"", 0, 0)
    padded = content.ljust(shape.manifest_bytes, b"\0")
    nonce, associated = _bound(hashlib.sha256(sealed[:HEADER_BYTES]).digest(), 0, 0)
    KEY.cipher(_SALT).encrypt_into(nonce, padded, associated, memoryview(sealed)[HEADER_BYTES:])
    with contextlib.suppress(EntryError), stored(sealed) as memory:
        manifest = Opener(KEY, Kind.HEAD, memory).manifest
        assert manifest == padded[4 : 4 + int.from_bytes(padded[:4], "little")]
        assert len(manifest) <= len(padded) - 4
        Manifest.decode(manifest, FORMAT)


def _manifest(plaintext: bytes) -> None:
    with contextlib.suppress(EntryError):
        manifest = Manifest.decode(plaintext, FORMAT)
        assert manifest.format == FORMAT
        assert len(manifest.token_ids) == manifest.block_count * FORMAT.block_tokens > 0
        if manifest.segments:
            assert sum(segment.block_count for segment in manifest.segments) == manifest.block_count
        again = Manifest.decode(manifest.encode(), FORMAT)
        assert again == manifest
        assert warden_pb2.Manifest.FromString(manifest.encode()).block_tokens == FORMAT.block_tokens
