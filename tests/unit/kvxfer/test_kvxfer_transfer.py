"""Transfers: buffers, doorbells, ends; and peers that lie."""

import errno
import faulthandler
import mmap
import os
import resource
import socket
import struct
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer import pages, seals, transfer
from kvxfer import pool as pools
from kvxfer.buffer import ConsumerBuffer, ProducerBuffer
from kvxfer.channel import Channel
from kvxfer.errors import (
    AbortReason,
    ChannelError,
    HeaderError,
    KvxferError,
    PeerDiedError,
    PeerTimeoutError,
    SealError,
    TransferAbortedError,
)
from kvxfer.header import COMMITTED_OFFSET, HEADER_BYTES, PAGE, Header
from kvxfer.pool import BufferPool
from kvxfer.tickets import Tickets
from kvxfer.transfer import Consumer, Producer

BLOCKS = 6
HEADER = Header("m", "r", "l", block_tokens=4, block_bytes=5000, block_count=BLOCKS, first_token=8, token_count=23)
MOST = 1 << 20


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def content(block: int) -> bytes:
    return bytes((block * 31 + position) % 251 for position in range(HEADER.block_bytes))


@pytest.fixture
def memfd():
    descriptor = seals.create("test", HEADER.buffer_bytes)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def ends():
    before = open_descriptors()
    ours, theirs = Channel.pair()
    yield ours, theirs
    ours.close()
    theirs.close()
    assert open_descriptors() == before


def write(producer, block: int) -> None:
    with producer.block(block) as view:
        view[:] = content(block)
    producer.commit(block + 1)


def read(consumer, block: int) -> bytes:
    with consumer.block(block) as view:
        return bytes(view)


def test_blocks_arrive_one_by_one(ends, memfd):
    ours, theirs = ends
    with (
        Producer(ours, memfd, HEADER, passing=True, timeout=1) as producer,
        Consumer(theirs, max_bytes=MOST, timeout=1) as consumer,
    ):
        assert consumer.header == HEADER
        for block in range(BLOCKS):
            with pytest.raises(PeerTimeoutError):
                consumer.wait(block + 1, timeout=0)
            with pytest.raises(ChannelError):
                consumer.block(block)
            write(producer, block)
            assert consumer.wait(block + 1, timeout=1) == block + 1
            assert read(consumer, block) == content(block)
        with pytest.raises(PeerTimeoutError):
            consumer.finish(timeout=0)
        producer.finish(timeout=1)
        consumer.finish(timeout=1)


def test_a_waiting_consumer_wakes_up_for_a_commit(ends, memfd):
    ours, theirs = ends
    with (
        Producer(ours, memfd, HEADER, passing=True, timeout=1) as producer,
        Consumer(theirs, max_bytes=MOST, timeout=1) as consumer,
    ):
        seen = []
        waiter = threading.Thread(target=lambda: seen.append(consumer.wait(1, timeout=10)))
        waiter.start()
        write(producer, 0)
        waiter.join(10)
        assert seen == [1]


def test_the_consumer_may_have_made_the_buffer_itself(ends, memfd):
    ours, theirs = ends
    with (
        Producer(ours, memfd, HEADER, passing=False, timeout=1) as producer,
        Consumer(theirs, max_bytes=MOST, timeout=1, own=memfd) as consumer,
    ):
        for block in range(BLOCKS):
            write(producer, block)
        producer.finish(timeout=1)
        consumer.finish(timeout=1)
        assert read(consumer, BLOCKS - 1) == content(BLOCKS - 1)


def test_the_consumer_s_wish_where_to_begin(ends):
    ours, theirs = ends
    transfer.request(theirs, 17, timeout=1)
    assert transfer.await_request(ours, timeout=1) == 17
    with pytest.raises(PeerTimeoutError):
        transfer.await_request(ours, timeout=0)
    transfer.abort(theirs, AbortReason.CANCELLED)
    with pytest.raises(TransferAbortedError) as caught:
        transfer.await_request(ours, timeout=1)
    assert caught.value.reason is AbortReason.CANCELLED


