"""What moving, sealing and keeping KV blocks costs, against what the machine can do, in one run.

    python tests/bench/bench_cache.py [--mib 64] [--repeats 11]

Every figure is a median, and stands beside a plain copy and a raw AES-256-GCM of the same size in the same round: on a
shared machine only the ratios mean something, whose least and most are printed as well. Processes are real: the other
end of each transfer is another one.
"""

import argparse
import mmap
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvxfer import seals
from kvxfer.channel import Channel
from kvxfer.header import Header
from kvxfer.pool import BufferPool
from kvxfer.transfer import Consumer, Producer
from tie.app.entries import StoredEntry, sealing
from tie.daemon import config as node_config
from tie.store.client import StoreClient, random_index
from tie.warden.entry import Kind
from tie.warden.keys import ConversationKey, Root
from tie.warden.manifest import CacheFormat, Manifest

BLOCK = 368_640  # SmolLM2-135M in bfloat16: 16 tokens, 30 layers, 3 heads of 64
TOKENS = 16
GB = 1e9
SETTLE_S = 0.4

TAKE = """
import mmap, sys, time
from kvxfer.channel import Channel
from kvxfer.transfer import Consumer
channel = Channel.adopt(int(sys.argv[1]))
arena = mmap.mmap(-1, int(sys.argv[2]), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
arena.madvise(mmap.MADV_HUGEPAGE)  # as the executor has it
pages = memoryview(arena)
while True:
    with Consumer(channel, max_bytes=1 << 34, timeout=60) as consumer:
        size, ready = consumer.header.block_bytes, 0
        while ready < consumer.header.block_count:
            committed = consumer.wait(ready + 1, timeout=60)
            consumer.populate(ready, committed - ready)
            for index in range(ready, committed):
                with consumer.block(index) as view:
                    pages[index * size : (index + 1) * size] = view
            ready = committed
        consumer.finish(timeout=60)
        channel.send(b"taken", timeout=60)
"""
GIVE = """
import os, sys, time
from kvxfer.channel import Channel
from kvxfer.header import Header
from kvxfer.pool import BufferPool
from kvxfer.transfer import Producer
channel, count, size = Channel.adopt(int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
header = Header("bench", "1", "bench", block_tokens=16, block_bytes=size, block_count=count, first_token=0,
                token_count=16 * count)
pool = BufferPool(header.buffer_bytes, spare=1)
source = memoryview(bytearray(count * size))
while True:
    pool.refill()
    while not pool.ready:
        time.sleep(0.001)
    channel.send(b"ready", timeout=60)
    channel.receive(timeout=600)
    buffer = pool.take(header.buffer_bytes)
    with Producer(channel, buffer, header, passing=True, timeout=60) as producer:
        for batch in producer.batches():
            for index in batch:
                with producer.block(index) as view:
                    view[:] = source[index * size : (index + 1) * size]
        producer.finish(timeout=60)
    channel.receive(timeout=60)
    os.close(buffer)
"""


