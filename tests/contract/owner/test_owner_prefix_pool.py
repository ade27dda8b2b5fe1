"""Prefix pools of a real attach server: their life, and that a sealed one cannot be changed by anybody."""

import asyncio
import contextlib
import fcntl
import hashlib
import mmap
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer import seals
from kvxfer.channel import Channel
from kvxfer.header import Header
from model_owner import prefix_pool
from model_owner.pool_memory import PoolRefusedError
from model_owner.prefix_pool import PrefixPools
from tie.proto import owner_pb2 as pb

WAIT_S = 30.0
BLOCKS = 3
FORMAT = pb.PoolFormat(
    model="m", release="r", layout_id="l", block_tokens=16, block_bytes=mmap.PAGESIZE, block_count=BLOCKS
)
SIZE = (1 + BLOCKS) * mmap.PAGESIZE
METADATA = b"opaque to the owner"


class Client:
    """Speaks to it, and closes what it got."""

    def __init__(self, owner) -> None:
        self.channel = Channel.connect(owner.path, timeout=WAIT_S)
        self.descriptors: list[int] = []

    def ask(self, **kind) -> pb.OwnerReply:
        self.channel.send(pb.OwnerRequest(**kind).SerializeToString(), timeout=WAIT_S)
        message, descriptors = self.channel.receive(timeout=WAIT_S)
        self.descriptors = descriptors
        return pb.OwnerReply.FromString(message)

    def allocate(self, rank=0, world_size=1, **changes) -> pb.OwnerReply:
        wanted = pb.PoolAllocate(rank=rank, world_size=world_size, format=FORMAT, metadata_capacity=4096)
        for name, value in changes.items():
            target = wanted if name == "metadata_capacity" else wanted.format
            setattr(target, name, value)
        return self.ask(pool_allocate=wanted)

    def seal(self, rank=0, world_size=1, **changes) -> pb.OwnerReply:
        fields = {
            "metadata_bytes": len(METADATA),
            "metadata_sha256": hashlib.sha256(METADATA).digest(),
            "trie_sha256": bytes(32),
        }
        return self.ask(pool_seal=pb.PoolSeal(rank=rank, world_size=world_size, **(fields | changes)))

    def restore(self, rank=0, world_size=1) -> list[pb.PoolState]:
        return list(self.ask(pool_restore=pb.PoolRestore(rank=rank, world_size=world_size)).pool_states.ranks)

    def close(self) -> None:
        self.channel.close()


@pytest.fixture
def connect(pool_owner):
    with contextlib.ExitStack() as stack:

        def connect() -> Client:
            client = Client(pool_owner)
            stack.callback(client.close)
            return client

        yield connect


@pytest.fixture
def sealed(connect):
    """A pool's descriptor as the client that filled it has it, and its mapping from before."""
    filler = connect()
    assert filler.allocate().HasField("pool_allocated")
    pool, metadata = filler.descriptors
    mapping = mmap.mmap(pool, SIZE)
    mapping[mmap.PAGESIZE : mmap.PAGESIZE + 4] = b"kept"
    os.pwrite(metadata, METADATA, 0)
    assert filler.seal().HasField("pool_sealed")
    yield pool, mapping
    mapping.close()
    os.close(pool)
    os.close(metadata)


def stages(client, world_size=1):
    return [state.stage for state in client.restore(world_size=world_size)]


