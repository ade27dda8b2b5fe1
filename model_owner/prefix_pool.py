"""The prefix pools: one memfd of KV blocks for each rank, filled by one runtime, sealed, handed to those that follow.

    EMPTY ──allocate──▶ FILLING ──seal──▶ SEALED
      ▲                    │                 │
      ├──abandon, reset────┘                 │
      └──reset───────────────────────────────┘

The kernel keeps a sealed pool as it is (memfd_create(2), fcntl(2) F_ADD_SEALS): `F_SEAL_FUTURE_WRITE` refuses every
new writable mapping and every write, `F_SEAL_SHRINK` and `F_SEAL_GROW` fix its size, `F_SEAL_SEAL` its seals. Only the
mapping that the filling runtime made before stays writable, and ends with that runtime. The metadata is kept as a copy
of the owner's own. The owner looks into neither: who restores a pool judges it (`tie.runtime.prefix_restore`).

What takes time is done aside (`pool_memory`). Meanwhile anybody may throw the pool away: who asked is told so, and what
was made for it goes. Until then its memory counts.
"""

import asyncio
import os
from dataclasses import dataclass, field
from typing import Final

from kvxfer.errors import KvxferError
from kvxfer.header import Header
from model_owner.arena import ArenaError
from model_owner.pool_memory import Descriptors, PoolRefusedError, duplicates, made_aside, room, sealed
from tie.daemon.config import MAX_RANKS
from tie.proto import owner_pb2

MAX_METADATA_BYTES: Final = 64 * 1024 * 1024
_SHA256_BYTES: Final = 32


@dataclass(eq=False, slots=True)
class Pool:
    """One rank's pool.

    Attributes:
        world_size: ranks of the split that it belongs to.
        header: what its blocks are.
        metadata_bytes: room for it while the pool is filled, afterwards its size.
        holder: who fills it; None once it is sealed.
        pool: the memfd of the blocks; -1 until it is there.
        metadata: the memfd of the metadata: room for it while the pool is filled, afterwards the owner's sealed copy.
    """

    world_size: int
    header: Header
    metadata_bytes: int
    holder: object | None
    pool: int = -1
    metadata: int = -1
    metadata_sha256: bytes = b""
    trie_sha256: bytes = b""

    @property
    def stage(self) -> "owner_pb2.PoolStage.ValueType":
        """Where it is in its life."""
        return owner_pb2.POOL_STAGE_SEALED if self.holder is None else owner_pb2.POOL_STAGE_FILLING

    @property
    def descriptors(self) -> Descriptors:
        """What a client gets; the pool keeps and closes them."""
        return self.pool, self.metadata

    @property
    def cost(self) -> int:
        """Bytes of memory that it takes."""
        return self.header.buffer_bytes + self.metadata_bytes

    def state(self) -> owner_pb2.PoolState:
        """What the owner says of it."""
        return owner_pb2.PoolState(
            stage=self.stage,
            world_size=self.world_size,
            format=owner_pb2.PoolFormat(
                model=self.header.model,
                release=self.header.release,
                layout_id=self.header.layout,
                block_tokens=self.header.block_tokens,
                block_bytes=self.header.block_bytes,
                block_count=self.header.block_count,
            ),
            pool_bytes=self.header.buffer_bytes,
            metadata_bytes=self.metadata_bytes if self.holder is None else 0,
            metadata_sha256=self.metadata_sha256,
            trie_sha256=self.trie_sha256,
        )

    def close(self) -> None:
        """Lets go of its memory. Who has mapped it keeps that."""
        for descriptor in (self.pool, self.metadata):
            if descriptor >= 0:
                os.close(descriptor)


