"""The store's socket: its daemon against its client, and against clients that are none."""

import mmap
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvxfer import seals
from kvxfer.channel import Channel
from kvxfer.errors import SealError
from tie.proto import metrics_pb2, metrics_pb2_grpc, store_pb2
from tie.store.client import StoreClient, StoreError, random_index

KILLS = 200 if os.environ.get("TIE_SLOW") == "1" else 25


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def put(client: StoreClient, index: bytes, content: bytes, ttl_s: float = 0) -> None:
    descriptor = client.new(len(content))
    try:
        with mmap.mmap(descriptor, len(content)) as mapping:
            mapping[:] = content
        seals.add(descriptor, seals.CONTENT)
        client.put(index, ttl_s=ttl_s)
    finally:
        os.close(descriptor)


def get(client: StoreClient, index: bytes) -> bytes | None:
    found = client.get(index)
    if found is None:
        return None
    descriptor, size = found
    try:
        return os.pread(descriptor, size, 0)
    finally:
        os.close(descriptor)


def refusal(call, *arguments) -> "store_pb2.Outcome.ValueType":
    with pytest.raises(StoreError) as caught:
        call(*arguments)
    return caught.value.outcome


def metrics(store) -> dict[str, float]:
    with grpc.insecure_channel(f"unix:{store.config.sockets.store_control}") as channel:
        text = metrics_pb2_grpc.MetricsStub(channel).Scrape(metrics_pb2.ScrapeRequest(), timeout=10).text
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line[0] != "#"}


