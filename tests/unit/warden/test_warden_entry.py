"""Sealed entries: the specification once more, golden vectors, and everything that may be done to an entry."""

import fcntl
import hashlib
import hmac
import mmap
import os
import secrets

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer import seals
from sealed_entries import stored
from tie.warden import entry
from tie.warden.entry import HEADER_BYTES, Kind, Opener, Sealer, Shape
from tie.warden.errors import EntryError
from tie.warden.keys import ConversationKey, Root
from tie.warden.media import SealedMemory

SECRET = bytes(range(32))
SALT = bytes(range(100, 132))
BLOCK = 48
MANIFEST = b"a manifest"
BLOCKS = [bytes([number]) * BLOCK for number in (1, 2, 3)]
# SHA-256 of the whole entry, made apart from the code; fixed for ever.
GOLDEN_SHA256 = "8635b54f6ac3a49edbc0baf007b15dfb85eda88defabcef3c7bce8057da1577c"
GOLDEN_HEADER = (
    "77617264656e0d0a01000100020100006465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f80818283"
    "03000000900f000030000000000000005fc77fd046c55bee71c88e0c3aa94e5d075cb946a625348d7e337086f9808609"
)


def seal(key: ConversationKey, blocks=BLOCKS, manifest=MANIFEST, kind=Kind.SEGMENT) -> bytearray:
    shape = Shape.of(manifest, len(blocks), len(blocks[0]) if blocks else 0)
    out = bytearray(shape.entry_bytes)
    sealer = Sealer(key, kind, manifest, shape, memoryview(out))
    assert sealer.complete == (not blocks)
    for block in blocks:
        sealer.seal(memoryview(block))
    assert sealer.complete
    return out


def open_all(key: ConversationKey, sealed: bytes, kind=Kind.SEGMENT) -> tuple[bytes, list[bytes]]:
    with stored(sealed) as memory:
        opener = Opener(key, kind, memory)
        blocks = []
        for index in range(opener.shape.block_count):
            into = bytearray(opener.shape.block_bytes)
            opener.open(index, memoryview(into))
            blocks.append(bytes(into))
        return opener.manifest, blocks


@pytest.fixture
def key():
    with ConversationKey(Root.TURN, SECRET) as key:
        yield key


def by_the_book(secret: bytes, salt: bytes, manifest: bytes, blocks: list[bytes]) -> bytes:
    """docs/warden.md, written down once more without the code."""

    def hkdf(info: bytes) -> bytes:
        extracted = hmac.new(salt, secret, hashlib.sha256).digest()
        return hmac.new(extracted, info + b"\x01", hashlib.sha256).digest()

    plain = len(manifest).to_bytes(4, "little") + manifest
    plain += bytes(-(96 + len(plain) + 16) % 4096)
    header = b"warden\r\n" + bytes([1, 0, 1, 0, 2, 1, 0, 0]) + salt
    header += len(blocks).to_bytes(4, "little") + len(plain).to_bytes(4, "little")
    header += len(blocks[0]).to_bytes(8, "little") + hkdf(b"tie/1/warden/turn/commit")
    cipher = AESGCM(hkdf(b"tie/1/warden/turn/kv"))
    digest = hashlib.sha256(header).digest()
    sealed = header
    for number, piece in enumerate([plain, *blocks]):
        associated = digest + number.to_bytes(4, "big") + bytes([number == len(blocks)])
        sealed += cipher.encrypt(number.to_bytes(12, "big"), piece, associated)
    return sealed


def test_golden_vector(key, monkeypatch):
    monkeypatch.setattr(secrets, "token_bytes", lambda size: SALT[:size])
    sealed = seal(key)
    assert sealed[:HEADER_BYTES].hex() == GOLDEN_HEADER
    assert hashlib.sha256(sealed).hexdigest() == GOLDEN_SHA256
    assert sealed == by_the_book(SECRET, SALT, MANIFEST, BLOCKS)
    assert open_all(key, sealed) == (MANIFEST, BLOCKS)


def test_sizes_are_pages_then_blocks(key):
    sealed = seal(key)
    assert HEADER_BYTES == 96
    assert len(sealed) == 4096 + 3 * (BLOCK + 16)
    assert len(seal(key, [], b"x" * 5000, Kind.HEAD)) == 8192


@settings(max_examples=50)
@given(
    st.binary(max_size=9000),
    st.integers(0, 5).flatmap(
        lambda count: st.lists(st.binary(min_size=33, max_size=33), min_size=count, max_size=count)
    ),
)
def test_what_is_sealed_opens(manifest, blocks):
    with ConversationKey(Root.REQUEST, SECRET) as key:
        assert open_all(key, seal(key, blocks, manifest)) == (manifest, blocks)


