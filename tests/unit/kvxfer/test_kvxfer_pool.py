"""Buffers made ahead of need, and tickets that are good once."""

import errno
import os
import threading

from descriptors import open_descriptors
from kvxfer import pool as pools
from kvxfer.header import PAGE
from kvxfer.pool import BufferPool
from kvxfer.tickets import Tickets
from kvxfer_blocks import HEADER
from waiting import wait_for


def test_a_pool_s_buffers_are_zeroed_present_and_used_once():
    pool = BufferPool(1 << 20, spare=2)
    try:
        wait_for(lambda: pool.ready == 2)
        descriptor = pool.take(HEADER.buffer_bytes)
        status = os.fstat(descriptor)
        assert status.st_size == HEADER.buffer_bytes
        assert status.st_blocks * 512 >= HEADER.buffer_bytes  # present
        assert not any(os.pread(descriptor, HEADER.buffer_bytes, 0))
        os.pwrite(descriptor, b"of one user", 0)
        os.close(descriptor)
        pool.refill()
        wait_for(lambda: pool.ready == 2)
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
        wait_for(lambda: pool.ready)
    finally:
        pool.close()


def test_a_full_pool_that_is_told_to_refill_makes_nothing_beside_the_transfer_that_takes(monkeypatch):
    made = threading.Semaphore(0)
    populated = pools._populated

    def counted(name: str, size: int) -> int:
        made.release()
        return populated(name, size)

    monkeypatch.setattr(pools, "_populated", counted)
    pool = BufferPool(PAGE, spare=1)
    try:
        wait_for(lambda: pool.ready)
        assert made.acquire(timeout=10)
        pool.refill()
        os.close(pool.take(PAGE))
        assert not made.acquire(timeout=0.05)
        pool.refill()
        wait_for(lambda: pool.ready)
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
