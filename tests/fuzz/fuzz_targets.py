"""What a fuzzer throws bytes at: everything that reads what another process wrote, or another machine.

Here are those on the way of a KV cache; the others have modules of their own.

Each target takes any bytes, and raises only when the code under it does what it must not. Expected errors are the
answer to nearly all inputs; what is let through is checked for being what it claims to be.
"""

import asyncio
import contextlib
import itertools
import os
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from fuzz_entry import entry
from fuzz_envelope import envelope
from fuzz_frames import frames_
from fuzz_http import http
from fuzz_images import image
from fuzz_proxy import proxy
from fuzz_requests import proto, request, template

from kvxfer import doorbell, seals
from kvxfer.buffer import ConsumerBuffer
from kvxfer.channel import Channel
from kvxfer.errors import KvxferError
from kvxfer.header import COMMITTED_OFFSET, HEADER_BYTES, Header
from kvxfer.pool import BufferPool
from tie.proto import store_pb2
from tie.runtime import kv_blocks
from tie.store.client import StoreClient, StoreError
from tie.store.entries import Entries, Limits
from tie.store.memory import NAME
from tie.store.server import ConnectionLimits, _Client

CORPUS = Path(__file__).with_name("corpus")
PAGE = 4096


def reseeded(page: bytearray) -> bytes:
    """The page with the CRC that a liar would compute."""
    page[432:436] = zlib.crc32(bytes(page[:432])).to_bytes(4, "little")
    return bytes(page)


# --- kvxfer: the header page, and the messages of a channel ---


def header(data: bytes) -> None:
    """A header page: as it came (first byte even), or with its CRC put right (odd). Then the rest as messages."""
    if not data:
        return
    page = bytearray(data[1:].ljust(HEADER_BYTES, b"\0")[:HEADER_BYTES])
    with contextlib.suppress(KvxferError):
        read = Header.unpack(reseeded(page) if data[0] & 1 else bytes(page))
        written = read.pack()
        assert written[:COMMITTED_OFFSET] == (reseeded(page) if data[0] & 1 else bytes(page))[:COMMITTED_OFFSET]
        assert 0 <= read.buffer_bytes - read.offset(read.block_count) < 1 << 21
        assert read.buffer_bytes <= 1 << 40
        assert read.token_count <= read.block_count * read.block_tokens
    with contextlib.suppress(KvxferError):
        kind, count = doorbell.parse(data[1:9])
        assert kind in doorbell.Kind
        assert 0 <= count <= 1 << 20


# --- a whole buffer and its channel, as the runtime takes an import ---

EXPECTED = kv_blocks.Format("model", "release", "layout", 16, 64)
_GOOD = EXPECTED.header(0, 3)
_MESSAGE = struct.Struct("<BBHI")


def import_(data: bytes) -> None:
    """An import: which header, which seals, which committed count, and what is said on the channel.

    Byte 0: bits 0-1 of the seals, 2 whether the size is right, 3-5 how many bytes of the header are patched at
    offsets of the input's choosing. Then a commit counter, patches of three bytes each, and messages of three bytes.
    """
    if len(data) < 3:
        return
    flags, committed, messages = data[0], data[1], data[2] & 15
    page = bytearray(_GOOD.pack())
    at = 3
    for _ in range(flags >> 3 & 7):
        patch = data[at : at + 3]
        at += 3
        if len(patch) == 3:
            page[int.from_bytes(patch[:2], "little") % 436] = patch[2]
    page = bytearray(reseeded(page))
    page[COMMITTED_OFFSET] = committed
    size = _GOOD.buffer_bytes - (PAGE if flags & 4 else 0)
    descriptor = seals.create("fuzz", size)
    ours, theirs = Channel.pair()
    try:
        os.pwrite(descriptor, page, 0)
        seals.add(descriptor, (seals.READ_ONLY_FOR_OTHERS, seals.IMMUTABLE, seals.SIZE, seals.FIXED)[flags & 3])
        for _ in range(messages):
            message = data[at : at + 3]
            at += 3
            if len(message) < 3:
                break
            said = _MESSAGE.pack(message[0] & 7, message[0] >> 7, message[1], message[2])
            theirs.send(said[: 8 - (message[0] >> 3 & 1)], [1] if message[0] & 64 else [], timeout=0)
        theirs.close()
        _received(ours, descriptor)
    finally:
        theirs.close()
        ours.close()
        os.close(descriptor)


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (a million times)


