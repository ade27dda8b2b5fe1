"""Seals: what a receiver may rely on is checked before anything is mapped."""

import fcntl
import mmap
import os

import pytest

from kvxfer import seals
from kvxfer.errors import SealError


@pytest.fixture
def memfd():
    descriptor = seals.create("test", mmap.PAGESIZE)
    yield descriptor
    os.close(descriptor)


def test_a_new_memfd_has_its_size_and_is_not_inherited(memfd):
    assert os.fstat(memfd).st_size == mmap.PAGESIZE
    assert not os.get_inheritable(memfd)


def test_an_immutable_memfd_can_neither_be_written_nor_resized(memfd):
    os.write(memfd, b"kept")
    seals.add(memfd, seals.IMMUTABLE)
    seals.require(memfd, seals.IMMUTABLE, mmap.PAGESIZE)
    for change in (
        lambda: os.pwrite(memfd, b"x", 0),
        lambda: os.ftruncate(memfd, 0),
        lambda: os.ftruncate(memfd, 1 << 20),
    ):
        with pytest.raises(PermissionError):
            change()
    assert os.pread(memfd, 4, 0) == b"kept"


def test_an_immutable_memfd_is_handed_out_for_reading_only(memfd):
    os.write(memfd, b"kept")
    seals.add(memfd, seals.IMMUTABLE)
    reading = seals.read_only(memfd)
    assert fcntl.fcntl(reading, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    assert not os.get_inheritable(reading)
    seals.require(reading, seals.IMMUTABLE, mmap.PAGESIZE)
    with mmap.mmap(reading, mmap.PAGESIZE, prot=mmap.PROT_READ) as mapping:
        assert mapping[:4] == b"kept"
    os.close(reading)


def test_a_writer_s_mapping_forbids_the_immutable_seal(memfd):
    with mmap.mmap(memfd, mmap.PAGESIZE), pytest.raises(SealError):
        seals.add(memfd, seals.IMMUTABLE)


def test_the_writer_s_own_mapping_stays_and_no_new_one_is_made(memfd):
    with mmap.mmap(memfd, mmap.PAGESIZE) as mine:
        seals.add(memfd, seals.READ_ONLY_FOR_OTHERS)
        mine[:4] = b"late"
        with pytest.raises(PermissionError):
            mmap.mmap(memfd, mmap.PAGESIZE)
        with mmap.mmap(memfd, mmap.PAGESIZE, prot=mmap.PROT_READ) as theirs:
            assert theirs[:4] == b"late"
    seals.require(memfd, seals.READ_ONLY_FOR_OTHERS, mmap.PAGESIZE)


def test_seals_that_are_missing_are_noticed(memfd):
    with pytest.raises(SealError, match="lacks"):
        seals.require(memfd, seals.FIXED, mmap.PAGESIZE)
    seals.add(memfd, seals.FIXED)
    seals.require(memfd, seals.FIXED, mmap.PAGESIZE)
    with pytest.raises(SealError, match="lacks"):
        seals.require(memfd, seals.IMMUTABLE, mmap.PAGESIZE)


@pytest.mark.parametrize("size", [0, mmap.PAGESIZE - 1, mmap.PAGESIZE + 1])
def test_another_size_than_announced_is_noticed(memfd, size):
    seals.add(memfd, seals.FIXED)
    with pytest.raises(SealError, match="size"):
        seals.require(memfd, seals.FIXED, size)


def test_what_is_no_memfd_is_refused(tmp_path):
    with (tmp_path / "file").open("wb") as file, pytest.raises(SealError):
        seals.require(file.fileno(), seals.FIXED, 0)
    read, write = os.pipe()
    with pytest.raises(SealError):
        seals.require(read, 0, 0)
    os.close(read)
    os.close(write)


def test_no_seal_can_be_added_after_the_last(memfd):
    seals.add(memfd, seals.FIXED)
    with pytest.raises(SealError):
        seals.add(memfd, seals.IMMUTABLE)
