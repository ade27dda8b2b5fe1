"""Whether the pool that the model owner holds may be used, and taking it over. Nothing is believed that is not checked.

Before anything is mapped, all ranks must report a sealed pool and agree, with each other and with what this runtime
would have made itself, on: the trie's hash, the number and size of blocks, their layout, model and release. Any
disagreement, anything missing: the pools of all ranks are thrown away, and the prompts are computed afresh.

After the pool is mapped, its header page and the hash of every block are compared with the metadata. A mismatch here
means that the pool changed under its seals, or was never what it said: the mapping goes, the owner's pool is thrown
away, and this runtime does not start (`PoolDamagedError`). The next one finds no pool, and computes the prompts.

On several ranks all of this is of all ranks: each asks for itself, and what one finds is what all of them do.
"""

import hashlib
import hmac
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from google.protobuf.message import DecodeError

from kvxfer import seals
from kvxfer.errors import KvxferError
from kvxfer.header import Header
from tie.daemon import log
from tie.daemon.errors import PeerError, RefusedError, TieError
from tie.proto import owner_pb2
from tie.runtime.owner_channel import close_all
from tie.runtime.prefix_pool import MAX_METADATA_BYTES, Held, Place, PoolClient, PoolMemory, RankedPool, format_of

_SHA256_BYTES: Final = 32


class PoolDamagedError(TieError):
    """The pool is not what its metadata says, though the kernel sealed it. This runtime must not start."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What this runtime would have made itself.

    Attributes:
        headers: of the ranks' pools, in their order. They differ in the bytes of a block only.
        trie: serialized.
    """

    headers: tuple[Header, ...]
    trie: bytes

    @property
    def world_size(self) -> int:
        """How many ranks."""
        return len(self.headers)

    @property
    def block_count(self) -> int:
        """Blocks of each pool."""
        return self.headers[0].block_count

    @property
    def trie_sha256(self) -> bytes:
        """What the ranks agree on."""
        return hashlib.sha256(self.trie).digest()


def restore(path: Path, expected: Expected) -> RankedPool | None:
    """Takes over the owner's pools. None: there are none, or they were thrown away; the prompts are to be computed.

    Args:
        path: owner.sock.
        expected: what they must be.

    Raises:
        PoolDamagedError: one is not what its metadata says, and all have been thrown away.
        PeerError: the owner is gone.
    """
    with ExitStack() as stack:
        held = []
        for rank in range(expected.world_size):
            client = PoolClient(path, Place(rank, expected.world_size))
            stack.callback(client.close)
            held.append(client.restore())
            stack.callback(close_all, held[-1].descriptors or ())
        reasons = {disagreement(each.states, expected) for each in held}
        if reasons == {"empty"}:
            return None
        reason = next(iter(sorted(reasons - {"", "empty"})), "empty" if "empty" in reasons else "")
        digests = [] if reason else [_digests(rank, each, expected) for rank, each in enumerate(held)]
        if reason or None in digests:
            log.event("prefix.discarded", reason=reason or "metadata")
            client.reset()
            return None
        pools = [each.descriptors[0] for each in held if each.descriptors]  # no digests without them
        return _attach(client, pools, [each for each in digests if each], expected)


def disagreement(states: Sequence[owner_pb2.PoolState], expected: Expected) -> str:
    """Why these pools may not be restored, as a stable code; "" where they may.

    Args:
        states: of all ranks, in their order.
        expected: what each must be.
    """
    if len(states) != expected.world_size:
        return "rank-missing"
    if all(state.stage == owner_pb2.POOL_STAGE_EMPTY for state in states):
        return "empty"
    for state, header in zip(states, expected.headers, strict=True):
        if state.stage != owner_pb2.POOL_STAGE_SEALED:
            return "rank-not-ready"
        if state.world_size != expected.world_size:
            return "world-size"
        wanted = format_of(header)
        for name in ("model", "release", "layout_id", "block_tokens", "block_bytes", "block_count"):
            if getattr(state.format, name) != getattr(wanted, name):
                return name.replace("_", "-")
        if state.pool_bytes != header.buffer_bytes:
            return "pool-bytes"
        if not hmac.compare_digest(state.trie_sha256, expected.trie_sha256):
            return "trie"
    return ""


def _digests(rank: int, held: Held, expected: Expected) -> list[bytes] | None:
    """The blocks' hashes out of a rank's metadata; None where that is not what it should be."""
    state = held.states[rank]
    if held.descriptors is None or not 0 < state.metadata_bytes <= MAX_METADATA_BYTES:
        return None
    pool, metadata = held.descriptors
    try:
        seals.require(pool, seals.READ_ONLY_FOR_OTHERS, expected.headers[rank].buffer_bytes)
        seals.require(metadata, seals.IMMUTABLE, state.metadata_bytes)
    except KvxferError:
        return None
    data = os.pread(metadata, state.metadata_bytes, 0)
    if not hmac.compare_digest(hashlib.sha256(data).digest(), state.metadata_sha256):
        return None
    message = owner_pb2.PoolMetadata()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return None
    digests = list(message.block_sha256)
    fits = len(digests) == expected.block_count and all(len(each) == _SHA256_BYTES for each in digests)
    return digests if fits and message.trie == expected.trie else None


def _attach(
    client: PoolClient, pools: Sequence[int], digests: Sequence[Sequence[bytes]], expected: Expected
) -> RankedPool:
    with ExitStack() as stack:
        memories = []
        for descriptor, hashes, header in zip(pools, digests, expected.headers, strict=True):
            memories.append(PoolMemory(descriptor, header, writable=False))
            stack.callback(memories[-1].close)
            try:
                verify(memories[-1], hashes)
            except PoolDamagedError:
                reset_quietly(client)
                raise
        stack.pop_all()
    return RankedPool(memories)


def reset_quietly(client: PoolClient) -> None:
    """Has the pools of all ranks thrown away, where the owner is there to do it."""
    try:
        client.reset()
    except (PeerError, RefusedError) as error:
        log.failure("prefix.reset-failed", error)


def verify(memory: PoolMemory, digests: Sequence[bytes]) -> None:
    """Compares a mapped pool with what its metadata says of it.

    Raises:
        PoolDamagedError: they differ.
    """
    try:
        header = Header.unpack(memory.page())
    except KvxferError:
        header = None
    if header != memory.header:
        raise PoolDamagedError("the prefix pool's header is not the one that was sealed")
    for number, digest in enumerate(digests):
        with memory.block(number) as block:
            sound = hmac.compare_digest(hashlib.sha256(block).digest(), digest)
        if not sound:
            raise PoolDamagedError("a block of the prefix pool is not the one that was sealed")
    log.event("prefix.verified", count=len(digests))


def metadata_of(trie: bytes, digests: Sequence[bytes]) -> bytes:
    """What goes to the owner with a pool."""
    return owner_pb2.PoolMetadata(trie=trie, block_sha256=digests).SerializeToString(deterministic=True)