def test_a_full_queue_loses_doorbells_and_no_blocks(ends):
    """Far more commits than a socket's queue takes; the consumer reads none until the end."""
    ours, theirs = ends
    header = Header("m", "r", "l", block_tokens=1, block_bytes=1, block_count=3000, first_token=0, token_count=3000)
    descriptor = seals.create("many", header.buffer_bytes)
    try:
        with Producer(ours, descriptor, header, passing=True, timeout=1) as producer:
            for block in range(header.block_count):
                producer.commit(block + 1)
            with Consumer(theirs, max_bytes=1 << 30, timeout=1) as consumer:
                assert consumer.wait(header.block_count, timeout=0) == header.block_count
                finisher = threading.Thread(target=producer.finish, kwargs={"timeout": 10})
                finisher.start()
                consumer.finish(timeout=10)
                finisher.join(10)
    finally:
        os.close(descriptor)


def test_the_consumer_cannot_write_and_nobody_can_resize(memfd):
    with ProducerBuffer(memfd, HEADER) as producer:
        with ConsumerBuffer(memfd, max_bytes=MOST) as consumer:
            producer.commit(1)
            assert consumer.committed == 1
            with consumer.block(0) as view:
                assert view.readonly
        with pytest.raises(PermissionError):
            mmap.mmap(memfd, HEADER.buffer_bytes)
        for size in (0, HEADER.buffer_bytes - 1, HEADER.buffer_bytes + 1):
            with pytest.raises(PermissionError):
                os.ftruncate(memfd, size)


def test_committed_blocks_are_write_protected(memfd):
    """A write through a view that was kept by mistake ends the process that makes it."""
    with ProducerBuffer(memfd, HEADER) as producer, producer.block(0) as kept:
        producer.commit(1)
        child = os.fork()
        if child == 0:
            faulthandler.disable()  # the fault is meant
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            kept[0] = 1
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)
        with producer.block(1) as view:
            view[:] = content(1)
        with pytest.raises(ChannelError):
            producer.block(0)


@pytest.mark.parametrize("block_bytes", [5000, 1 << 19, (1 << 20) - 1, (1 << 20) + 1])
def test_batches_cover_all_blocks_and_are_committed_when_the_next_is_asked_for(ends, block_bytes):
    ours, theirs = ends
    header = Header(
        "m", "r", "l", block_tokens=4, block_bytes=block_bytes, block_count=6, first_token=0, token_count=24
    )
    descriptor = seals.create("batches", header.buffer_bytes)
    with (
        Producer(ours, descriptor, header, passing=True, timeout=1) as producer,
        Consumer(theirs, max_bytes=1 << 30, timeout=1) as consumer,
    ):
        os.close(descriptor)
        seen = 0
        for batch in producer.batches():
            assert batch.start == seen
            assert len(batch) == 1 or len(batch) * block_bytes <= 1 << 20
            assert consumer.wait(0, timeout=0) == seen
            for index in batch:
                with producer.block(index) as view:
                    view[0] = index
            seen = batch.stop
        assert seen == consumer.wait(6, timeout=1) == 6
        producer.finish(timeout=1)
        consumer.finish(timeout=1)
        for index in range(6):
            with consumer.block(index) as view:
                assert view[0] == index


def test_a_batch_that_is_left_is_not_committed(ends, memfd):
    ours, theirs = ends
    with Producer(ours, memfd, HEADER, passing=True, timeout=1) as producer:
        for _ in producer.batches():
            break  # as an error would
        with Consumer(theirs, max_bytes=MOST, timeout=1) as consumer:
            assert consumer.wait(0, timeout=0) == 0


def test_blocks_are_committed_in_order_and_once(memfd):
    with ProducerBuffer(memfd, HEADER) as producer:
        for count in (0, BLOCKS + 1):
            with pytest.raises(ChannelError):
                producer.commit(count)
        producer.commit(2)
        for count in (1, 2):
            with pytest.raises(ChannelError):
                producer.commit(count)


