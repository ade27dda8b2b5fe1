"""Whoever dies, the store or its clients: what is there is whole, and nothing is left of the rest."""

import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

from descriptors import open_descriptors
from kvxfer import seals
from store_entries import get, metrics, put
from tie.store.client import StoreClient, StoreError, random_index
from waiting import wait_for

KILLS = 200 if os.environ.get("TIE_SLOW") == "1" else 25


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


def write_until(client: StoreClient, killed: list[float]) -> None:
    """Writes as fast as the store lets it, refusals for being too fast aside, until the store is gone."""
    while True:
        try:
            put(client, random_index(), bytes(100_000))
        except StoreError:
            if killed:
                raise
