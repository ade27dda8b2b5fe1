"""Mappings: where they lie, who may write, what keeps them open; and memory that is made present."""

import ctypes
import faulthandler
import mmap
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from kvxfer import pages, seals
from kvxfer.buffer import ConsumerBuffer, ProducerBuffer
from kvxfer.header import HUGE_PAGE, LARGE, PAGE, Header
from kvxfer.mapping import Mapping, make_present
from kvxfer.pool import BufferPool

SIZES = [1, PAGE, PAGE + 1, LARGE - 1, LARGE, LARGE + PAGE + 5, 6 * HUGE_PAGE + HUGE_PAGE // 2]
LARGE_HEADER = Header(
    "m", "r", "l", block_tokens=4, block_bytes=HUGE_PAGE - 5000, block_count=6, first_token=0, token_count=24
)


def in_a_child(work: Callable[[], None]) -> int:
    """The wait status of a process that does `work`."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()  # a fault may be meant
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


def faults(work: Callable[[], None]) -> bool:
    """Whether the kernel ends a process that does `work`."""
    status = in_a_child(work)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV


def mapped(name: str) -> int:
    return Path("/proc/self/maps").read_text().count(name)


@pytest.fixture(params=[True, False], ids=["huge pages as the kernel has them", "no huge pages"])
def _kernels(request, monkeypatch):
    """With and without a kernel that gives huge pages on request."""
    if not request.param:
        monkeypatch.setattr(pages, "collapse", lambda *_: None)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("size", SIZES)
def test_what_is_made_present_is_zeroed_and_no_more_than_its_size(size):
    descriptor = seals.create("present", size)
    try:
        make_present(descriptor, size)
        status = os.fstat(descriptor)
        assert status.st_size == size
        assert status.st_blocks * 512 == -(-size // PAGE) * PAGE
        assert not any(os.pread(descriptor, size, 0))
    finally:
        os.close(descriptor)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("size", SIZES)
def test_both_ends_see_the_same_bytes(size):
    descriptor = seals.create("both-ends", size)
    try:
        make_present(descriptor, size)
        with (
            Mapping(descriptor, size, writable=True) as writing,
            Mapping(descriptor, size, writable=False) as reading,
        ):
            assert len(writing.view) == len(reading.view) == size
            for mapping in (writing, reading):
                mapping.populate(0, size)
                assert mapping.grain == (HUGE_PAGE if size >= LARGE else PAGE)
                assert mapping._address % mapping.grain == 0
            writing.view[0] = 1
            writing.view[size - 1] = 2
            assert reading.view[size - 1] == 2
            assert os.pread(descriptor, 1, size - 1) == b"\x02"
    finally:
        os.close(descriptor)
    assert not mapped("both-ends")


@pytest.mark.parametrize("size", [PAGE, LARGE])
def test_what_is_mapped_for_reading_cannot_be_written(size):
    descriptor = seals.create("reading", size)
    with Mapping(descriptor, size, writable=False) as mapping:
        os.close(descriptor)
        assert mapping.view.readonly
        with pytest.raises(TypeError):
            mapping.view[0] = 1
        # Nor by who finds his way around the view.
        assert faults(lambda: ctypes.memset(mapping._address + size - 1, 1, 1))


@pytest.mark.parametrize("size", [PAGE, LARGE + 1])
def test_a_view_that_is_still_used_keeps_it_open(size):
    descriptor = seals.create("kept-open", size)
    mapping = Mapping(descriptor, size, writable=True)
    os.close(descriptor)
    kept = mapping.view[size - 1 :]
    with pytest.raises(BufferError):
        mapping.close()
    kept[0] = 7
    assert kept[0] == 7
    kept.release()
    mapping.close()
    assert not mapped("kept-open")


@pytest.mark.parametrize("size", [PAGE, LARGE])
def test_what_may_not_be_mapped_is_an_error_and_leaves_nothing(size):
    descriptor = seals.create("not-mapped", size)
    seals.add(descriptor, seals.IMMUTABLE)
    before = mapped("")
    with pytest.raises(PermissionError):
        Mapping(descriptor, size, writable=True)
    os.close(descriptor)
    with pytest.raises(OSError, match="descriptor"):
        Mapping(descriptor, size, writable=False)
    assert mapped("") == before


def test_a_process_that_may_write_no_file_and_hold_little_data_can_map_one():
    """As one of a request may not (systemd.exec(5), LimitFSIZE= and LimitDATA=)."""
    size = 64 << 20
    descriptor = seals.create("limited", size)

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        resource.setrlimit(resource.RLIMIT_DATA, (size // 2, size // 2))
        with Mapping(descriptor, size, writable=True) as mapping:
            mapping.view[0] = mapping.view[size - 1] = 1
        with pytest.raises(OSError, match="memory"):
            mmap.mmap(-1, size, mmap.MAP_PRIVATE)

    try:
        assert in_a_child(work) == 0
        assert os.pread(descriptor, 1, size - 1) == b"\x01"
    finally:
        os.close(descriptor)


def test_a_pool_s_large_buffer_is_cut_to_what_is_asked_for():
    pool = BufferPool(8 * HUGE_PAGE, spare=1)
    try:
        for size in (4 * HUGE_PAGE + PAGE, 8 * HUGE_PAGE, 9 * HUGE_PAGE):
            descriptor = pool.take(size)
            status = os.fstat(descriptor)
            os.close(descriptor)
            assert (status.st_size, status.st_blocks * 512) == (size, size)
            pool.refill()
    finally:
        pool.close()


@pytest.mark.usefixtures("_kernels")
def test_a_large_buffer_is_write_protected_in_huge_pages_and_at_the_end_whole():
    size = LARGE_HEADER.buffer_bytes
    descriptor = seals.create("guarded", size)
    make_present(descriptor, size)
    with ProducerBuffer(descriptor, LARGE_HEADER) as producer:
        kept = [producer.block(index) for index in range(6)]

        def writes_to(block: int, offset: int) -> Callable[[], None]:
            return lambda: kept[block].__setitem__(offset, 1)

        with ConsumerBuffer(descriptor, max_bytes=size) as consumer:
            producer.commit(3)
            assert consumer.committed == 3
            whole = LARGE_HEADER.offset(3) // HUGE_PAGE * HUGE_PAGE
            inside = whole - LARGE_HEADER.offset(2)
            assert faults(writes_to(1, HUGE_PAGE // 2))
            assert faults(writes_to(2, inside - 1))
            assert not faults(writes_to(2, inside))  # the rest of a huge page that is not whole yet
            assert not faults(writes_to(3, 0))
            for committed in (4, 5, 6):
                producer.commit(committed)
                assert consumer.committed == committed  # the counter's own page stays writable
        for block in range(6):
            assert faults(writes_to(block, 0))
            assert faults(writes_to(block, LARGE_HEADER.block_bytes - 1))
        for view in kept:
            view.release()
    os.close(descriptor)


def test_a_huge_page_that_the_kernel_gives_is_mapped_as_one():
    """Skipped where the kernel gives none (before Linux 6.1, or forbidden); everything else holds there as well."""
    descriptor = seals.create("mapped-huge", LARGE)
    make_present(descriptor, LARGE)
    try:
        with Mapping(descriptor, LARGE, writable=False) as mapping:
            mapping.populate(0, LARGE)
            smaps = Path("/proc/self/smaps").read_text().split("mapped-huge")[1]
            fields = dict(line.split(":") for line in smaps.splitlines()[1:20])
            assert fields["Rss"].split()[0] == str(LARGE // 1024)
            if fields["ShmemPmdMapped"].split()[0] == "0":
                pytest.skip("this kernel gives no huge pages on request")
            assert fields["ShmemPmdMapped"].split()[0] == str(LARGE // 1024)
    finally:
        os.close(descriptor)
