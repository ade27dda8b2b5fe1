"""Transfers between real processes, and processes that are killed in the middle of one."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from descriptors import open_descriptors
from kvxfer import seals
from kvxfer.buffer import ConsumerBuffer
from kvxfer.channel import Channel
from kvxfer.errors import KvxferError, PeerDiedError
from kvxfer.header import Header
from kvxfer.transfer import Consumer, Producer

HEADER = Header(
    "model", "release", "layout", block_tokens=16, block_bytes=1 << 16, block_count=32, first_token=0, token_count=512
)
MOST = 1 << 24
# How many kills: enough to hit every phase, few enough for a small machine; all of them with TIE_SLOW=1.
KILLS = 200 if os.environ.get("TIE_SLOW") == "1" else 40
NOTICE_S = 0.1

PRODUCE = """
import os, sys
from kvxfer import seals
from kvxfer.channel import Channel
from kvxfer.header import Header
from kvxfer.transfer import Producer
header = Header("model", "release", "layout", block_tokens=16, block_bytes=1 << 16, block_count=32, first_token=0,
                token_count=512)
channel = Channel.adopt(int(sys.argv[1]))
while True:
    descriptor = seals.create("child", header.buffer_bytes)
    with Producer(channel, descriptor, header, passing=True, timeout=10) as producer:
        for index in range(header.block_count):
            with producer.block(index) as view:
                view[:] = bytes([index + 1]) * header.block_bytes
            producer.commit(index + 1)
        producer.finish(timeout=10)
    os.close(descriptor)
    if channel.receive(timeout=10)[0] != b"again":
        break
"""
CONSUME = """
import sys
from kvxfer.channel import Channel
from kvxfer.transfer import Consumer
channel = Channel.adopt(int(sys.argv[1]))
while True:
    with Consumer(channel, max_bytes=1 << 24, timeout=10) as consumer:
        for index in range(consumer.header.block_count):
            consumer.wait(index + 1, timeout=10)
            with consumer.block(index) as view:
                assert bytes(view[:1]) == bytes([index + 1])
        consumer.finish(timeout=10)
    channel.send(b"got it", timeout=10)
"""


def shared_kib() -> int:
    """Shared memory that this process maps, in KiB."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssShmem")]
    return int(line.split()[1])


def start(code: str) -> tuple[Channel, "subprocess.Popen[bytes]"]:
    ours, theirs = Channel.pair()
    process = subprocess.Popen([sys.executable, "-c", code, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    theirs.close()
    return ours, process


def receive_all(channel: Channel) -> None:
    with Consumer(channel, max_bytes=MOST, timeout=10) as consumer:
        for index in range(consumer.header.block_count):
            consumer.wait(index + 1, timeout=10)
            with consumer.block(index) as view:
                # Whole, or never seen: the first and the last byte of each block are there.
                assert view[0] == view[-1] == index + 1
        consumer.finish(timeout=10)


def test_another_process_reads_what_this_one_writes_and_the_other_way_round():
    channel, process = start(PRODUCE)
    with channel:
        receive_all(channel)
        channel.send(b"enough", timeout=10)
        assert process.wait(10) == 0
    channel, process = start(CONSUME)
    with channel:
        send_all(channel)
        assert channel.receive(timeout=10)[0] == b"got it"
    process.kill()
    process.wait(10)


COUNT = """
import sys
from kvxfer.buffer import ProducerBuffer
from kvxfer.header import Header
header = Header("model", "release", "layout", block_tokens=1, block_bytes=1, block_count=200_000, first_token=0,
                token_count=200_000)
with ProducerBuffer(int(sys.argv[1]), header) as buffer:
    print("up", flush=True)
    for count in range(1, header.block_count + 1):
        buffer.commit(count)
"""


def test_the_counter_of_another_process_never_goes_backwards():
    """Whoever polls it sees it whole, neither cleared nor half written. The buffer is sparse: no block is touched."""
    header = Header(
        "model", "release", "layout", block_tokens=1, block_bytes=1, block_count=200_000, first_token=0,
        token_count=200_000,
    )  # fmt: skip
    descriptor = seals.create("counter", header.buffer_bytes)
    command = [sys.executable, "-c", COUNT, str(descriptor)]
    with subprocess.Popen(command, pass_fds=[descriptor], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"up\n"
        with ConsumerBuffer(descriptor, max_bytes=1 << 40) as buffer:
            deadline = time.monotonic() + 60
            while (count := buffer.committed) < header.block_count:  # raises where it goes backwards
                assert process.poll() is None or buffer.committed == header.block_count
                assert time.monotonic() < deadline, count
    os.close(descriptor)


def send_all(channel: Channel) -> None:
    descriptor = seals.create("test", HEADER.buffer_bytes)
    try:
        with Producer(channel, descriptor, HEADER, passing=True, timeout=10) as producer:
            for index in range(HEADER.block_count):
                with producer.block(index) as view:
                    view[:] = bytes([index + 1]) * HEADER.block_bytes
                producer.commit(index + 1)
            producer.finish(timeout=10)
    finally:
        os.close(descriptor)


def exchange_for_ever(channel: Channel, role: str) -> None:
    while True:
        if role == "producer":
            channel.send(b"again", timeout=10)
            receive_all(channel)
        else:
            assert channel.receive(timeout=10)[0] == b"got it"
            send_all(channel)


class Killer:
    """Kills a process after a while, and says when it did."""

    def __init__(self, process: "subprocess.Popen[bytes]", after: float) -> None:
        self.at = float("inf")
        self._process = process
        self._timer = threading.Timer(after, self._kill)
        self._timer.start()

    def _kill(self) -> None:
        self.at = time.monotonic()
        self._process.send_signal(signal.SIGKILL)

    def join(self) -> float:
        noticed = time.monotonic()
        self._timer.join(10)
        self._process.wait(10)
        return noticed - self.at


@pytest.mark.chaos
@pytest.mark.parametrize("role", ["producer", "consumer"])
def test_a_killed_peer_is_noticed_at_once_and_leaves_nothing(role):
    """SIGKILL at random moments of an endless exchange: an error within 100 ms, no partial buffer, nothing leaked."""
    chance = random.Random(5)  # noqa: S311 (when to kill)
    exchange_once = receive_all if role == "producer" else send_all
    before, shared = open_descriptors(), shared_kib()
    late = []
    for _ in range(KILLS):
        channel, process = start(PRODUCE if role == "producer" else CONSUME)
        with channel:
            # The first exchange shows that the process is up.
            exchange_once(channel)
            killer = Killer(process, chance.uniform(0, 0.03))
            with pytest.raises(PeerDiedError):
                exchange_for_ever(channel, role)
            late.append(killer.join())
    assert open_descriptors() == before
    assert shared_kib() <= shared + 1024
    # On a loaded machine a process may not be scheduled for longer than the notice takes.
    late.sort()
    assert late[len(late) * 9 // 10] < NOTICE_S, late
    assert late[-1] < 2, late


def test_a_peer_that_stops_is_waited_for_and_then_given_up():
    channel, process = start(PRODUCE)
    with channel:
        receive_all(channel)
        process.send_signal(signal.SIGSTOP)
        channel.send(b"again", timeout=10)
        began = time.monotonic()
        with pytest.raises(KvxferError):
            Consumer(channel, max_bytes=MOST, timeout=0.2)
        assert time.monotonic() - began < 5
    process.kill()
    process.wait(10)