def median(repeats: int, work: Callable[[], float | None]) -> float:
    """Seconds; `work` may measure itself."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        measured = work()
        times.append(time.perf_counter() - began if measured is None else measured)
    return statistics.median(times)


def peer(code: str, *arguments: object) -> tuple[Channel, "subprocess.Popen[bytes]"]:
    ours, theirs = Channel.pair()
    command = [sys.executable, "-c", code, str(theirs.fileno()), *map(str, arguments)]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()
    return ours, process


def ready(pool: BufferPool, wait: bool) -> None:
    """Has the pool refilled, as it is between transfers."""
    pool.refill()
    while wait and not pool.ready:
        time.sleep(0.001)


@dataclass(frozen=True)
class Times:
    """What a round of something took, in seconds, and what a plain copy and the raw cipher took in the same round."""

    taken: float
    copy: float
    aes: float


def show(what: str, rounds: list[Times], size: int, *names: str) -> None:
    """Medians; of the ratios the least and the most as well."""
    seconds = statistics.median(each.taken for each in rounds)
    text = f"{what:42} {seconds * 1e3:8.2f} ms {size / seconds / GB:6.2f} GB/s"
    for name in names:
        ratios = [getattr(each, name) / each.taken for each in rounds]
        text += f"  {statistics.median(ratios):5.2f} ({min(ratios):.2f}-{max(ratios):.2f}) x {name}"
    print(text)


class Bench:
    """The pieces, all of one size."""

    def __init__(self, mib: int, repeats: int, store: StoreClient) -> None:
        self.count = max(1, (mib << 20) // BLOCK)
        self.size = self.count * BLOCK
        self.repeats = repeats
        self.store = store
        self.source = mmap.mmap(-1, self.size)
        self.source[:] = secrets.token_bytes(1 << 20) * (self.size >> 20) + bytes(self.size % (1 << 20))
        self.header = Header(
            "bench", "1", "bench", block_tokens=TOKENS, block_bytes=BLOCK, block_count=self.count, first_token=0,
            token_count=TOKENS * self.count,
        )  # fmt: skip
        self.format = CacheFormat("bench", "1", "bench", TOKENS, BLOCK)
        self.key = ConversationKey(Root.TURN, secrets.token_bytes(32))
        self.manifest = Manifest(self.format, 0, tuple(range(TOKENS * self.count)))

    def rounds(self, work: Callable[[], float]) -> list[Times]:
        """Rounds of `work`, which says how long it took, each beside a copy and the cipher; one more to warm up."""
        times = []
        for _ in range(self.repeats + 1):
            taken = work()
            time.sleep(SETTLE_S / 2)  # others have stopped making pages
            times.append(Times(taken, self.copy_fresh(), self.raw_aes()))
        return times[1:]

    def copy_fresh(self) -> float:
        began = time.perf_counter()
        descriptor = seals.create("bench", self.size)
        with mmap.mmap(descriptor, self.size) as mapping:
            mapping[:] = self.source
        os.close(descriptor)
        return time.perf_counter() - began

    def raw_aes(self) -> float:
        """Block by block, warm memory to warm memory: the cipher alone."""
        cipher, out = AESGCM(bytes(32)), bytearray(BLOCK + 16)
        with memoryview(self.source) as source:
            began = time.perf_counter()
            for index in range(self.count):
                cipher.encrypt_into(index.to_bytes(12, "big"), source[index * BLOCK : (index + 1) * BLOCK], b"", out)
            return time.perf_counter() - began

    def seal(self, index: bytes) -> float:
        time.sleep(SETTLE_S)
        began = time.perf_counter()
        with sealing(self.store, self.key, Kind.SEGMENT, self.manifest) as sealer, memoryview(self.source) as source:
            for block in range(self.count):
                sealer.seal(source[block * BLOCK : (block + 1) * BLOCK])
        self.store.put(index)
        return time.perf_counter() - began

    def open(self, index: bytes) -> float:
        out = bytearray(BLOCK)
        began = time.perf_counter()
        entry = StoredEntry.fetch(self.store, index, self.key, Kind.SEGMENT, self.format)
        assert entry is not None
        with entry:
            for block in range(self.count):
                entry.open(block, memoryview(out))
        return time.perf_counter() - began

    def hand_over(self, channel: Channel, pool: BufferPool, *, wait: bool) -> float:
        """A buffer filled here and read there, whole, until word comes that it was."""
        ready(pool, wait)
        began = time.perf_counter()
        buffer = pool.take(self.header.buffer_bytes)
        with (
            Producer(channel, buffer, self.header, passing=True, timeout=60) as producer,
            memoryview(self.source) as source,
        ):
            for batch in producer.batches():
                for index in batch:
                    with producer.block(index) as view:
                        view[:] = source[index * BLOCK : (index + 1) * BLOCK]
            producer.finish(timeout=60)
            channel.receive(timeout=60)
            taken = time.perf_counter() - began
        os.close(buffer)
        return taken

    def restore(self, channel: Channel, pool: BufferPool, index: bytes, *, wait: bool) -> float:
        """Get, open and import, until word comes that the last block lies in the other's pages. All bytes go there."""
        ready(pool, wait)
        began = time.perf_counter()
        buffer = pool.take(self.header.buffer_bytes)
        entry = StoredEntry.fetch(self.store, index, self.key, Kind.SEGMENT, self.format)
        assert entry is not None
        with entry, Producer(channel, buffer, self.header, passing=True, timeout=60) as producer:
            for batch in producer.batches():
                for block in batch:
                    with producer.block(block) as view:
                        entry.open(block, view)
            producer.finish(timeout=60)
            channel.receive(timeout=60)
            taken = time.perf_counter() - began
        os.close(buffer)
        return taken

    def export(self, channel: Channel, index: bytes) -> float:
        """The other way: the runtime copies blocks out while the app seals them into the store's memfd and files it."""
        channel.receive(timeout=600)
        time.sleep(SETTLE_S)  # the store makes its spare
        channel.send(b"go", timeout=60)
        began = time.perf_counter()
        with (
            Consumer(channel, max_bytes=1 << 34, timeout=60) as consumer,
            sealing(self.store, self.key, Kind.SEGMENT, self.manifest) as sealer,
        ):
            ready = 0
            for block in range(self.count):
                if block >= ready:
                    ready = consumer.wait(block + 1, timeout=60)
                    consumer.populate(block, ready - block)
                with consumer.block(block) as view:
                    sealer.seal(view)
            consumer.finish(timeout=60)
        self.store.put(index)
        taken = time.perf_counter() - began
        channel.send(b"taken", timeout=60)
        return taken