def test_a_pool_goes_from_empty_over_sealed_to_empty(connect, sealed):
    later = connect()
    (state,) = later.restore()
    pool, metadata = later.descriptors
    assert (state.stage, state.format, state.pool_bytes) == (pb.POOL_STAGE_SEALED, FORMAT, SIZE)
    assert state.metadata_sha256 == hashlib.sha256(METADATA).digest()
    assert os.pread(metadata, state.metadata_bytes, 0) == METADATA
    seals.require(pool, seals.READ_ONLY_FOR_OTHERS, SIZE)
    seals.require(metadata, seals.IMMUTABLE, len(METADATA))
    with mmap.mmap(pool, SIZE, mmap.MAP_SHARED, mmap.PROT_READ) as mapping:
        assert mapping[mmap.PAGESIZE : mmap.PAGESIZE + 4] == b"kept"
        assert later.allocate().refused.reason == "pool-not-empty"
        assert later.ask(pool_reset=pb.PoolReset()).HasField("pool_was_reset")
        assert stages(later) == [pb.POOL_STAGE_EMPTY]
        assert mapping[mmap.PAGESIZE : mmap.PAGESIZE + 4] == b"kept", "who has mapped it keeps it"
    os.close(pool)
    os.close(metadata)


# What a process may try with a descriptor of a sealed pool. Each prints the error's name, or "done".
ATTEMPTS = {
    "mmap": "mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)",
    "pwrite": "os.pwrite(fd, b'x', mmap.PAGESIZE)",
    "shrink": "os.ftruncate(fd, mmap.PAGESIZE)",
    "grow": "os.ftruncate(fd, size + mmap.PAGESIZE)",
    "fallocate": "os.posix_fallocate(fd, 0, size + mmap.PAGESIZE)",
    "punch": "punch(fd, size)",
    "re-seal": "fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)",
    "mprotect": "protect(fd, size)",
}
HELPERS = """
import ctypes, fcntl, mmap, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
def check(result):
    if result:
        raise OSError(ctypes.get_errno(), "refused")
def punch(fd, size):  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
    check(libc.fallocate(fd, 3, 0, size))
def protect(fd, size):  # a read-only mapping that wants to become a writable one
    where = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if where == ctypes.c_void_p(-1).value:
        raise SystemExit("not even a mapping for reading")
    check(libc.mprotect(where, size, mmap.PROT_READ | mmap.PROT_WRITE))
def attempt(code, fd, size):
    try:
        eval(code)
    except (OSError, ValueError) as error:
        return type(error).__name__
    return "done"
"""


def attempt(code: str, descriptor: int) -> str:
    namespace: dict = {}
    exec(HELPERS, namespace)  # noqa: S102 (the same lines run in another process below)
    return namespace["attempt"](code, descriptor, SIZE)


