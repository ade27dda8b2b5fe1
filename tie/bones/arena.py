"""Tensors as views into an arena that somebody else owns, without a copy.

The model owner packs all weights of a model into one memfd and seals it; the executor maps it read-only and lays
tensors over it. The table that says where each tensor lies comes from another process, so every entry is checked before
its view is made. PyTorch is loaded for its tensors only.
"""

import math
import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from tie.bones.errors import ArenaError

if TYPE_CHECKING:
    import torch

Bytes = npt.NDArray[np.uint8]

ALIGNMENT = 64
"""Offsets of tensors are multiples of this: one cache line, and the widest vector register."""

WIDTHS: Final = {"f32": 4, "bf16": 2, "f16": 2, "u8": 1}
"""The dtypes that a tensor table may name, with their bytes."""

_MAX_RANK = 8


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies.

    Attributes:
        name: canonical name of the tensor (Hugging Face's, for a Llama).
        dtype: a key of `WIDTHS`.
        shape: sizes of its dimensions, outermost first.
        offset: first byte in the arena; a multiple of `ALIGNMENT`.
        bytes: length; must equal what dtype and shape make.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


def byte_views(buffer: memoryview | mmap.mmap, entries: Iterable[TensorEntry]) -> dict[str, Bytes]:
    """The bytes of each tensor in `buffer`, which may be a read-only mapping, without copying.

    The views keep `buffer` alive.

    Raises:
        ArenaError: an entry is out of bounds, misaligned, of an unknown dtype, of a length that its shape does not
            make, or named twice; or the buffer is not contiguous or not aligned.
    """
    arena = _as_bytes(buffer)
    views: dict[str, Bytes] = {}
    for entry in entries:
        if entry.name in views:
            raise ArenaError("a tensor is named twice")
        _check(entry, len(arena))
        views[entry.name] = arena[entry.offset : entry.offset + entry.bytes]
    return views


def tensor_views(buffer: memoryview | mmap.mmap, entries: Iterable[TensorEntry]) -> "dict[str, torch.Tensor]":
    """The same as tensors of PyTorch's, with their dtypes and shapes.

    Over a read-only mapping they are for reading: the kernel kills a process that writes through one (SIGSEGV), which
    is what sealed weights are for.

    Raises:
        ArenaError: as `byte_views`.
    """
    import torch

    dtypes = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "u8": torch.uint8}
    known = list(entries)
    views = byte_views(buffer, known)
    # Torch cannot mark a tensor read-only, so it warns of every buffer that is: `_Window` promises not to write.
    return {
        entry.name: torch.from_numpy(np.asarray(_Window(views[entry.name]))).view(dtypes[entry.dtype]).view(entry.shape)
        for entry in known
    }


def _check(entry: TensorEntry, arena_bytes: int) -> None:
    if entry.dtype not in WIDTHS:
        raise ArenaError("a tensor has an unknown dtype")
    if len(entry.shape) > _MAX_RANK or any(size <= 0 for size in entry.shape):
        raise ArenaError("a tensor has an impossible shape")
    # Python's integers do not overflow, so the product is exact however large a hostile table makes it.
    if entry.bytes != math.prod(entry.shape) * WIDTHS[entry.dtype]:
        raise ArenaError("a tensor's length is not what its shape and dtype make")
    if entry.offset < 0 or entry.offset % ALIGNMENT:
        raise ArenaError("a tensor is not aligned")
    if entry.offset + entry.bytes > arena_bytes:
        raise ArenaError("a tensor reaches beyond the arena")


def _as_bytes(buffer: memoryview | mmap.mmap) -> Bytes:
    """The whole buffer."""
    view = memoryview(buffer)
    if not view.c_contiguous or view.nbytes == 0:
        raise ArenaError("the arena must be contiguous and not empty")
    source = np.frombuffer(view, dtype=np.uint8)
    if source.ctypes.data % ALIGNMENT:
        raise ArenaError("the arena is not aligned")
    return source


class _Window:
    """The memory of an array, described (numpy's array interface) as writable, and kept alive as long as it is used."""

    def __init__(self, source: npt.NDArray[np.uint8]) -> None:
        self._source = source
        self.__array_interface__ = source.__array_interface__ | {"data": (source.ctypes.data, False)}
