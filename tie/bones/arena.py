"""Tensors as views into an arena that somebody else owns, without a copy.

The model owner packs all weights of a model into one memfd and seals it; the executor maps it read-only and lays
tensors over it. The table that says where each tensor lies comes from another process, so every entry is checked before
its view is made.
"""

import math
import mmap
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tie.bones.errors import ArenaError

ALIGNMENT = 64
"""Offsets of tensors are multiples of this: one cache line, and the widest vector register."""

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "u8": torch.uint8}
"""The dtypes that a tensor table may name."""

_MAX_RANK = 8


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies.

    Attributes:
        name: canonical name of the tensor (Hugging Face's, for a Llama).
        dtype: a key of `DTYPES`.
        shape: sizes of its dimensions, outermost first.
        offset: first byte in the arena; a multiple of `ALIGNMENT`.
        bytes: length; must equal what dtype and shape make.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


def tensor_views(buffer: memoryview | mmap.mmap, entries: Iterable[TensorEntry]) -> dict[str, torch.Tensor]:
    """Lays tensors over `buffer`, which may be a read-only mapping, without copying.

    The views keep `buffer` alive. Over a read-only mapping they are for reading: the kernel kills a process that writes
    through one (SIGSEGV), which is what sealed weights are for.

    Raises:
        ArenaError: an entry is out of bounds, misaligned, of an unknown dtype, of a length that its shape does not
            make, or named twice; or the buffer is not contiguous or not aligned.
    """
    arena = _as_bytes(buffer)
    views: dict[str, torch.Tensor] = {}
    for entry in entries:
        if entry.name in views:
            raise ArenaError("a tensor is named twice")
        _check(entry, arena.numel())
        dtype = DTYPES[entry.dtype]
        views[entry.name] = arena[entry.offset : entry.offset + entry.bytes].view(dtype).view(entry.shape)
    return views


def _check(entry: TensorEntry, arena_bytes: int) -> None:
    if entry.dtype not in DTYPES:
        raise ArenaError("a tensor has an unknown dtype")
    if len(entry.shape) > _MAX_RANK or any(size <= 0 for size in entry.shape):
        raise ArenaError("a tensor has an impossible shape")
    # Python's integers do not overflow, so the product is exact however large a hostile table makes it.
    if entry.bytes != math.prod(entry.shape) * DTYPES[entry.dtype].itemsize:
        raise ArenaError("a tensor's length is not what its shape and dtype make")
    if entry.offset < 0 or entry.offset % ALIGNMENT:
        raise ArenaError("a tensor is not aligned")
    if entry.offset + entry.bytes > arena_bytes:
        raise ArenaError("a tensor reaches beyond the arena")


def _as_bytes(buffer: memoryview | mmap.mmap) -> torch.Tensor:
    """The whole buffer as one uint8 tensor.

    Torch cannot mark a tensor read-only, so it warns of every buffer that is. The promise not to write is given here
    instead, by `_Window`.
    """
    view = memoryview(buffer)
    if not view.c_contiguous or view.nbytes == 0:
        raise ArenaError("the arena must be contiguous and not empty")
    source = np.frombuffer(view, dtype=np.uint8)
    if source.ctypes.data % ALIGNMENT:
        raise ArenaError("the arena is not aligned")
    return torch.from_numpy(np.asarray(_Window(source)))


class _Window:
    """The memory of an array, described (numpy's array interface) as writable, and kept alive as long as it is used."""

    def __init__(self, source: npt.NDArray[np.uint8]) -> None:
        self._source = source
        self.__array_interface__ = source.__array_interface__ | {"data": (source.ctypes.data, False)}