def reopened(descriptor: int) -> int:
    """As a process of the same user can: for writing, whatever the descriptor was opened for."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)


def refused(outcome: str) -> bool:
    return outcome in {"PermissionError", "OSError", "ValueError"}


@pytest.mark.parametrize("name", ATTEMPTS)
def test_who_restores_a_pool_cannot_change_it(name, sealed, connect):
    later = connect()
    later.restore()
    pool, metadata = later.descriptors
    for descriptor in (pool, reopened(pool), reopened(metadata)):
        assert refused(attempt(ATTEMPTS[name], descriptor)), name
    assert os.pread(pool, 4, mmap.PAGESIZE) == b"kept"
    assert os.fstat(pool).st_size == SIZE


@pytest.mark.parametrize("name", ATTEMPTS)
def test_who_filled_a_pool_gets_no_second_mapping(name, sealed):
    pool, mapping = sealed
    assert refused(attempt(ATTEMPTS[name], pool)), name
    assert mapping[mmap.PAGESIZE : mmap.PAGESIZE + 4] == b"kept"


def test_another_process_cannot_change_a_sealed_pool(sealed, connect):
    later = connect()
    later.restore()
    pool = reopened(later.descriptors[0])
    script = HELPERS + f"for code in {list(ATTEMPTS.values())!r}: print(attempt(code, {pool}, {SIZE}))"
    ran = subprocess.run(
        [sys.executable, "-c", script], pass_fds=[pool], capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    outcomes = dict(zip(ATTEMPTS, ran.stdout.split(), strict=True))
    assert all(map(refused, outcomes.values())), outcomes
    assert os.pread(pool, 4, mmap.PAGESIZE) == b"kept"


@pytest.mark.parametrize("name", ATTEMPTS)
def test_the_same_attempt_succeeds_before_the_seal(name, connect):
    """So that the tests above could fail."""
    filler = connect()
    filler.allocate()
    pool, metadata = filler.descriptors
    assert attempt(ATTEMPTS[name], pool) == "done"
    os.close(pool)
    os.close(metadata)


def test_a_pool_ends_with_who_fills_it(connect):
    filler, other = connect(), connect()
    filler.allocate()
    assert stages(other) == [pb.POOL_STAGE_FILLING]
    assert other.seal().refused.reason == "pool-not-yours"
    assert other.allocate().refused.reason == "pool-not-empty"
    filler.close()
    for _ in range(200):
        if stages(other) == [pb.POOL_STAGE_EMPTY]:
            break
    assert other.allocate().HasField("pool_allocated")


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"metadata_sha256": bytes(32)}, "metadata-mismatch"),
        ({"metadata_bytes": 4097}, "metadata-impossible"),
        ({"metadata_bytes": 0}, "metadata-impossible"),
        ({"trie_sha256": b"short"}, "metadata-impossible"),
    ],
)
def test_metadata_that_is_not_what_it_is_said_to_be_ends_the_pool(changes, code, connect):
    filler = connect()
    filler.allocate()
    os.pwrite(filler.descriptors[1], METADATA, 0)
    assert filler.seal(**changes).refused.reason == code
    assert stages(filler) == [pb.POOL_STAGE_EMPTY]
    assert filler.seal().refused.reason == "pool-not-yours"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"rank": 1}, "impossible-rank"),
        ({"world_size": 0}, "impossible-rank"),
        ({"world_size": 65}, "impossible-rank"),
        ({"block_count": 0}, "impossible-format"),
        ({"block_count": 2**32 - 1}, "impossible-format"),
        ({"block_bytes": 2**63}, "impossible-format"),
        ({"block_tokens": 0}, "impossible-format"),
        ({"model": ""}, "impossible-format"),
        ({"model": "a\nb"}, "impossible-format"),
        ({"layout_id": "x" * 200}, "impossible-format"),
        ({"block_count": 1000}, "pool-too-large"),
        ({"metadata_capacity": 0}, "pool-too-large"),
        ({"metadata_capacity": 2**40}, "pool-too-large"),
    ],
)
def test_impossible_pools_are_refused_and_leave_nothing(changes, code, connect):
    client = connect()
    assert client.allocate(**changes).refused.reason == code
    assert stages(client) == [pb.POOL_STAGE_EMPTY]


@contextlib.contextmanager
def held_up(monkeypatch, name):
    """Holds up a function of the pools: an event that it has begun, one that lets it go on."""
    real, begun, go_on = getattr(prefix_pool, name), threading.Event(), threading.Event()

    def slow(*arguments):
        begun.set()
        assert go_on.wait(WAIT_S)
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(prefix_pool, name, slow)
        try:
            yield begun, go_on
        finally:
            go_on.set()


@contextlib.contextmanager
def beside(ask):
    """Runs a question on another thread; gives a list that has its answer when the block has ended."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(ask()))
    thread.start()
    yield answers
    thread.join(WAIT_S)
    assert not thread.is_alive()


def open_pools():
    """Descriptors of pools and their metadata in this process, the owner's and the clients'."""
    names = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            names.append(path.readlink().name)
    return sum("tie-prefix" in name for name in names)


