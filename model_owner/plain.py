"""Packing for PyTorch: each tensor as it is, under its own name. Matrices and biases have one dtype, norms float32."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from model_owner.arena import Arena
from model_owner.source import PIECE_VALUES, Source
from tie.assets.tensors import Float32

_WIDTH: Final = {"f32": 4, "bf16": 2}

Dtype = Literal["f32", "bf16"]
Words = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class PlainTensor:
    """See `source.Packed`."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """See `source.Packed`."""
        return int(np.prod(self.shape)) * _WIDTH[self.dtype]

    def fill(self, source: Source, arena: Arena, offset: int) -> None:
        """See `source.Packed`."""
        tensor = source.tensors[self.name]
        row_bytes = tensor.columns * _WIDTH[self.dtype]
        step = max(1, PIECE_VALUES // tensor.columns)
        for start in range(0, tensor.rows, step):
            stop = min(start + step, tensor.rows)
            values = source.rows(self.name, start, stop)
            with arena.piece(offset + start * row_bytes, (stop - start) * row_bytes) as piece:
                _store(values, piece, self.dtype)


def plan(source: Source, dtype: Dtype) -> Sequence[PlainTensor]:
    """The packed tensors, in the order of the files."""
    return [
        PlainTensor(name, "f32" if name.endswith("norm.weight") else dtype, tensor.shape)
        for name, tensor in source.tensors.items()
    ]


def _store(values: Float32, piece: memoryview, dtype: Dtype) -> None:
    if dtype == "bf16":
        round_to_bf16(values, np.frombuffer(piece, np.uint16))
    else:
        np.copyto(np.frombuffer(piece, np.float32), values.reshape(-1))


def round_to_bf16(values: Float32, out: Words) -> None:
    """Rounds to the nearest bfloat16, ties to even.

    Args:
        values: finite, any shape.
        out: as many 16-bit words; gets the upper halves of the rounded float32.
    """
    bits = values.reshape(-1).view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    np.copyto(out, rounded, casting="unsafe")