def test_an_unfinished_producer_aborts_and_a_finished_one_does_not(ends, memfd):
    ours, theirs = ends
    with Producer(ours, memfd, HEADER, passing=True, timeout=1):
        pass
    with (
        Consumer(theirs, max_bytes=MOST, timeout=1) as consumer,
        pytest.raises(TransferAbortedError),
    ):
        consumer.wait(1, timeout=1)


def test_each_end_hears_why_the_other_gave_up(ends, memfd):
    ours, theirs = ends
    with Producer(ours, memfd, HEADER, passing=True, timeout=1) as producer:
        with Consumer(theirs, max_bytes=MOST, timeout=1) as consumer:
            consumer.abort(AbortReason.INCOMPATIBLE)
        with pytest.raises(TransferAbortedError) as caught:
            producer.commit(1)
        assert caught.value.reason is AbortReason.INCOMPATIBLE


def test_end_of_file_is_death_for_both(ends, memfd):
    ours, theirs = ends
    with Producer(ours, memfd, HEADER, passing=True, timeout=1) as producer:
        with Consumer(theirs, max_bytes=MOST, timeout=1) as consumer:
            caught = []

            def wait():
                began = time.monotonic()
                with pytest.raises(PeerDiedError):
                    consumer.wait(1, timeout=30)
                caught.append(time.monotonic() - began)

            waiter = threading.Thread(target=wait)
            waiter.start()
            ours._socket.shutdown(socket.SHUT_RDWR)
            waiter.join(10)
            assert len(caught) == 1
            assert caught[0] < 5
        with pytest.raises(PeerDiedError):
            producer.commit(1)


def test_all_blocks_without_a_finish_are_not_a_whole(ends, memfd):
    ours, theirs = ends
    producer = Producer(ours, memfd, HEADER, passing=True, timeout=1)
    for block in range(BLOCKS):
        write(producer, block)
    ours._socket.shutdown(socket.SHUT_RDWR)
    producer.close()
    with Consumer(theirs, max_bytes=MOST, timeout=1) as consumer:
        assert consumer.wait(BLOCKS, timeout=1) == BLOCKS
        with pytest.raises(PeerDiedError):
            consumer.finish(timeout=1)


# --- a hostile producer ---


def offer(channel: Channel, *descriptors: int) -> None:
    channel.send(struct.pack("<BBHI", 2, 0, 0, 0), descriptors, timeout=1)


def lying(size: int, page: bytes, add: int) -> int:
    descriptor = seals.create("lying", size)
    os.pwrite(descriptor, page, 0)
    seals.add(descriptor, add)
    return descriptor


@pytest.mark.parametrize(
    ("size", "page", "add"),
    [
        (HEADER.buffer_bytes, HEADER.pack(), 0),  # unsealed: it could be shrunk under the reader
        (HEADER.buffer_bytes, HEADER.pack(), seals.FIXED),  # writable by anybody
        (HEADER.buffer_bytes, HEADER.pack(), seals.READ_ONLY_FOR_OTHERS & ~seals.FIXED),
        (HEADER.buffer_bytes - PAGE, HEADER.pack(), seals.READ_ONLY_FOR_OTHERS),  # shrunk before it was sealed
        (HEADER.buffer_bytes + PAGE, HEADER.pack(), seals.READ_ONLY_FOR_OTHERS),
        (HEADER_BYTES, HEADER.pack(), seals.READ_ONLY_FOR_OTHERS),
        (0, b"", seals.READ_ONLY_FOR_OTHERS),
        (1 << 50, HEADER.pack(), seals.READ_ONLY_FOR_OTHERS),  # sparse, and larger than any buffer
        (HEADER.buffer_bytes, bytes(HEADER_BYTES), seals.READ_ONLY_FOR_OTHERS),
    ],
)
def test_a_bad_buffer_is_refused_before_it_is_mapped(ends, size, page, add):
    ours, theirs = ends
    descriptor = lying(size, page, add)
    offer(ours, descriptor)
    os.close(descriptor)
    with pytest.raises((SealError, HeaderError)):
        Consumer(theirs, max_bytes=MOST, timeout=1)
    with pytest.raises(TransferAbortedError):
        transfer.await_request(ours, timeout=1)


