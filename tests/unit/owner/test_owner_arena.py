"""Arenas: what is written is what others read, and nobody writes after sealing."""

import contextlib
import mmap
import os
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from kvxfer import seals
from kvxfer.errors import SealError
from model_owner import arena as arenas
from model_owner.arena import ArenaError, CpuArena, CudaArena, sealed_copy


def _descriptors() -> int:
    """Of memfds: others may end meanwhile, which earlier tests of this process have left to the collector."""
    targets = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            targets.append(str(link.readlink()))
    return sum(target.startswith("/memfd:") for target in targets)


def _filled() -> CpuArena:
    arena = CpuArena(4096)
    with arena.piece(64, 4) as piece:
        piece[:] = b"abcd"
    return arena


def test_sealed_arena_is_read_only_for_all():
    arena = _filled()
    arena.seal()
    (descriptor,) = arena.descriptors()
    seals.require(descriptor, seals.IMMUTABLE, 4096)
    with mmap.mmap(descriptor, 4096, mmap.MAP_SHARED, mmap.PROT_READ) as view:
        assert view[64:68] == b"abcd"
        assert view[:64] == bytes(64)
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(descriptor, b"x", 0)
    writable = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
    with pytest.raises(PermissionError):
        os.pwrite(writable, b"x", 0)
    os.close(writable)
    arena.close()
    arena.close()


def test_nothing_is_written_after_sealing():
    arena = _filled()
    arena.seal()
    with pytest.raises(ValueError, match="sealed"), arena.piece(0, 1):
        pass
    arena.close()


def test_a_piece_that_is_still_used_prevents_sealing():
    arena = CpuArena(4096)
    with arena.piece(0, 4) as piece:
        kept = [np.frombuffer(piece, np.uint8)]
    with pytest.raises(ValueError, match="released"):
        piece[0] = 1
    with pytest.raises(SealError):
        arena.seal()
    kept.clear()
    arena.seal()
    arena.close()


def test_no_memory_is_an_error_and_no_signal(monkeypatch):
    def refuse(descriptor, offset, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(arenas.os, "posix_fallocate", refuse)
    before = _descriptors()
    with pytest.raises(ArenaError) as caught:
        CpuArena(4096)
    assert caught.value.code == "out-of-memory"
    assert _descriptors() == before


def test_sealed_copy():
    descriptor = sealed_copy("test", b"table")
    seals.require(descriptor, seals.IMMUTABLE, 5)
    assert os.pread(descriptor, 10, 0) == b"table"
    os.close(descriptor)


def test_gpu_arena_without_pycuda(monkeypatch):
    monkeypatch.setitem(sys.modules, "pycuda", None)
    monkeypatch.setitem(sys.modules, "pycuda.driver", None)
    with pytest.raises(ArenaError) as caught:
        CudaArena(4096)
    assert caught.value.code == "no-cuda"
    assert "pycuda" in str(caught.value)


def test_gpu_arena_without_a_gpu(monkeypatch):
    class DriverError(Exception):
        pass

    class DriverMemoryError(DriverError):
        pass

    def init() -> None:
        raise DriverError("no CUDA-capable device is detected")

    driver = types.SimpleNamespace(init=init, Error=DriverError, MemoryError=DriverMemoryError)
    monkeypatch.setitem(sys.modules, "pycuda", types.SimpleNamespace(driver=driver))
    monkeypatch.setitem(sys.modules, "pycuda.driver", driver)
    with pytest.raises(ArenaError) as caught:
        CudaArena(4096)
    assert caught.value.code == "no-gpu"


@pytest.mark.gpu
def test_gpu_arena_holds_what_was_written():
    driver = pytest.importorskip("pycuda.driver", reason="needs pycuda and a GPU")
    try:
        arena = CudaArena(1 << 20)
    except ArenaError as error:
        pytest.skip(str(error))
    with arena.piece(64, 4) as piece:
        piece[:] = b"abcd"
    arena.seal()
    assert len(arena.ipc_handle) == 64
    back = np.empty(4, np.uint8)
    with arena._current():
        driver.memcpy_dtoh(back, int(arena._memory) + 64)
    assert bytes(back) == b"abcd"
    arena.close()