def test_two_sealings_share_nothing(key):
    one, other = seal(key), seal(key)
    assert one[16:48] != other[16:48]
    assert one[64:] != other[64:]
    same = sum(a == b for a, b in zip(one[HEADER_BYTES:], other[HEADER_BYTES:], strict=True))
    assert same < len(one) // 100


def test_through_a_memfd(key):
    blocks = [secrets.token_bytes(4096) for _ in range(4)]
    shape = Shape.of(MANIFEST, 4, 4096)
    descriptor = seals.create("entry", shape.entry_bytes)
    try:
        with mmap.mmap(descriptor, shape.entry_bytes) as mapping, memoryview(mapping) as out:
            sealer = Sealer(key, Kind.SEGMENT, MANIFEST, shape, out)
            for block in blocks:
                sealer.seal(memoryview(block))
        seals.add(descriptor, seals.IMMUTABLE)
        assert open_all(key, os.pread(descriptor, shape.entry_bytes, 0)) == (MANIFEST, blocks)
        with SealedMemory(descriptor, shape.entry_bytes) as memory:
            opener = Opener(key, Kind.SEGMENT, memory)
            into = bytearray(4096)
            for index in (3, 0, 2, 1):
                opener.open(index, memoryview(into))
                assert into == blocks[index]
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    "missing", [seals.CONTENT, seals.SIZE, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SEAL]
)
def test_what_somebody_could_still_change_is_not_opened(key, missing):
    """It is decrypted where it lies: neither may its bytes change under the cipher, nor may it shrink (SIGBUS)."""
    sealed = seal(key)
    descriptor = seals.create("entry", len(sealed))
    try:
        os.pwrite(descriptor, sealed, 0)
        seals.add(descriptor, seals.IMMUTABLE & ~missing)
        with pytest.raises(EntryError):
            SealedMemory(descriptor, len(sealed))
    finally:
        os.close(descriptor)


def test_memory_that_is_no_memfd_or_of_another_size_is_not_opened(key, tmp_path):
    sealed = seal(key)
    descriptor = seals.create("entry", len(sealed))
    try:
        os.pwrite(descriptor, sealed, 0)
        seals.add(descriptor, seals.IMMUTABLE)
        for size in (0, len(sealed) - 1, len(sealed) + 1):
            with pytest.raises(EntryError):
                SealedMemory(descriptor, size)
    finally:
        os.close(descriptor)
    path = tmp_path / "entry"
    path.write_bytes(sealed)
    with path.open("rb") as file, pytest.raises(EntryError):
        SealedMemory(file.fileno(), len(sealed))


def test_nobody_can_write_to_what_is_being_opened(key):
    with stored(seal(key)) as memory, memory.piece(4096, BLOCK) as piece:
        assert piece.readonly


# --- what an adversary may do; whatever it is, the outcome is one and the same ---


def refused(key: ConversationKey, sealed: bytes, kind=Kind.SEGMENT) -> None:
    with pytest.raises(EntryError) as caught:
        open_all(key, sealed, kind)
    assert caught.value.args == EntryError().args
    assert caught.value.__cause__ is None


def test_every_flipped_bit_is_noticed(key):
    """In the header, the manifest with its padding, the blocks and the tags: there is no byte that does not count."""
    sealed = seal(key)
    positions = [*range(HEADER_BYTES + 64), *range(4096 - 16, len(sealed)), *range(HEADER_BYTES + 64, 4080, 97)]
    for position in positions:
        for bit in range(8):
            sealed[position] ^= 1 << bit
            refused(key, sealed)
            sealed[position] ^= 1 << bit
    assert open_all(key, sealed) == (MANIFEST, BLOCKS)


@settings(max_examples=200)
@given(st.integers(0, 4096 + 3 * 64 - 1))
def test_every_truncation_is_noticed(size):
    with ConversationKey(Root.TURN, SECRET) as key:
        refused(key, bytes(seal(key)[:size]))


def test_more_bytes_are_noticed(key):
    refused(key, bytes(seal(key)) + b"\0")
    refused(key, bytes(seal(key)) + bytes(BLOCK + 16))


def piece(number: int) -> slice:
    return slice(4096 + number * (BLOCK + 16), 4096 + (number + 1) * (BLOCK + 16))