def test_what_is_no_memfd_is_refused(ends, tmp_path):
    ours, theirs = ends
    file = tmp_path / "file"
    file.write_bytes(HEADER.pack() + bytes(HEADER.buffer_bytes - HEADER_BYTES))
    with file.open("rb") as opened:
        for descriptor in (opened.fileno(), ours.fileno()):
            offer(ours, descriptor)
            with pytest.raises(SealError):
                Consumer(theirs, max_bytes=MOST, timeout=1)


@pytest.mark.parametrize(("count", "own"), [(0, False), (2, False), (8, False), (1, True)])
def test_more_or_fewer_descriptors_than_agreed(ends, memfd, count, own):
    ours, theirs = ends
    before = open_descriptors()
    offer(ours, *[memfd] * count)
    with pytest.raises(ChannelError):
        Consumer(theirs, max_bytes=MOST, timeout=1, own=memfd if own else None)
    assert open_descriptors() == before


@pytest.mark.parametrize(
    "message",
    [
        (3, 0, 0, 3),
        (4, 0, 0, BLOCKS),
        (4, 0, 0, 0),
        (2, 0, 0, 0),
        (1, 0, 0, 0),
        (9, 0, 0, 0),
        (3, 1, 0, 1),
        (3, 0, 1, 1),
    ],
)
def test_messages_out_of_order_are_errors(ends, memfd, message):
    ours, theirs = ends
    with ProducerBuffer(memfd, HEADER) as producer:
        offer(ours, memfd)
        with Consumer(theirs, max_bytes=MOST, timeout=1) as consumer:
            producer.commit(2)
            ours.send(struct.pack("<BBHI", *message), timeout=1)
            with pytest.raises(ChannelError):
                consumer.wait(3, timeout=1)


@pytest.mark.parametrize("counter", [BLOCKS + 1, 1, (1 << 32) - 1])
def test_a_counter_that_lies_is_an_error(ends, memfd, counter):
    ours, theirs = ends
    with ProducerBuffer(memfd, HEADER) as producer:
        offer(ours, memfd)
        with Consumer(theirs, max_bytes=MOST, timeout=1) as consumer:
            producer.commit(2)
            consumer.wait(2, timeout=1)
            struct.pack_into("<I", producer._view, COMMITTED_OFFSET, counter)
            with pytest.raises(HeaderError):
                consumer.wait(3, timeout=1)


def test_a_slow_drip_runs_into_the_deadline(ends, memfd):
    ours, theirs = ends
    with Producer(ours, memfd, HEADER, passing=True, timeout=1) as producer:
        write(producer, 0)
        stop = threading.Event()

        def drip():
            while not stop.wait(0.005):
                ours.send(struct.pack("<BBHI", 3, 0, 0, 1), timeout=1)

        dripper = threading.Thread(target=drip)
        with Consumer(theirs, max_bytes=MOST, timeout=1) as consumer:
            dripper.start()
            began = time.monotonic()
            with pytest.raises(PeerTimeoutError):
                consumer.wait(2, timeout=0.2)
            assert time.monotonic() - began < 5
            stop.set()
            dripper.join(10)


messages = st.one_of(
    st.binary(min_size=1, max_size=24),
    st.builds(
        lambda *fields: struct.pack("<BBHI", *fields),
        st.integers(0, 6),
        st.sampled_from([0, 0, 0, 1]),
        st.sampled_from([0, 0, 1, 6, 7, 999]),
        st.integers(0, BLOCKS + 2),
    ),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(messages, max_size=8), st.lists(st.integers(0, BLOCKS + 1), max_size=4), st.booleans())