@pytest.mark.parametrize(("slow", "is_reset"), [("room", False), ("room", True), ("sealed", False), ("sealed", True)])
def test_others_are_answered_while_a_pool_is_made_or_sealed(slow, is_reset, connect, monkeypatch):
    before = open_pools()
    filler, other = connect(), connect()
    if slow == "sealed":
        filler.allocate()
        os.pwrite(filler.descriptors[1], METADATA, 0)
        for descriptor in filler.descriptors:
            os.close(descriptor)
    with (
        held_up(monkeypatch, slow) as (begun, go_on),
        beside(filler.allocate if slow == "room" else filler.seal) as answers,
    ):
        assert begun.wait(WAIT_S)
        assert stages(other) == [pb.POOL_STAGE_FILLING]
        assert other.allocate().refused.reason == "pool-not-empty"
        assert other.seal().refused.reason == "pool-not-yours"
        if is_reset:
            assert other.ask(pool_reset=pb.PoolReset()).HasField("pool_was_reset")
        go_on.set()
    (answer,) = answers
    if is_reset:
        assert answer.refused.reason == "pool-not-yours"
        assert stages(other) == [pb.POOL_STAGE_EMPTY]
        assert open_pools() == before
        assert other.allocate().HasField("pool_allocated")
    else:
        assert answer.WhichOneof("kind") in {"pool_allocated", "pool_sealed"}
    for descriptor in {*filler.descriptors, *other.descriptors}:
        os.close(descriptor)


def test_two_ranks_fill_and_restore_their_own(connect):
    first, second = connect(), connect()
    for rank, client in enumerate((first, second)):
        assert client.allocate(rank=rank, world_size=2).HasField("pool_allocated")
        os.pwrite(client.descriptors[0], b"rank%d" % rank, mmap.PAGESIZE)
        os.pwrite(client.descriptors[1], METADATA, 0)
    assert first.seal(rank=0, world_size=2).HasField("pool_sealed")
    assert stages(first, 2) == [pb.POOL_STAGE_SEALED, pb.POOL_STAGE_FILLING]
    assert second.seal(rank=1, world_size=2).HasField("pool_sealed")
    for rank in range(2):
        later = connect()
        assert [state.stage for state in later.restore(rank=rank, world_size=2)] == [pb.POOL_STAGE_SEALED] * 2
        assert os.pread(later.descriptors[0], 5, mmap.PAGESIZE) == b"rank%d" % rank
    assert first.ask(pool_reset=pb.PoolReset()).HasField("pool_was_reset")
    assert stages(second, 2) == [pb.POOL_STAGE_EMPTY] * 2


def test_a_pool_of_another_split_must_go_first(connect):
    client = connect()
    client.allocate()
    assert client.allocate(rank=1, world_size=2).refused.reason == "pool-of-other-split"


def test_descriptors_that_a_client_sends_do_not_stay_in_the_owner(connect):
    before = len(list(Path("/proc/self/fd").iterdir()))
    client = connect()
    ours, theirs = socket.socketpair()
    for _ in range(20):
        request = pb.OwnerRequest(pool_restore=pb.PoolRestore(world_size=1)).SerializeToString()
        client.channel.send(request, [ours.fileno()], timeout=WAIT_S)
        client.channel.receive(timeout=WAIT_S)
    ours.close()
    theirs.close()
    assert (
        len(list(Path("/proc/self/fd").iterdir())) < before + 10
    )  # each of 20 would stay; the owner opens a few meanwhile


@given(st.binary(max_size=200))
@settings(max_examples=200)
def test_no_request_breaks_the_pools(data):
    """Whatever parses is answered or refused; what was refused leaves nothing."""
    pools = PrefixPools(1 << 20)
    request = pb.OwnerRequest()
    with contextlib.suppress(Exception):
        request.ParseFromString(data)
    for ask in (
        lambda: asyncio.run(pools.allocate(request.pool_allocate, pools)),
        lambda: asyncio.run(pools.seal(request.pool_seal, pools)),
        lambda: pools.restore(request.pool_restore),
    ):
        with contextlib.suppress(PoolRefusedError):
            ask()
    pools.reset()


def test_the_header_of_the_pool_is_kvxfers():
    """What the owner measures a pool by is what the runtime lays it out by."""
    header = Header("m", "r", "l", 16, mmap.PAGESIZE, BLOCKS, 0, 16 * BLOCKS)
    assert header.buffer_bytes == SIZE
    assert seals.READ_ONLY_FOR_OTHERS == (
        seals.F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    )
