"""The pools' books: whoever leaves and whatever runs out while a thread works on a pool, nothing stays open."""

import asyncio
import contextlib
import hashlib
import mmap
import os
import resource
import threading
from collections.abc import Iterator

import pytest

from descriptors import open_descriptors
from model_owner import prefix_pool
from model_owner.pool_memory import PoolRefusedError
from model_owner.prefix_pool import PrefixPools
from tie.proto import owner_pb2 as pb
from waiting import WAIT_S, wait_for

METADATA = b"opaque to the owner"
CAPACITY = 4096
POOL = 4 * mmap.PAGESIZE
FORMAT = pb.PoolFormat(model="m", release="r", layout_id="l", block_tokens=16, block_bytes=mmap.PAGESIZE, block_count=3)
ALLOCATE = pb.PoolAllocate(world_size=1, format=FORMAT, metadata_capacity=CAPACITY)
SEAL = pb.PoolSeal(
    world_size=1,
    metadata_bytes=len(METADATA),
    metadata_sha256=hashlib.sha256(METADATA).digest(),
    trie_sha256=bytes(32),
)


@pytest.fixture
def pools() -> Iterator[PrefixPools]:
    """Room for one pool."""
    pools = PrefixPools(POOL + CAPACITY)
    yield pools
    pools.reset()


@pytest.fixture
def held_up(monkeypatch):
    """Holds a function of the pools up: an event that it has begun, one that lets it go on."""
    begun, go_on = threading.Event(), threading.Event()

    def held_up(name: str) -> tuple[threading.Event, threading.Event]:
        real = getattr(prefix_pool, name)

        def slow(*arguments):
            begun.set()
            assert go_on.wait(WAIT_S)
            return real(*arguments)

        monkeypatch.setattr(prefix_pool, name, slow)
        return begun, go_on

    yield held_up
    go_on.set()


async def filled(pools: PrefixPools) -> None:
    """Allocates a pool and writes its metadata."""
    pool = await pools.allocate(ALLOCATE, pools)
    os.pwrite(pool.metadata, METADATA, 0)


async def under_way(pools, held_up, slow: str) -> tuple[asyncio.Task[object], threading.Event]:
    """Somebody's call whose thread has begun and waits; the event lets it go on."""
    if slow == "sealed":
        await filled(pools)
    begun, go_on = held_up(slow)
    asking = asyncio.create_task(pools.allocate(ALLOCATE, pools) if slow == "room" else pools.seal(SEAL, pools))
    assert await asyncio.to_thread(begun.wait, WAIT_S)
    return asking, go_on


@pytest.mark.parametrize("slow", ["room", "sealed"])
def test_what_was_made_for_one_who_was_cancelled_is_closed(pools, held_up, slow):
    before = open_descriptors()
    go_on = None

    async def cancelled() -> None:
        nonlocal go_on
        asking, go_on = await under_way(pools, held_up, slow)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(cancelled())
    assert not pools.fills(pools)
    go_on.set()  # when even the loop is gone
    wait_for(lambda: open_descriptors() == before, "every descriptor to be closed")
    asyncio.run(filled(pools))  # there is room


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """This process can open `count` more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_descriptors() + 32, limits[1]))
    taken = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(count):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in taken:
            os.close(descriptor)


@pytest.mark.parametrize("left", range(7))
def test_without_descriptors_there_is_a_refusal_and_no_pool(pools, left):
    async def refused(work) -> list[str]:
        """Why it was refused, or nothing."""
        with descriptors_left(left):
            try:
                await work
            except PoolRefusedError as error:
                return [error.code]
        return []

    async def both() -> None:
        before = open_descriptors()
        assert await refused(pools.allocate(ALLOCATE, pools)) == ([] if left >= 2 else ["no-memfd"])
        pools.reset()
        assert open_descriptors() == before
        await filled(pools)
        said = await refused(pools.seal(SEAL, pools))
        assert said in ([], ["no-memfd"], ["pool-not-sealed"])
        assert (said == []) is (pools.seals == 1) is (left >= 5)
        assert open_descriptors() == (before if said else before + 2)

    asyncio.run(both())


def test_metadata_take_room_as_blocks_do():
    async def allocated(room: int) -> None:
        pools = PrefixPools(room)
        try:
            await pools.allocate(ALLOCATE, pools)
        finally:
            pools.reset()

    asyncio.run(allocated(POOL + CAPACITY))
    with pytest.raises(PoolRefusedError, match="pool-too-large"):
        asyncio.run(allocated(POOL + CAPACITY - 1))


@pytest.mark.parametrize("slow", ["room", "sealed"])
def test_a_pool_that_was_thrown_away_counts_until_its_memory_has_gone(pools, held_up, slow):
    async def thrown_away() -> None:
        asking, go_on = await under_way(pools, held_up, slow)
        pools.reset()
        with pytest.raises(PoolRefusedError, match="pool-too-large"):
            await pools.allocate(ALLOCATE, "another")
        go_on.set()
        with pytest.raises(PoolRefusedError, match="pool-not-yours"):
            await asking
        await pools.allocate(ALLOCATE, "another")

    asyncio.run(thrown_away())
