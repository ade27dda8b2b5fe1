"""Packing for bones' native step: matrices in tiles, in 4 or 8 bits or bfloat16; see `tie.bones.native.packing`.

4- and 8-bit groups that the file already has are taken over as they are; everything else is rounded from float32.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from model_owner.arena import Arena
from model_owner.plain import round_to_bf16
from model_owner.source import PIECE_VALUES, Packed, Source
from tie.assets.manifest import Architecture
from tie.assets.tensors import Float32
from tie.bones.config import ModelConfig
from tie.bones.errors import BonesError
from tie.bones.native.packing import (
    GROUP,
    TILE_ROWS,
    Bytes,
    Groups,
    PackedMatrix,
    PackedVector,
    Weights,
    WeightsOf,
    layout,
    quantize,
    tiles_of_bf16,
    tiles_of_groups,
)
from tie.daemon.errors import BundleError

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Tiles:
    """A packed matrix; see `source.Packed`."""

    matrix: PackedMatrix

    dtype = "u8"

    @property
    def name(self) -> str:
        """See `source.Packed`."""
        return self.matrix.name

    @property
    def shape(self) -> tuple[int, ...]:
        """See `source.Packed`."""
        return (self.matrix.bytes,)

    @property
    def bytes(self) -> int:
        """See `source.Packed`."""
        return self.matrix.bytes

    def fill(self, source: Source, arena: Arena, offset: int) -> None:
        """See `source.Packed`."""
        matrix = self.matrix
        step = max(1, PIECE_VALUES // (matrix.columns * TILE_ROWS))
        for first in range(0, matrix.tiles, step):
            order = matrix.order[first * TILE_ROWS : (first + step) * TILE_ROWS]
            tiles = self._tiles(source, order)
            with arena.piece(offset + first * matrix.tile_bytes, tiles.nbytes) as piece:
                np.copyto(np.frombuffer(piece, np.uint8), tiles.reshape(-1))

    def _tiles(self, source: Source, order: Rows) -> Bytes:
        columns = -(-self.matrix.columns // GROUP) * GROUP
        if self.matrix.weights == "bf16":
            words = np.zeros((len(order), columns), dtype=np.uint16)
            for name, rows, start in self._runs(source, order):
                values = source.rows(name, start, start + len(rows))
                rounded = np.empty(values.shape, dtype=np.uint16)
                round_to_bf16(values, rounded.reshape(-1))
                words[rows, : values.shape[1]] = rounded
            return tiles_of_bf16(words)
        four, shape = self.matrix.weights == "q4", (len(order), columns // GROUP)
        codes: Any = np.zeros((*shape, GROUP), dtype=np.uint8 if four else np.int8)
        scales = np.zeros(shape, dtype=np.float16)
        minima = np.zeros(shape, dtype=np.float16) if four else None
        for name, rows, start in self._runs(source, order):
            groups = source.groups(name, start, start + len(rows))
            if groups is None or (groups.minima is None) == four:
                groups = self._quantized(name, source.rows(name, start, start + len(rows)), columns)
            codes[rows], scales[rows] = groups.codes, groups.scales
            if minima is not None and groups.minima is not None:
                minima[rows] = groups.minima
        return tiles_of_groups(Groups(codes, scales, minima))

    def _quantized(self, name: str, values: Float32, columns: int) -> Groups:
        if values.shape[1] < columns:
            values = np.pad(values, ((0, 0), (0, columns - values.shape[1])))
        try:
            return quantize(values, self.matrix.weights)
        except BonesError as error:
            raise BundleError(f"tensor {name}: {error}") from error

    def _runs(self, source: Source, order: Rows) -> Iterator[tuple[str, Rows, int]]:
        """For each run of rows in `order`: the tensor, the places in `order`, the first row in the tensor."""
        base = 0
        for name in self.matrix.sources:
            count = source.tensors[name].rows
            places = np.flatnonzero((order >= base) & (order < base + count))
            if len(places):  # an order takes each source's rows one after another
                yield name, places, int(order[places[0]]) - base
            base += count


@dataclass(frozen=True)
class Padded:
    """A packed vector; see `source.Packed`."""

    vector: PackedVector

    dtype = "f32"

    @property
    def name(self) -> str:
        """See `source.Packed`."""
        return self.vector.name

    @property
    def shape(self) -> tuple[int, ...]:
        """See `source.Packed`."""
        return (self.vector.count,)

    @property
    def bytes(self) -> int:
        """See `source.Packed`."""
        return self.vector.bytes

    def fill(self, source: Source, arena: Arena, offset: int) -> None:
        """See `source.Packed`."""
        values = np.concatenate([source.rows(name, 0, 1).reshape(-1) for name in self.vector.sources])
        with arena.piece(offset, self.bytes) as piece:
            np.frombuffer(piece, np.float32)[: len(values)] = values


def plan(architecture: Architecture, weights: Weights | WeightsOf) -> Sequence[Packed]:
    """The packed tensors of a model.

    Raises:
        BundleError: bones cannot run such a model.
    """
    try:
        config = ModelConfig.from_json(msgspec.json.encode(architecture))
    except BonesError as error:
        raise BundleError(f"the model's architecture: {error}") from error
    return [Tiles(item) if isinstance(item, PackedMatrix) else Padded(item) for item in layout(config, weights)]


def as_stored(source: Source) -> WeightsOf:
    """For each matrix what loses nothing, or hardly anything, of how the bundle's files store its tensors."""

    def weights(names: tuple[str, ...]) -> Weights:
        encodings = {source.tensors[name].encoding for name in names}
        if encodings <= {"q4_0", "q4_1"}:
            return "q4"
        # Formats of more than 4 bits, or with scales of scales: 8 bits hold them closely.
        return "bf16" if encodings & {"f32", "f16", "bf16"} else "q8"

    return weights
