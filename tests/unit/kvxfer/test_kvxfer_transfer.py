"""Transfers: buffers, doorbells, ends."""

import faulthandler
import mmap
import os
import resource
import socket
import threading
import time

import pytest

from kvxfer import pages, seals, transfer
from kvxfer.buffer import ConsumerBuffer, ProducerBuffer
from kvxfer.errors import AbortReason, ChannelError, PeerDiedError, PeerTimeoutError, TransferAbortedError
from kvxfer.header import PAGE, Header
from kvxfer.transfer import Consumer, Producer
from kvxfer_blocks import BLOCKS, HEADER, MOST, content, read, write


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
            assert len(batch) == 1 or len(batch) * block_bytes <= 4 << 20
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


@pytest.mark.parametrize(
    ("block_bytes", "sizes"),
    [(1 << 20, [1, 1, 2, 4, 4, 4, 2, 1, 1]), (400_000, [2, 2, 4, 8, 10, 10, 5, 2, 2, 1]), (5 << 20, [1, 1, 1])],
)
def test_batches_grow_and_shrink_again(ends, block_bytes, sizes):
    ours, _ = ends
    count = sum(sizes)
    header = Header(
        "m", "r", "l", block_tokens=1, block_bytes=block_bytes, block_count=count, first_token=0, token_count=count
    )
    descriptor = seals.create("sizes", header.buffer_bytes)
    with Producer(ours, descriptor, header, passing=True, timeout=1) as producer:
        os.close(descriptor)
        assert [len(batch) for batch in producer.batches()] == sizes
        producer.finish(timeout=1)


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


def test_protecting_what_is_not_mapped_is_an_error():
    with pytest.raises(OSError, match="memory"):
        pages.protect(PAGE, PAGE)
