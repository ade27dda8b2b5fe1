"""A producer that lies: about its buffer, its descriptors, its order, its counter, its time."""

import os
import socket
import struct
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from descriptors import open_descriptors
from kvxfer import seals, transfer
from kvxfer.buffer import ProducerBuffer
from kvxfer.channel import Channel
from kvxfer.errors import ChannelError, HeaderError, KvxferError, PeerTimeoutError, SealError, TransferAbortedError
from kvxfer.header import COMMITTED_OFFSET, HEADER_BYTES, PAGE
from kvxfer.transfer import Consumer, Producer
from kvxfer_blocks import BLOCKS, HEADER, MOST, write


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
