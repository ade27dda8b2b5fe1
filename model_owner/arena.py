"""Where packed weights lie and how others get at them: a sealed memfd on the CPU, one IPC-exported allocation on a GPU.

An arena is written once, piece by piece, then sealed; from then on nobody changes it, this process included (on a GPU
by convention only: legacy CUDA IPC maps read-write).
"""

import contextlib
import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, Protocol

import numpy as np

from kvxfer import seals
from kvxfer.errors import SealError
from tie.daemon.errors import TieError

ALIGNMENT: Final = 64  # of every tensor's offset: a cache line, and what AVX-512 loads want


class ArenaError(TieError):
    """There is no memory, or no GPU, for an arena.

    Attributes:
        code: stable, for status and metrics.
    """

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class Arena(Protocol):
    """Memory for one packing of a model's weights.

    Attributes:
        size: bytes.
        ipc_handle: for a GPU arena, what `cuIpcOpenMemHandle` takes; empty otherwise and before `seal`.
    """

    size: int
    ipc_handle: bytes

    def piece(self, offset: int, size: int) -> AbstractContextManager[memoryview]:
        """A writable view of `size` bytes at `offset`, in the arena when the block ends. Not after `seal`."""
        ...

    def seal(self) -> None:
        """Ends writing.

        Raises:
            kvxfer.errors.SealError: somebody still has a view of a piece.
        """
        ...

    def descriptors(self) -> tuple[int, ...]:
        """What to send to a client beside the reply; the arena keeps and closes them."""
        ...

    def close(self) -> None:
        """Gives the memory up. Clients that mapped a memfd keep theirs; a GPU arena is gone for all."""
        ...


class CpuArena:
    """A memfd: mapped for writing until `seal`, which makes it immutable; then for reading."""

    def __init__(self, size: int) -> None:
        """Allocates `size` bytes, now, so that a lack of memory is an error here and not a SIGBUS later.

        Raises:
            ArenaError: no memory.
        """
        self.size = size
        self.ipc_handle = b""
        self._descriptor = allocate("tie-weights", size)
        self._mapping: mmap.mmap | None = mmap.mmap(self._descriptor, size)
        self._sealed = False

    @contextmanager
    def piece(self, offset: int, size: int) -> Iterator[memoryview]:
        """See `Arena`: a window on the mapping itself, nothing is copied."""
        if self._mapping is None or self._sealed:
            raise ValueError("the arena is sealed")
        view = memoryview(self._mapping)[offset : offset + size]
        yield view
        view.release()  # the mapping cannot go while somebody has a view of it

    def seal(self) -> None:
        """See `Arena`. From here on the memfd is open for reading only."""
        if self._mapping is not None and not self._sealed:
            try:
                self._mapping.close()
            except BufferError:
                raise SealError("the arena is still being written") from None
            self._descriptor = _freeze(self._descriptor)
            # Kept mapped, for reading: a page that only one process maps is called private by the kernel's accounts
            # (smaps), and a runtime would seem to have a copy of its own.
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._mapping = mmap.mmap(self._descriptor, self.size, flags, mmap.PROT_READ)
            self._sealed = True

    def descriptors(self) -> tuple[int, ...]:
        """See `Arena`: the memfd."""
        return (self._descriptor,)

    def close(self) -> None:
        """See `Arena`."""
        if self._mapping is not None:
            with contextlib.suppress(BufferError):  # a piece in a traceback: the mapping goes when that does
                self._mapping.close()
            self._mapping = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class CudaArena:
    """One allocation on one GPU, exported by legacy CUDA IPC.

    Pieces are staged in host memory and copied to the device. All methods may run in different threads: the context is
    made current for each.
    """

    def __init__(self, size: int, *, device: int = 0) -> None:
        """Allocates `size` bytes on GPU number `device`.

        Raises:
            ArenaError: no pycuda, no driver, no such GPU, or no memory on it.
        """
        # Only where a GPU is asked for: pycuda is an extra and needs the driver.
        try:
            import pycuda.driver
        except ImportError as error:
            raise ArenaError(
                "a GPU arena needs the package pycuda (pip install 'tie-inference[cuda-arena]') and NVIDIA's driver",
                code="no-cuda",
            ) from error
        self.size = size
        self.ipc_handle = b""
        self._cuda: Any = pycuda.driver
        self._context: Any = None
        self._memory: Any = None
        try:
            self._cuda.init()
            self._context = self._cuda.Device(device).retain_primary_context()
            with self._current():
                self._memory = self._cuda.mem_alloc(size)
        except self._cuda.MemoryError as error:
            raise ArenaError(f"the GPU has no {size} bytes free for the weights", code="out-of-memory") from error
        except self._cuda.Error as error:
            raise ArenaError("there is no usable GPU", code="no-gpu") from error

    @contextmanager
    def piece(self, offset: int, size: int) -> Iterator[memoryview]:
        """See `Arena`: host memory, copied to the device when the block ends without an error."""
        staging = np.empty(size, dtype=np.uint8)
        yield staging.data
        with self._current():
            self._cuda.memcpy_htod(int(self._memory) + offset, staging)

    def seal(self) -> None:
        """See `Arena`."""
        with self._current():
            self._cuda.Context.synchronize()
            self.ipc_handle = bytes(self._cuda.mem_get_ipc_handle(self._memory))

    def descriptors(self) -> tuple[int, ...]:
        """See `Arena`: none."""
        return ()

    def close(self) -> None:
        """See `Arena`."""
        if self._memory is not None:
            with self._current():
                self._memory.free()
            self._memory = None

    @contextmanager
    def _current(self) -> Iterator[None]:
        self._context.push()
        try:
            yield
        finally:
            self._cuda.Context.pop()


def sealed_copy(name: str, data: bytes) -> int:
    """A read-only descriptor of an immutable memfd that holds `data`.

    Raises:
        ArenaError: no memory.
        SealError: the kernel does not seal.
        OSError: there is no descriptor left.
    """
    descriptor = allocate(name, len(data))
    try:
        written = 0
        while written < len(data):
            written += os.pwrite(descriptor, data[written:], written)
    except OSError:
        os.close(descriptor)
        raise
    return _freeze(descriptor)


def allocate(name: str, size: int) -> int:
    """A memfd of `size` bytes of memory that is there, to be sealed.

    Raises:
        ArenaError: no memory, or no descriptor for it.
    """
    try:
        descriptor = seals.create(name, size)
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError:
            os.close(descriptor)
            raise
    except OSError as error:
        code = "out-of-memory" if error.errno in {errno.ENOMEM, errno.ENOSPC} else "no-memfd"
        raise ArenaError(f"no {size} bytes of memory: {error.strerror}", code=code) from error
    return descriptor


def _freeze(descriptor: int) -> int:
    """Seals a memfd and gives back a read-only descriptor in its stead."""
    try:
        seals.add(descriptor, seals.IMMUTABLE)
        return seals.read_only(descriptor)
    finally:
        os.close(descriptor)
