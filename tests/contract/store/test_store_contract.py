"""The store's socket: its daemon against its client, entry by entry."""

import fcntl
import mmap
import os
import resource
import secrets

import pytest

from kvxfer import seals
from kvxfer.errors import SealError
from store_entries import get, metrics, put, refusal
from tie.proto import store_pb2
from tie.store.client import StoreClient, StoreError, random_index
from waiting import wait_for


def test_an_entry_comes_back_through_another_connection(store):
    index, content = random_index(), secrets.token_bytes(10_000)
    with store.client() as writer:
        put(writer, index, content, ttl_s=100)
        assert get(writer, index) == content
    with store.client() as reader:
        assert get(reader, index) == content
        assert reader.renew(index)
        put(reader, index, b"newer")
        assert get(reader, index) == b"newer"
        assert reader.drop(index)
        assert not reader.drop(index)
        assert not reader.renew(index)
        assert get(reader, index) is None


def test_what_comes_back_nobody_can_change(store):
    index = random_index()
    with store.client() as client:
        descriptor = client.new(5000)
        os.pwrite(descriptor, b"first", 0)
        seals.add(descriptor, seals.CONTENT)
        client.put(index)
        reading, _ = client.get(index)
        writing = os.open(f"/proc/self/fd/{reading}", os.O_RDWR | os.O_CLOEXEC)  # as a client of the same user can
        os.close(reading)
        for each in (descriptor, writing):
            with pytest.raises(PermissionError):
                os.pwrite(each, b"later", 0)
            with pytest.raises(PermissionError):
                mmap.mmap(each, 5000)
            for size in (0, 4999, 5001):
                with pytest.raises(PermissionError):
                    os.ftruncate(each, size)
            os.close(each)
        assert get(client, index)[:5] == b"first"


def test_what_comes_back_is_open_for_reading_only(store):
    """Kernels before 6.7 map a write-sealed memfd through no other descriptor."""
    index = random_index()
    with store.client() as client:
        put(client, index, b"kept")
        descriptor, _ = client.get(index)
        assert fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        os.close(descriptor)


def test_an_entry_for_which_no_descriptor_is_left_is_refused_and_given_back(store):
    index = random_index()
    with store.client() as client:
        descriptor = client.new(5000)
        seals.add(descriptor, seals.CONTENT)
        os.close(descriptor)
        pid = store.process.pid
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        before = store.descriptors()
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, limits[1]))
        assert refusal(client.put, index) == store_pb2.OUTCOME_FULL
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        assert store.descriptors() == before - 1
        assert metrics(store)["tie_store_reserved_bytes"] == 0
        assert get(client, index) is None
        put(client, index, b"kept")
        assert get(client, index) == b"kept"


def test_what_can_still_be_written_is_not_filed(store):
    index = random_index()
    with store.client() as client:
        descriptor = client.new(5000)
        with mmap.mmap(descriptor, 5000):
            with pytest.raises(SealError):
                seals.add(descriptor, seals.CONTENT)
            assert refusal(client.put, index) == store_pb2.OUTCOME_BUSY
        seals.add(descriptor, seals.F_SEAL_FUTURE_WRITE)  # a mapping that is older than this seal can write
        assert refusal(client.put, index) == store_pb2.OUTCOME_BUSY
        assert get(client, index) is None
        seals.add(descriptor, seals.CONTENT)
        client.put(index)
        assert get(client, index) == bytes(5000)
        os.close(descriptor)


def test_a_client_cannot_resize_or_keep_what_it_writes(store):
    with store.client() as client:
        descriptor = client.new(5000)
        for size in (0, 10000):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, size)
        seals.add(descriptor, seals.FIXED)  # no seal can be added any more: not the one that the store needs, either
        assert refusal(client.put, random_index()) == store_pb2.OUTCOME_BUSY
        os.close(descriptor)


def test_missing_expired_and_dropped_look_alike(store):
    with store.client() as client:
        expired, dropped = random_index(), random_index()
        put(client, expired, b"x", ttl_s=0.001)
        put(client, dropped, b"x")
        client.drop(dropped)
        wait_for(lambda: client.get(expired) is None)
        channel = client._channel
        replies = set()
        for index in (expired, dropped, random_index()):
            channel.send(store_pb2.StoreRequest(get=store_pb2.Get(index=index)).SerializeToString(), timeout=10)
            replies.add((channel.receive(timeout=10)[0], 0))
        assert len(replies) == 1