def test_reordered_and_repeated_blocks_are_noticed(key):
    sealed = seal(key)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        swapped = bytearray(sealed)
        swapped[piece(one)], swapped[piece(other)] = sealed[piece(other)], sealed[piece(one)]
        refused(key, swapped)
        repeated = bytearray(sealed)
        repeated[piece(one)] = sealed[piece(other)]
        refused(key, repeated)


def test_a_shorter_entry_cannot_be_made_of_a_longer_one(key):
    """With the count in the header changed to what is left, as an adversary would."""
    sealed = seal(key)
    for count in (0, 1, 2):
        shorter = bytearray(sealed[: 4096 + count * (BLOCK + 16)])
        shorter[48:52] = count.to_bytes(4, "little")
        refused(key, shorter)


def test_two_entries_of_one_key_do_not_mix(key):
    one, other = seal(key), seal(key)
    for part in (
        slice(0, HEADER_BYTES),
        slice(16, 48),
        slice(64, 96),
        slice(HEADER_BYTES, 4096),
        *map(piece, range(3)),
    ):
        mixed = bytearray(one)
        mixed[part] = other[part]
        refused(key, mixed)


def test_another_key_another_root_and_another_kind(key):
    sealed = seal(key)
    for root, secret in ((Root.TURN, bytes(32)), (Root.REQUEST, SECRET), (Root.TURN, SECRET[::-1])):
        with ConversationKey(root, secret) as wrong:
            refused(wrong, sealed)
    refused(key, sealed, Kind.HEAD)


def test_a_key_that_would_decrypt_is_refused_by_the_commitment(key):
    """The commitment is checked, not only the tags: GCM lets one ciphertext open under two keys."""
    sealed = seal(key)
    other = seal(key)
    sealed[64:96] = other[64:96]
    refused(key, sealed)


def test_what_is_not_authentic_is_left_nowhere(key):
    sealed = seal(key)
    sealed[piece(1).stop - 1] ^= 1
    into = bytearray(b"x" * BLOCK)
    with stored(sealed) as memory:
        opener = Opener(key, Kind.SEGMENT, memory)
        with pytest.raises(EntryError):
            opener.open(1, memoryview(into))
    assert into == bytes(BLOCK)


@settings(max_examples=500)
@given(st.binary(max_size=300), st.sampled_from([0, 4096, 4288, 8192]))
def test_bytes_that_are_no_entry_are_refused(data, size):
    with ConversationKey(Root.TURN, SECRET) as key:
        refused(key, data.ljust(size, b"\0"))


@settings(max_examples=500)
@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))
def test_a_header_that_lies_about_sizes_costs_nothing(count, manifest_bytes, block_bytes):
    """It is refused before anything of the announced size is allocated."""
    with ConversationKey(Root.TURN, SECRET) as key:
        sealed = seal(key)
        sealed[48:64] = (
            count.to_bytes(4, "little") + manifest_bytes.to_bytes(4, "little") + block_bytes.to_bytes(8, "little")
        )
        if (count, manifest_bytes, block_bytes) != (3, 3984, BLOCK):
            refused(key, sealed)


def test_misuse_is_an_error_of_the_caller(key):
    shape = Shape.of(MANIFEST, 1, BLOCK)
    with pytest.raises(ValueError, match="exactly"):
        Sealer(key, Kind.SEGMENT, MANIFEST, shape, memoryview(bytearray(shape.entry_bytes + 1)))
    sealer = Sealer(key, Kind.SEGMENT, MANIFEST, shape, memoryview(bytearray(shape.entry_bytes)))
    with pytest.raises(ValueError, match="another size"):
        sealer.seal(memoryview(bytes(BLOCK - 1)))
    sealer.seal(memoryview(BLOCKS[0]))
    with pytest.raises(ValueError, match="too many"):
        sealer.seal(memoryview(BLOCKS[0]))
    with stored(seal(key)) as memory:
        opener = Opener(key, Kind.SEGMENT, memory)
        for block, size in ((-1, BLOCK), (3, BLOCK), (0, BLOCK - 1)):
            with pytest.raises(ValueError, match="no such block"):
                opener.open(block, memoryview(bytearray(size)))


@pytest.mark.parametrize(
    ("manifest_bytes", "count", "size"),
    [(0, 0, 0), (3983, 1, 1), (3984, 1, 0), (3984, 0, 1), (3984, entry.MAX_BLOCKS + 1, 1), (3984, 1 << 20, 1 << 30)],
)
def test_impossible_shapes(manifest_bytes, count, size):
    with pytest.raises(EntryError):
        Shape(manifest_bytes, count, size)