def _received(channel: Channel, descriptor: int) -> None:
    before = _descriptors()
    with contextlib.suppress(KvxferError):
        consumer = kv_blocks.receive(
            channel, descriptor, _GOOD.buffer_bytes, EXPECTED, prompt_tokens=49, deadline=time.monotonic() + 5
        )
        if consumer is not None:
            assert consumer.header == EXPECTED.header(0, consumer.header.block_count)
            for index in range(consumer.header.block_count):
                with consumer.block(index) as view:
                    assert len(view) == EXPECTED.block_bytes
                    assert view.readonly
            consumer.close()
    with contextlib.suppress(KvxferError), ConsumerBuffer(descriptor, max_bytes=1 << 20) as buffer:
        for index in range(buffer.committed):
            with buffer.block(index) as view:
                assert len(view) == buffer.header.block_bytes
    assert _descriptors() == before, "a descriptor leaked"


# --- the store: what clients say to it, and what it says to clients ---

INDICES = [bytes([number]) * 32 for number in range(4)]
_LOOP = asyncio.new_event_loop()


class _Reaper:
    """Closes at once."""

    def close(self, descriptor: int, size: int) -> None:
        del size
        os.close(descriptor)


class _Connection:
    """Where a reply would go."""


def store(data: bytes) -> None:
    """A conversation with the store: pieces of bytes, each of which is a message, for one client after another.

    A piece begins with its length; 0 means that the client leaves and another comes; 255 that the client does what it
    should with the memfd it was given last.
    """
    clock = itertools.count()
    limits = Limits(capacity=1 << 16, max_entry=1 << 15, max_entries=8, ttl_s=50, turnover_s=2)
    reaper, spares = _Reaper(), BufferPool(0, 0, NAME)
    entries = Entries(limits, lambda: float(next(clock)), reaper.close)
    at = 0

    def client() -> _Client:
        return _Client(_Connection(), entries, ConnectionLimits(4, 1 << 16, 8, 1), reaper, spares)  # type: ignore[arg-type]

    talking = client()
    for _ in range(24):
        if at >= len(data):
            break
        length, at = data[at], at + 1
        if length == 0:
            talking.end()
            talking = client()
        elif length == 255:
            if talking._pending:
                with contextlib.suppress(KvxferError):
                    seals.add(talking._pending.descriptor, seals.CONTENT)
        else:
            said, at = data[at : at + length], at + length
            _, outcome, answer = _LOOP.run_until_complete(talking._answer(said))
            assert outcome != store_pb2.OUTCOME_UNSPECIFIED
            if answer:
                assert os.fstat(answer.descriptor).st_size == answer.size
            if answer and answer is not talking._pending:
                assert seals.require_any_size(answer.descriptor, seals.IMMUTABLE) == answer.size
        held = [entry.cost for entry in entries._entries.values()]
        pending = talking._pending
        assert entries.used == sum(held)
        assert entries.reserved == (pending.cost if pending else 0)
        assert entries.used + entries.reserved <= limits.capacity
    talking.end()
    entries.clear()
    assert (entries.used, entries.reserved) == (0, 0)


def reply(data: bytes) -> None:
    """What a hostile store answers: a message, and up to two memfds, sealed or not. Byte 0 says which."""
    if not data:
        return
    ours, theirs = Channel.pair()
    client = StoreClient.__new__(StoreClient)
    client._channel, client._timeout = ours, 1.0
    memfds = [seals.create("fuzz", PAGE) for _ in range(data[0] & 3)]
    try:
        for descriptor in memfds:
            seals.add(descriptor, (seals.IMMUTABLE, seals.FIXED)[data[0] >> 2 & 1])
        theirs.send(data[1:] or b"\0", memfds, timeout=0)
        with contextlib.suppress(StoreError):
            match data[0] >> 3 & 3:
                case 0:
                    if found := client.get(INDICES[0]):
                        os.close(found[0])
                        assert found[1] == PAGE
                        assert not data[0] & 4
                        assert data[0] & 3 == 1
                case 1:
                    os.close(client.new(PAGE))
                case 2:
                    client.put(INDICES[0])
                case _:
                    client.renew(INDICES[0])
    finally:
        for descriptor in memfds:
            os.close(descriptor)
        ours.close()
        theirs.close()


TARGETS: dict[str, Callable[[bytes], None]] = {
    "header": header,
    "import": import_,
    "store": store,
    "reply": reply,
    "entry": entry,
    "proxy": proxy,
    "http": http,
    "frames": frames_,
    "envelope": envelope,
    "proto": proto,
    "request": request,
    "template": template,
    "image": image,
}