def wait_for(condition, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


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
        for each in (descriptor, client.get(index)[0]):
            with pytest.raises(PermissionError):
                os.pwrite(each, b"later", 0)
            with pytest.raises(PermissionError):
                mmap.mmap(each, 5000)
            for size in (0, 4999, 5001):
                with pytest.raises(PermissionError):
                    os.ftruncate(each, size)
            os.close(each)
        assert get(client, index)[:5] == b"first"


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
        time.sleep(0.01)
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


def test_the_store_outlives_its_clients_and_its_entries_do_not_outlive_it(store):
    index = random_index()
    with store.client() as client:
        put(client, index, b"x")
        found = client.get(index)
        store.kill()
        began = time.monotonic()
        with pytest.raises(StoreError):
            client.get(index)
        assert time.monotonic() - began < 1
    assert os.pread(found[0], 1, 0) == b"x"  # the kernel keeps what a client holds
    os.close(found[0])
    store.start()
    with store.client() as client:
        assert get(client, index) is None


def test_a_transient_entry_ends_with_the_connection_that_filed_it(store):
    index, replaced = random_index(), random_index()
    with store.client() as reader:
        with store.client() as writer:
            for each in (index, replaced):
                descriptor = writer.new(5000, transient=True)
                seals.add(descriptor, seals.CONTENT)
                writer.put(each)
                os.close(descriptor)
            assert get(reader, index) == bytes(5000)
            assert reader.renew(index)
            assert writer.renew(index)
            put(reader, replaced, b"somebody else's by now")
        wait_for(lambda: get(reader, index) is None)
        assert get(reader, replaced) == b"somebody else's by now"


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


WRITER = """
import mmap, os, sys
from pathlib import Path
from kvxfer import seals
from tie.store.client import StoreClient, random_index
client = StoreClient(Path(sys.argv[1]), timeout=10)
index = bytes.fromhex(sys.argv[2])
size = 200_000
number = 0
print("up", flush=True)
while True:
    number = number % 250 + 1
    descriptor = client.new(size)
    with mmap.mmap(descriptor, size) as mapping:
        for start in range(0, size, 1000):
            mapping[start:start + 1000] = bytes([number]) * 1000
    seals.add(descriptor, seals.CONTENT)
    client.put(index)
    os.close(descriptor)
"""


@pytest.mark.chaos
def test_clients_killed_in_the_middle_leave_nothing_partial(make_store):
    """SIGKILL at random moments of writing: what is there is whole, what was being written is gone, nothing leaks."""
    store = make_store(connection_entries=1 << 30, connection_bytes=1 << 40)
    chance = random.Random(7)  # noqa: S311 (when to kill)
    index = random_index()
    with store.client() as client:
        put(client, index, bytes(1))
        wait_for(lambda: metrics(store)["tie_store_connections"] == 1)
        before = store.descriptors()
        seen = set()
        for _ in range(KILLS):
            command = [sys.executable, "-c", WRITER, str(store.path), index.hex()]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
                assert process.stdout.readline() == b"up\n"
                time.sleep(chance.uniform(0, 0.03))
                process.send_signal(signal.SIGKILL)
            content = get(client, index)
            assert len(set(content)) == 1, "one entry, not parts of two"
            seen.add(content[0])
        assert len(seen) > 1
        wait_for(lambda: metrics(store)["tie_store_connections"] == 1)
        assert metrics(store)["tie_store_reserved_bytes"] == 0
        wait_for(lambda: store.descriptors() <= before + 2)  # the metrics' own connection comes and goes


@pytest.mark.chaos
def test_a_killed_store_is_noticed_at_once(store):
    chance = random.Random(11)  # noqa: S311 (when to kill)
    before = open_descriptors()
    late = []
    for _ in range(max(3, KILLS // 8)):
        with store.client() as client:
            at = []

            def kill(at=at):
                at.append(time.monotonic())
                store.process.send_signal(signal.SIGKILL)

            timer = threading.Timer(chance.uniform(0, 0.05), kill)
            timer.start()
            with pytest.raises(StoreError):
                write_until(client, at)
            late.append(time.monotonic() - at[0])
            timer.join()
        store.process.wait(10)
        store.start()
    assert open_descriptors() == before
    # Far below the client's own deadline, which is what would end the wait if the death went unnoticed.
    assert sorted(late)[len(late) // 2] < 1, late


def send_for_ever(connection: socket.socket, message: bytes) -> None:
    while True:
        connection.send(message, socket.MSG_NOSIGNAL)


def write_until(client: StoreClient, killed: list[float]) -> None:
    """Writes as fast as the store lets it, refusals for being too fast aside, until the store is gone."""
    while True:
        try:
            put(client, random_index(), bytes(100_000))
        except StoreError:
            if killed:
                raise


# --- clients that are none ---


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(min_size=1, max_size=2000), min_size=1, max_size=4))
def test_noise_costs_its_sender_the_connection_and_nobody_else_anything(store, messages):
    with Channel.connect(store.path, timeout=10) as channel:
        for message in messages:
            try:
                channel.send(message, timeout=10)
            except Exception:  # noqa: BLE001 (the store has hung up already)
                break
    with store.client() as client:
        assert client.get(random_index()) is None


@pytest.mark.parametrize(
    "request_",
    [
        store_pb2.StoreRequest(),
        store_pb2.StoreRequest(get=store_pb2.Get(index=b"short")),
        store_pb2.StoreRequest(put=store_pb2.Put(index=b"i" * 32)),  # nothing is being written
        store_pb2.StoreRequest(put=store_pb2.Put(index=b"i" * 33)),
        store_pb2.StoreRequest(drop=store_pb2.Drop()),
        store_pb2.StoreRequest(renew=store_pb2.Renew(index=b"i" * 2000)),
    ],
)
def test_requests_that_cannot_be_end_the_connection(store, request_):
    with Channel.connect(store.path, timeout=10) as channel:
        channel.send(request_.SerializeToString() or b"\0", timeout=10)
        reply = store_pb2.StoreReply.FromString(channel.receive(timeout=10)[0])
        assert reply.outcome == store_pb2.OUTCOME_INVALID
        with pytest.raises(Exception, match="closed"):
            channel.receive(timeout=10)


def test_descriptors_that_a_client_sends_are_closed(store):
    with store.client() as client:
        assert client.get(random_index()) is None  # it has been accepted
        before = store.descriptors()
        request = store_pb2.StoreRequest(get=store_pb2.Get(index=random_index())).SerializeToString()
        for _ in range(20):
            client._channel.send(request, [client._channel.fileno()] * 8, timeout=10)
            client._channel.receive(timeout=10)
        assert store.descriptors() == before


def test_a_client_that_does_not_read_is_let_go_of(store):
    request = store_pb2.StoreRequest(get=store_pb2.Get(index=random_index())).SerializeToString()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as deaf:
        deaf.connect(str(store.path))
        deaf.settimeout(10)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            send_for_ever(deaf, request)
    with store.client() as client:
        assert client.get(random_index()) is None


def test_a_client_that_writes_for_too_long_loses_its_place(make_store):
    store = make_store(write_deadline_s=0.1)
    with store.client() as client:
        descriptor = client.new(5000)
        wait_for(lambda: metrics(store)["tie_store_reserved_bytes"] == 0)
        with pytest.raises(StoreError):
            client.put(random_index())
        os.close(descriptor)


def test_too_many_clients_are_refused_and_the_rest_served(make_store):
    store = make_store(max_connections=2)
    wait_for(lambda: metrics(store)["tie_store_connections"] == 0)
    with store.client() as one, store.client() as other:
        assert one.get(random_index()) is None
        assert other.get(random_index()) is None
        with store.client() as third, pytest.raises(StoreError):
            third.get(random_index())
        assert one.get(random_index()) is None


def test_a_hostile_store_cannot_hurt_its_client(tmp_path):
    """What it sends is checked before it is used, and what is refused is closed."""
    before = open_descriptors()
    ours, theirs = Channel.pair()
    client = StoreClient.__new__(StoreClient)
    client._channel, client._timeout = ours, 1
    unsealed, sealed = seals.create("unsealed", 100), seals.create("sealed", 100)
    seals.add(sealed, seals.IMMUTABLE)
    done = store_pb2.StoreReply(outcome=store_pb2.OUTCOME_DONE, size=100)
    for message, descriptors in (
        (done, []),
        (done, [unsealed]),
        (done, [sealed, sealed]),
        (store_pb2.StoreReply(outcome=store_pb2.OUTCOME_DONE, size=99), [sealed]),
        (store_pb2.StoreReply(outcome=store_pb2.OUTCOME_MISS), [sealed]),
        (store_pb2.StoreReply(outcome=77), []),
        (b"\xff" * 40, [sealed]),
    ):
        raw = message if isinstance(message, bytes) else message.SerializeToString()
        theirs.send(raw, descriptors, timeout=1)
        with pytest.raises(StoreError):
            client.get(b"i" * 32)
    for descriptor in (unsealed, sealed):
        os.close(descriptor)
    ours.close()
    theirs.close()
    assert open_descriptors() == before
