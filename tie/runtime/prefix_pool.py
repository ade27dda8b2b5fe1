"""A prefix pool as the runtime sees it: the conversation with the model owner, and the memory that comes of it.

What the owner sends is another process's: its replies, seals and sizes are checked here, and what they mean in
`prefix_restore`. Blocking, with a deadline on every wait.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvxfer import pages, seals
from kvxfer.errors import ChannelError
from kvxfer.header import HEADER_BYTES, Header
from tie.daemon import errors
from tie.proto import owner_pb2
from tie.runtime.owner_channel import OwnerChannel, close_all, translated

_CONNECT_S: Final = 5.0
_EXCHANGE_S: Final = 60.0  # the owner may have to find a gigabyte
MAX_METADATA_BYTES: Final = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Place:
    """Which rank of how many a pool belongs to."""

    rank: int = 0
    world_size: int = 1


class PoolMemory:
    """The blocks of a pool, mapped. Any thread may read.

    Args:
        descriptor: the memfd; the caller keeps and closes it.
        header: what it holds, or is to hold.
        writable: to fill it; else it is mapped for reading only, which is all that the kernel allows once it is sealed.

    Raises:
        OSError: it cannot be mapped.
    """

    def __init__(self, descriptor: int, header: Header, *, writable: bool) -> None:
        self.header = header
        rights = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map = mmap.mmap(descriptor, header.buffer_bytes, mmap.MAP_SHARED, rights)
        self._address = pages.address(self._map) if writable else 0
        self._view = memoryview(self._map)
        if writable:
            self._view[:HEADER_BYTES] = header.pack()

    def page(self) -> bytes:
        """The header page, as it lies there."""
        return bytes(self._view[:HEADER_BYTES])

    def block(self, number: int) -> memoryview:
        """The bytes of one block. Release it before `close`."""
        start = self.header.offset(number)
        return self._view[start : start + self.header.block_bytes]

    def protect(self) -> None:
        """Ends writing: this process's own mapping, the only one that the seals spare, is read-only from here on.

        Raises:
            OSError: the kernel refuses.
        """
        pages.protect(self._address, self.header.buffer_bytes)
        self._view = self._view.toreadonly()

    def close(self) -> None:
        """Unmaps it."""
        self._view.release()
        self._map.close()


class RankedPool:
    """The pools of all ranks, in their order, as one: a block is the ranks' slices. Any thread may read.

    Args:
        pools: at least one.
    """

    def __init__(self, pools: Sequence[PoolMemory]) -> None:
        self.pools = tuple(pools)

    def block(self, number: int) -> memoryview:
        """The bytes of one block. Release it before `close`."""
        if len(self.pools) == 1:
            return self.pools[0].block(number)
        whole = bytearray()
        for pool in self.pools:
            with pool.block(number) as part:
                whole += part
        return memoryview(whole)

    def close(self) -> None:
        """Unmaps them."""
        for pool in self.pools:
            pool.close()


@dataclass(frozen=True, slots=True)
class Held:
    """What the owner holds for all ranks, and this rank's descriptors where its pool is sealed: (pool, metadata)."""

    states: Sequence[owner_pb2.PoolState]
    descriptors: tuple[int, int] | None


class PoolClient:
    """One connection to the owner. A pool that is being filled is lost when it is closed before `seal`.

    Raises:
        PeerDiedError: no owner there.
    """

    def __init__(self, path: Path, place: Place) -> None:
        self._place = place
        self._channel = OwnerChannel(path, timeout=_CONNECT_S)

    def allocate(self, header: Header, metadata_capacity: int) -> tuple[int, int]:
        """Room for a pool and its metadata: two memfds, which belong to the caller.

        Raises:
            OwnerRefusedError: the owner has a pool, or no memory for one.
            PeerError: the owner is gone, silent or makes no sense.
        """
        request = owner_pb2.PoolAllocate(
            rank=self._place.rank,
            world_size=self._place.world_size,
            format=format_of(header),
            metadata_capacity=metadata_capacity,
        )
        _, descriptors = self._ask(owner_pb2.OwnerRequest(pool_allocate=request), "pool_allocated")
        try:
            with translated():
                if len(descriptors) != 2:
                    raise ChannelError("two descriptors are expected")  # noqa: TRY301 (they are closed below)
                seals.require(descriptors[0], 0, header.buffer_bytes)
                seals.require(descriptors[1], 0, metadata_capacity)
        except BaseException:
            close_all(descriptors)
            raise
        return descriptors[0], descriptors[1]

    def seal(self, metadata: bytes, metadata_sha256: bytes, trie_sha256: bytes) -> None:
        """Has the pool that this connection fills sealed. Raises as `allocate`."""
        request = owner_pb2.PoolSeal(
            rank=self._place.rank,
            world_size=self._place.world_size,
            metadata_bytes=len(metadata),
            metadata_sha256=metadata_sha256,
            trie_sha256=trie_sha256,
        )
        _, descriptors = self._ask(owner_pb2.OwnerRequest(pool_seal=request), "pool_sealed")
        close_all(descriptors)

    def restore(self) -> Held:
        """What the owner holds. The descriptors belong to the caller. Raises as `allocate`."""
        request = owner_pb2.PoolRestore(rank=self._place.rank, world_size=self._place.world_size)
        reply, descriptors = self._ask(owner_pb2.OwnerRequest(pool_restore=request), "pool_states")
        if len(descriptors) not in {0, 2} or len(reply.pool_states.ranks) > self._place.world_size:
            close_all(descriptors)
            raise errors.ProtocolError("model owner: impossible states")
        own = (descriptors[0], descriptors[1]) if descriptors else None
        return Held(tuple(reply.pool_states.ranks), own)

    def reset(self) -> None:
        """Has the pools of all ranks thrown away. Raises as `allocate`."""
        _, descriptors = self._ask(owner_pb2.OwnerRequest(pool_reset=owner_pb2.PoolReset()), "pool_was_reset")
        close_all(descriptors)

    def close(self) -> None:
        """Ends the conversation."""
        self._channel.close()

    def _ask(self, request: owner_pb2.OwnerRequest, wanted: str) -> tuple[owner_pb2.OwnerReply, list[int]]:
        return self._channel.ask(request, wanted, timeout=_EXCHANGE_S)


def format_of(header: Header) -> owner_pb2.PoolFormat:
    """A header as the owner's messages have it."""
    return owner_pb2.PoolFormat(
        model=header.model,
        release=header.release,
        layout_id=header.layout,
        block_tokens=header.block_tokens,
        block_bytes=header.block_bytes,
        block_count=header.block_count,
    )