def latency(repeats: int) -> float:
    """One small block there, and word back."""
    header = Header(
        "bench", "1", "bench", block_tokens=1, block_bytes=4096, block_count=1, first_token=0, token_count=1
    )
    channel, process = peer(TAKE, 4096)
    pool = BufferPool(header.buffer_bytes, spare=0)

    def once() -> None:
        buffer = pool.take(header.buffer_bytes)
        with Producer(channel, buffer, header, passing=True, timeout=60) as producer:
            producer.commit(1)
            producer.finish(timeout=60)
        channel.receive(timeout=60)
        os.close(buffer)

    once()
    seconds = median(repeats * 20, once)
    process.kill()
    process.wait()
    return seconds


def store_operations(store: StoreClient, size: int, repeats: int) -> tuple[float, float, float]:
    """Seconds of the client's own seal, of `put` and of `get`, without the writing and the reading."""
    sealings, puts, gets = [], [], []
    for _ in range(repeats):
        index = random_index()
        descriptor = store.new(size)
        began = time.perf_counter()
        seals.add(descriptor, seals.CONTENT)
        sealings.append(time.perf_counter() - began)
        os.close(descriptor)
        settle(store)
        began = time.perf_counter()
        store.put(index)
        puts.append(time.perf_counter() - began)
        began = time.perf_counter()
        found = store.get(index)
        gets.append(time.perf_counter() - began)
        assert found is not None
        os.close(found[0])
        store.drop(index)
    return statistics.median(sealings), statistics.median(puts), statistics.median(gets)


def settle(store: StoreClient) -> None:
    """Until a spare is made and what was dropped is freed, and with both processes' code in the caches again.

    Writing half a gigabyte leaves the caches cold for whatever comes next, and it is not that what is measured.
    """
    time.sleep(SETTLE_S / 2)
    for _ in range(20):
        store.get(random_index())


def run(mib: int, repeats: int, store: StoreClient) -> None:
    """Everything, printed."""
    bench = Bench(mib, repeats, store)
    size, index = bench.size, random_index()
    print(f"{size / (1 << 20):.0f} MiB in {bench.count} blocks of {BLOCK} bytes; medians of {repeats}")
    show("plain copy into a fresh memfd", bench.rounds(bench.copy_fresh), size)
    show("raw AES-256-GCM, warm", bench.rounds(bench.raw_aes), size)
    show("new + seal + put, spare", bench.rounds(lambda: bench.seal(index)), size, "copy", "aes")
    show("get + open", bench.rounds(lambda: bench.open(index)), size, "copy", "aes")
    channel, process = peer(TAKE, size)
    pools = {
        label: BufferPool(bench.header.buffer_bytes, spare) for label, spare in (("fresh buffer", 0), ("pooled", 1))
    }
    for label, pool in pools.items():
        work = partial(bench.hand_over, channel, pool, wait=label == "pooled")
        show(f"kvxfer hand-over, {label}", bench.rounds(work), size, "copy")
    for label, pool in pools.items():
        work = partial(bench.restore, channel, pool, index, wait=label == "pooled")
        show(f"restore: get + open + import, {label}", bench.rounds(work), size, "copy", "aes")
        pool.close()
    process.kill()
    process.wait()
    channel, process = peer(GIVE, bench.count, BLOCK)
    exports = bench.rounds(lambda: bench.export(channel, index))
    show("export: copy out + seal + put, pooled", exports, size, "copy", "aes")
    process.kill()
    process.wait()
    print(f"kvxfer: one 4 KiB block there and word back     {latency(repeats) * 1e6:9.0f} µs")
    for label, entry in (("4 KiB", 4096), ("512 MiB", 512 << 20)):
        sealing_s, put, get = store_operations(store, entry, repeats * 3)
        print(
            f"store, {label:>8}: put {put * 1e6:7.0f} µs    get {get * 1e6:7.0f} µs    "
            f"(and, in the client, F_SEAL_WRITE {sealing_s * 1e6:7.0f} µs)"
        )
    began = time.perf_counter()
    for _ in range(2000):
        store.get(index[:31] + b"x")
    print(f"store: {2000 / (time.perf_counter() - began):.0f} misses a second, one after another")


def main() -> None:
    """Runs it against a store of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=11)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tie-bench-", dir="/tmp") as directory:
        table = node_config.StoreConfig(
            capacity_bytes=4 << 30, max_entry_bytes=1 << 30, turnover_s=0.001, connection_bytes=1 << 50,
            connection_entries=1 << 30, spare_bytes=(arguments.mib + 1) << 20,
        )  # fmt: skip
        config = node_config.NodeConfig(run_dir=directory, store=table)
        toml = Path(directory) / "node.toml"
        toml.write_bytes(node_config.dump(config))
        process = subprocess.Popen([sys.executable, "-m", "tie.store.main", "--config", str(toml)])
        try:
            while not config.sockets.store_control.exists():
                time.sleep(0.05)
            with StoreClient(config.sockets.store, timeout=60) as store:
                run(arguments.mib, arguments.repeats, store)
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