@dataclass(slots=True)
class PrefixPools:
    """All ranks' pools. The event loop's own.

    Attributes:
        max_bytes: of all pools together, with their metadata.
        seals: pools sealed since start.
        restores: pools handed out again.
        resets: times that there was something to throw away, and it was.
    """

    max_bytes: int
    seals: int = 0
    restores: int = 0
    resets: int = 0
    _pools: dict[int, Pool] = field(default_factory=dict)
    _making: set[Pool] = field(default_factory=set)  # what threads work on, though it may have been thrown away

    async def allocate(self, request: owner_pb2.PoolAllocate, holder: object) -> Pool:
        """Makes a rank's pool; `holder` fills it.

        Raises:
            PoolRefusedError: the request is impossible, the rank has a pool, or there is no memory.
        """
        rank, world_size = _placed(request.rank, request.world_size)
        if rank in self._pools:
            raise PoolRefusedError("pool-not-empty")
        if any(other.world_size != world_size for other in self._pools.values()):
            raise PoolRefusedError("pool-of-other-split")
        header = _header(request.format)
        made = Pool(world_size, header, request.metadata_capacity, holder)
        used = sum(other.cost for other in {*self._pools.values(), *self._making})
        if used + made.cost > self.max_bytes or not 0 < made.metadata_bytes <= MAX_METADATA_BYTES:
            raise PoolRefusedError("pool-too-large")
        self._pools[rank] = made
        self._making.add(made)
        try:
            made.pool, made.metadata = await made_aside(room, header.buffer_bytes, made.metadata_bytes)
        except ArenaError as error:
            self._throw_away(rank, made)
            raise PoolRefusedError(error.code) from error
        except asyncio.CancelledError:
            self._throw_away(rank, made)
            raise
        finally:
            self._making.discard(made)
        if self._pools.get(rank) is not made:
            made.close()
            raise PoolRefusedError("pool-not-yours")
        return made

    async def seal(self, request: owner_pb2.PoolSeal, holder: object) -> None:
        """Seals a rank's pool and keeps a copy of its metadata. A pool that cannot be sealed is thrown away.

        Raises:
            PoolRefusedError: `holder` does not fill it, or the metadata is not what is said of it.
        """
        rank, _ = _placed(request.rank, request.world_size)
        pool = self._pools.get(rank)
        if pool is None or pool.pool < 0 or pool.holder is not holder or pool.world_size != request.world_size:
            raise PoolRefusedError("pool-not-yours")
        try:
            if not 0 < request.metadata_bytes <= pool.metadata_bytes or len(request.trie_sha256) != _SHA256_BYTES:
                raise PoolRefusedError("metadata-impossible")  # noqa: TRY301 (whatever is wrong ends the pool)
            self._making.add(pool)
            made = await made_aside(sealed, *duplicates(pool.descriptors), request)
        except (PoolRefusedError, ArenaError, KvxferError, OSError) as error:
            self._throw_away(rank, pool)
            raise PoolRefusedError(getattr(error, "code", "pool-not-sealed")) from error
        except asyncio.CancelledError:
            self._throw_away(rank, pool)
            raise
        finally:
            self._making.discard(pool)
        if self._pools.get(rank) is not pool:
            for descriptor in made:
                os.close(descriptor)
            raise PoolRefusedError("pool-not-yours")
        pool.close()
        pool.pool, pool.metadata = made
        pool.metadata_bytes = request.metadata_bytes
        pool.metadata_sha256, pool.trie_sha256 = request.metadata_sha256, request.trie_sha256
        pool.holder = None
        self.seals += 1

    def restore(self, request: owner_pb2.PoolRestore) -> tuple[list[owner_pb2.PoolState], Pool | None]:
        """All ranks' states, and the asking rank's pool where it is sealed.

        Raises:
            PoolRefusedError: the request is impossible.
        """
        rank, world_size = _placed(request.rank, request.world_size)
        empty = owner_pb2.PoolState(stage=owner_pb2.POOL_STAGE_EMPTY)
        states = [self._pools[each].state() if each in self._pools else empty for each in range(world_size)]
        own = self._pools.get(rank)
        if own is None or own.holder is not None:
            return states, None
        self.restores += 1
        return states, own

    def reset(self) -> None:
        """Throws all ranks' pools away."""
        if self._pools:
            self.resets += 1
        for pool in self._pools.values():
            pool.close()
        self._pools = {}

    def abandon(self, holder: object) -> None:
        """Throws away what `holder` was filling."""
        for rank in [rank for rank, pool in self._pools.items() if pool.holder is holder]:
            self._pools.pop(rank).close()

    def _throw_away(self, rank: int, pool: Pool) -> None:
        if self._pools.get(rank) is pool:
            self._pools.pop(rank).close()

    def fills(self, holder: object) -> bool:
        """Whether `holder` fills a pool."""
        return any(pool.holder is holder for pool in self._pools.values())

    def describe(self, status: owner_pb2.OwnerStatus) -> None:
        """Puts what there is into the owner's status."""
        world_size = max((pool.world_size for pool in self._pools.values()), default=0)
        complete = len(self._pools) == world_size and world_size > 0
        status.pool_stage = min(pool.stage for pool in self._pools.values()) if complete else owner_pb2.POOL_STAGE_EMPTY
        status.pool_bytes = sum(pool.header.buffer_bytes for pool in self._pools.values())
        status.pool_blocks = max((pool.header.block_count for pool in self._pools.values()), default=0)
        status.pool_seals, status.pool_restores, status.pool_resets = self.seals, self.restores, self.resets


def _placed(rank: int, world_size: int) -> tuple[int, int]:
    if not 0 < world_size <= MAX_RANKS or rank >= world_size:
        raise PoolRefusedError("impossible-rank")
    return rank, world_size


def _header(wanted: owner_pb2.PoolFormat) -> Header:
    try:
        return Header(
            model=wanted.model,
            release=wanted.release,
            layout=wanted.layout_id,
            block_tokens=wanted.block_tokens,
            block_bytes=wanted.block_bytes,
            block_count=wanted.block_count,
            first_token=0,
            token_count=wanted.block_count * wanted.block_tokens,
        )
    except KvxferError:
        raise PoolRefusedError("impossible-format") from None