def test_entries_age_out(make_store):
    store = make_store(ttl_s=0.05)
    with store.client() as client:
        put(client, random_index(), b"x")
        wait_for(lambda: metrics(store)["tie_store_entries"] == 0)
        assert metrics(store)['tie_store_entries_ended_total{how="expired"}'] == 1


def test_sizes_out_of_range_are_refused(store):
    with store.client() as client:
        for size in (0, (16 << 20) + 1, 1 << 40, (1 << 64) - 1):
            assert refusal(client.new, size) in {store_pb2.OUTCOME_TOO_LARGE, store_pb2.OUTCOME_FULL}
        put(client, random_index(), bytes(16 << 20))


def test_the_oldest_goes_first_and_no_flood_pushes_everyone_out(make_store):
    store = make_store(capacity_bytes=32 << 20, max_entry_bytes=4 << 20, turnover_s=3600)
    mine = [random_index() for _ in range(32)]
    with store.client() as client:
        for index in mine:
            put(client, index, bytes(1 << 20))
    for flood in range(4):
        with store.client() as flooder:
            for number in range(16):
                if flood == 0 and number < 4:
                    put(flooder, random_index(), bytes(1 << 20))
                else:
                    assert refusal(flooder.new, 1 << 20) == store_pb2.OUTCOME_FULL
    with store.client() as client:
        assert [get(client, index) is not None for index in mine] == [False] * 4 + [True] * 28


def test_a_connection_has_its_share_and_no_more(make_store):
    store = make_store(connection_entries=3, connection_bytes=10_000)
    with store.client() as client:
        for _ in range(2):
            put(client, random_index(), bytes(4000))
        assert refusal(client.new, 4000) == store_pb2.OUTCOME_FULL
        put(client, random_index(), bytes(100))
        assert refusal(client.new, 1) == store_pb2.OUTCOME_FULL
    with store.client() as client:
        put(client, random_index(), bytes(4000))


def test_no_entry_makes_room_for_a_transient_one(make_store):
    store = make_store(capacity_bytes=64 << 10, max_entry_bytes=16 << 10, max_entries=4)
    kept = [random_index() for _ in range(4)]
    with store.client() as client:
        for index in kept:
            put(client, index, b"x")
        with pytest.raises(StoreError) as refused:
            client.new(100, transient=True)
        assert refused.value.outcome == store_pb2.OUTCOME_FULL
        assert all(get(client, index) == b"x" for index in kept)
        put(client, random_index(), b"one that lasts")
        assert [get(client, index) for index in kept] == [None, b"x", b"x", b"x"]


def test_what_a_large_entry_took_is_given_back(store):
    """Its memfd is closed on a thread."""
    with store.client() as client:
        assert client.get(random_index()) is None
        before = store.descriptors()
        index = random_index()
        put(client, index, bytes(4 << 20))
        assert store.descriptors() == before + 1
        put(client, index, bytes(3 << 20))
        wait_for(lambda: store.descriptors() == before + 1)
        client.drop(index)
        descriptor = client.new(4 << 20)
        os.close(descriptor)
    wait_for(lambda: store.descriptors() == before - 1)


def test_a_large_entry_may_lie_in_memory_that_was_made_ahead_of_need(make_store):
    store = make_store(spare_bytes=4 << 20)
    with store.client() as client:
        assert client.get(random_index()) is None
        before = store.descriptors()
        for size in (4 << 20, 3 << 20, (4 << 20) + 1, 4096):
            index, content = random_index(), secrets.token_bytes(size)
            descriptor = client.new(size)
            assert os.fstat(descriptor).st_blocks * 512 >= size  # all its pages are there
            assert os.pread(descriptor, size, 0) == bytes(size)
            os.pwrite(descriptor, content, 0)
            seals.add(descriptor, seals.CONTENT)
            client.put(index)
            os.close(descriptor)
            assert get(client, index) == content
            client.drop(index)
        wait_for(lambda: store.descriptors() <= before + 1)


def test_nobody_listens_is_an_error(tmp_path):
    with pytest.raises(StoreError):
        StoreClient(tmp_path / "nobody.sock", timeout=1)
