"""How the native executor wants the weights: which packed tensors there are, and how rows become tiles.

The model owner packs with this; `model.h` describes the same tiles to the kernels. NumPy only.

A layout is made of matrices, in tiles of 16 output rows whose numbers lie in the order in which the kernels read them,
and of float32 vectors. Matrices that are multiplied with the same activations are one: queries, keys and values; gate
and up projection, a tile of each in turn.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from tie.bones.config import ModelConfig
from tie.bones.errors import WeightsError

Weights = Literal["q4", "q8", "bf16"]
"""How a matrix is stored: 4 bits with scale and minimum per 32 values, 8 bits with a scale per 32, or bfloat16."""

WeightsOf = Callable[[tuple[str, ...]], Weights]
"""How a matrix is to be stored, by the names of the tensors that it is made of."""

TILE_ROWS: Final = 16
GROUP: Final = 32
FORMATS: Final[dict[Weights, int]] = {"bf16": 0, "q4": 1, "q8": 2}

Array = npt.NDArray[np.generic]
Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]
Words = npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Groups:
    """Rows whose values share a scale, and perhaps a minimum, by groups of 32: value = scale * code + minimum.

    Attributes:
        codes: `[rows, groups, 32]`; uint8 from 0 to 15 with minima, int8 without.
        scales: `[rows, groups]`.
        minima: `[rows, groups]`, or None: zero.
    """

    codes: npt.NDArray[np.uint8] | npt.NDArray[np.int8]
    scales: Halves
    minima: Halves | None


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """One matrix of a layout.

    Attributes:
        name: in the owner's table.
        weights: how it is stored.
        sources: names of the tensors that it is made of, with the same columns.
        order: `[rows]` int64, a multiple of 16: for each row its place in the sources laid one after another, or -1
            for a row of zeros.
        columns: of the sources.
    """

    name: str
    weights: Weights
    sources: tuple[str, ...]
    order: npt.NDArray[np.int64]
    columns: int

    @property
    def tiles(self) -> int:
        """How many."""
        return len(self.order) // TILE_ROWS

    @property
    def tile_bytes(self) -> int:
        """Size of one, a multiple of 64."""
        groups = -(-self.columns // GROUP)
        values = groups * GROUP * TILE_ROWS
        match self.weights:
            case "bf16":
                return values * 2
            case "q4":
                return values // 2 + groups * 4 * TILE_ROWS
            case "q8":
                return -(-(values + groups * 2 * TILE_ROWS) // 64) * 64

    @property
    def bytes(self) -> int:
        """Size of all tiles."""
        return self.tiles * self.tile_bytes

    def weights_of(self, size: int) -> Weights | None:
        """How it is stored when it has `size` bytes; None: it cannot have."""
        return next((weights for weights in FORMATS if replace(self, weights=weights).bytes == size), None)


@dataclass(frozen=True)
class PackedVector:
    """One vector of a layout: its sources one after another, float32, padded with zeros to a multiple of 32.

    Attributes:
        name: in the owner's table.
        sources: names of the tensors that it is made of.
        count: values, with padding.
    """

    name: str
    sources: tuple[str, ...]
    count: int

    @property
    def bytes(self) -> int:
        """Size."""
        return self.count * 4

    def weights_of(self, size: int) -> Weights | None:
        """As of a matrix: vectors are stored in one way only, and it does not matter which is named."""
        return "bf16" if self.bytes == size else None


def layout(config: ModelConfig, weights: Weights | WeightsOf) -> Iterator[PackedMatrix | PackedVector]:
    """All packed tensors of a model, in the order in which a forward step reads them.

    The embedding, which most models use as the output matrix too, never has less than 8 bits: it costs little there
    and decides between tokens.
    """
    hidden, dim = config.hidden_size, config.head_dim
    queries, keys = config.num_heads * dim, config.num_kv_heads * dim

    def matrix(
        name: str, sources: tuple[str, ...], order: npt.NDArray[np.int64], columns: int, *, large: bool = False
    ) -> PackedMatrix:
        stored = weights if isinstance(weights, str) else weights(sources)
        return PackedMatrix(name, "q8" if large and stored == "q4" else stored, sources, order, columns)

    tokens = _straight(config.vocab_size)
    yield matrix("embedding", ("model.embed_tokens.weight",), tokens, hidden, large=True)
    for number in range(config.num_layers):
        source, name = f"model.layers.{number}.", f"layers.{number}."
        projections = tuple(f"{source}self_attn.{part}_proj" for part in "qkv")
        yield PackedVector(f"{name}attention_norm", (f"{source}input_layernorm.weight",), _padded(hidden))
        order = _headed(config.num_heads + 2 * config.num_kv_heads, dim)
        yield matrix(f"{name}qkv", tuple(f"{part}.weight" for part in projections), order, hidden)
        if config.attention_bias:
            biases = tuple(f"{part}.bias" for part in projections)
            yield PackedVector(f"{name}qkv_bias", biases, _padded(queries + 2 * keys))
        if config.qk_norm:
            yield PackedVector(f"{name}query_norm", (f"{source}self_attn.q_norm.weight",), _padded(dim))
            yield PackedVector(f"{name}key_norm", (f"{source}self_attn.k_norm.weight",), _padded(dim))
        yield matrix(f"{name}output", (f"{source}self_attn.o_proj.weight",), _straight(hidden), queries)
        if config.output_bias:
            yield PackedVector(f"{name}output_bias", (f"{source}self_attn.o_proj.bias",), _padded(hidden))
        yield PackedVector(f"{name}feed_forward_norm", (f"{source}post_attention_layernorm.weight",), _padded(hidden))
        gate_up = (f"{source}mlp.gate_proj.weight", f"{source}mlp.up_proj.weight")
        order = _alternating(config.intermediate_size)
        yield matrix(f"{name}gate_up", gate_up, order, hidden)
        down = (f"{source}mlp.down_proj.weight",)
        yield matrix(f"{name}down", down, _straight(hidden), config.intermediate_size)
    yield PackedVector("norm", ("model.norm.weight",), _padded(hidden))
    if not config.tie_word_embeddings:
        yield matrix("head", ("lm_head.weight",), tokens, hidden, large=True)


def _padded(count: int) -> int:
    return -(-count // GROUP) * GROUP


def _straight(rows: int) -> npt.NDArray[np.int64]:
    order = np.full(-(-rows // TILE_ROWS) * TILE_ROWS, -1, dtype=np.int64)
    order[:rows] = np.arange(rows)
    return order


def _headed(heads: int, dim: int) -> npt.NDArray[np.int64]:
    """Heads of `dim` rows, each in tiles of its own."""
    order = np.full((heads, -(-dim // TILE_ROWS) * TILE_ROWS), -1, dtype=np.int64)
    order[:, :dim] = np.arange(heads * dim).reshape(heads, dim)
    return order.reshape(-1)


def _alternating(rows: int) -> npt.NDArray[np.int64]:
    """Two matrices of `rows` rows, a tile of the first and a tile of the second in turn, to whole groups of 32 rows."""
    first = np.full(_padded(rows), -1, dtype=np.int64)
    first[:rows] = np.arange(rows)
    second = np.where(first < 0, -1, first + rows)
    both = np.stack((first.reshape(-1, TILE_ROWS), second.reshape(-1, TILE_ROWS)), axis=1)
    order: npt.NDArray[np.int64] = both.reshape(-1)
    return order


def quantize(values: Floats, weights: Weights) -> Groups:
    """Rounds rows to 4 or 8 bits.

    Args:
        values: `[rows, columns]`, finite; columns a multiple of 32.
        weights: "q4" or "q8".

    Raises:
        WeightsError: a value is too large for a scale in half precision.
    """
    groups = values.reshape(len(values), -1, GROUP)
    with np.errstate(over="ignore"):  # seen below
        if weights == "q8":
            scales = (np.abs(groups).max(axis=-1) / np.float32(127)).astype(np.float16)
            minima = None
        else:
            low, high = groups.min(axis=-1), groups.max(axis=-1)
            scales, minima = ((high - low) / np.float32(15)).astype(np.float16), low.astype(np.float16)
    # The codes are fitted to the scales as they are stored.
    step = np.where(scales > 0, scales, np.float16(1)).astype(np.float32)[..., None]
    if minima is None:
        codes: Array = np.clip(np.rint(groups / step), -127, 127).astype(np.int8)
    else:
        codes = np.clip(np.rint((groups - minima.astype(np.float32)[..., None]) / step), 0, 15).astype(np.uint8)
    if not np.isfinite(scales).all() or (minima is not None and not np.isfinite(minima).all()):
        raise WeightsError("a weight is too large to be stored in few bits")
    return Groups(codes, scales, minima)  # type: ignore[arg-type]  # which of the two it is was decided together


def tiles_of_groups(groups: Groups) -> Bytes:
    """Rows as tiles, `[rows / 16, tile_bytes]`; rows a multiple of 16."""
    rows = len(groups.codes)
    if groups.minima is None:
        codes = groups.codes.reshape(rows, -1).view(np.uint8)
        scales = groups.scales.reshape(-1, TILE_ROWS, 1, groups.scales.shape[1])
    else:
        # A byte holds a value (low nibble) and the one four places on (high nibble).
        halves = groups.codes.reshape(rows, -1, 2, 4)
        codes = (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(rows, -1).view(np.uint8)
        both = np.stack((groups.scales, groups.minima), axis=1)
        scales = both.reshape(-1, TILE_ROWS, 2, both.shape[-1])
    parts = (
        _interleaved(codes),
        np.ascontiguousarray(scales.transpose(0, 3, 2, 1)).reshape(len(scales), -1).view(np.uint8),
    )
    size = sum(part.shape[1] for part in parts)
    tiles = np.zeros((rows // TILE_ROWS, -(-size // 64) * 64), dtype=np.uint8)
    np.concatenate(parts, axis=1, out=tiles[:, :size])
    return tiles


def tiles_of_bf16(values: npt.NDArray[np.uint16]) -> Bytes:
    """Rows of bfloat16 as tiles, `[rows / 16, tile_bytes]`; rows a multiple of 16, columns of 32."""
    return _interleaved(values.view(np.uint8))


def _interleaved(rows: Bytes) -> Bytes:
    """Tiles of 16 rows, `[tiles, 16 * row_bytes]`: four bytes of each row in turn, as an instruction takes them."""
    words = np.ascontiguousarray(rows).view(np.uint32).reshape(-1, TILE_ROWS, rows.shape[1] // 4)
    return np.ascontiguousarray(words.transpose(0, 2, 1)).reshape(len(words), -1).view(np.uint8)