def test_whatever_a_producer_says_the_consumer_ends_with_an_error_or_the_truth(said, counters, passing):
    """No crash, no hang, no leak; and it believes in a finish only when everything is committed."""
    before = open_descriptors()
    ours, theirs = Channel.pair()
    descriptor = seals.create("fuzz", HEADER.buffer_bytes)
    with ours, theirs, ProducerBuffer(descriptor, HEADER) as producer:
        offer(ours, descriptor)
        os.close(descriptor)
        with Consumer(theirs, max_bytes=MOST, timeout=1) as consumer:
            for counter in counters:
                struct.pack_into("<I", producer._view, COMMITTED_OFFSET, counter)
            for message in said:
                ours.send(message, [ours.fileno()] if passing and message[0] == 3 else [], timeout=1)
            ours._socket.shutdown(socket.SHUT_WR)
            try:
                consumer.wait(BLOCKS, timeout=0)
                consumer.finish(timeout=0)
            except KvxferError:
                pass
            else:
                assert counters[-1] == BLOCKS
    assert open_descriptors() == before


# --- pool and tickets ---


def test_a_pool_s_buffers_are_zeroed_present_and_used_once():
    pool = BufferPool(1 << 20, spare=2)
    try:
        deadline = time.monotonic() + 10
        while pool.ready < 2 and time.monotonic() < deadline:
            time.sleep(0.005)
        descriptor = pool.take(HEADER.buffer_bytes)
        status = os.fstat(descriptor)
        assert status.st_size == HEADER.buffer_bytes
        assert status.st_blocks * 512 >= HEADER.buffer_bytes  # present
        assert not any(os.pread(descriptor, HEADER.buffer_bytes, 0))
        os.pwrite(descriptor, b"of one user", 0)
        os.close(descriptor)
        pool.refill()
        while pool.ready < 2 and time.monotonic() < deadline:
            time.sleep(0.005)
        for _ in range(2):
            descriptor = pool.take(1 << 20)
            assert not any(os.pread(descriptor, 1 << 20, 0))
            os.close(descriptor)
    finally:
        pool.close()


def test_a_refill_asked_for_while_one_fails_is_not_forgotten(monkeypatch):
    trying, asked = threading.Event(), threading.Event()
    populated = pools._populated

    def fail_once(name: str, size: int) -> int:
        if not trying.is_set():
            trying.set()
            assert asked.wait(10)
            raise OSError(errno.ENOMEM, "no memory")
        return populated(name, size)

    monkeypatch.setattr(pools, "_populated", fail_once)
    pool = BufferPool(PAGE, spare=1)
    try:
        assert trying.wait(10)
        pool.refill()
        asked.set()
        deadline = time.monotonic() + 10
        while not pool.ready:
            assert time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        pool.close()


def test_a_pool_makes_what_it_does_not_keep():
    before = open_descriptors()
    pool = BufferPool(PAGE, spare=1)
    for size in (PAGE + 1, 10 * PAGE):
        descriptor = pool.take(size)
        assert os.fstat(descriptor).st_size == size
        os.close(descriptor)
    pool.close()
    none = BufferPool(PAGE, spare=0)
    os.close(none.take(PAGE))
    none.close()
    assert open_descriptors() == before


def test_tickets_are_good_once_and_end_with_their_connection():
    tickets: Tickets[str] = Tickets()
    one, other = object(), object()
    first, second, third = tickets.issue(one, "a"), tickets.issue(one, "b"), tickets.issue(other, "c")
    assert len({first, second, third}) == 3
    assert tickets.count(one) == 2
    assert tickets.claim(first) == "a"
    assert tickets.claim(first) is None
    assert tickets.claim(b"") is None
    assert tickets.end(one) == ["b"]
    assert tickets.claim(second) is None
    assert tickets.claim(third) == "c"


def test_protecting_what_is_not_mapped_is_an_error():
    with pytest.raises(OSError, match="memory"):
        pages.protect(PAGE, PAGE)
