"""tensors.json of a bundle: where each tensor lies in the weight files and how it is stored; and reading rows of it.

Written when the bundle is made, so that the model owner needs no reader of the source format: it maps the files and
converts. Names are Hugging Face's; shapes are row-major [rows, columns], as PyTorch writes them.
"""

from collections.abc import Iterable
from typing import Annotated, Final, Literal

import gguf
import gguf.quants
import msgspec
import numpy as np
import numpy.typing as npt

from tie.assets.bundle import Bundle
from tie.assets.manifest import TENSORS_FILE, Architecture, FileName, Positive
from tie.bones.errors import BonesError
from tie.bones.native.packing import Groups
from tie.bones.vision.config import VisionConfig, vision_shapes
from tie.daemon.errors import BundleError

Float32 = npt.NDArray[np.float32]
Raw = npt.NDArray[np.uint8]

_PLAIN: Final = {"f32": 4, "f16": 2, "bf16": 2}
# GGUF's block formats that the gguf library dequantizes in NumPy.
_QUANTIZED: Final = {
    name.lower(): gguf.GGMLQuantizationType[name]
    for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
}


class StoredTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One tensor in a weight file.

    Attributes:
        file: which of the bundle's weight files.
        encoding: "f32", "f16", "bf16", or a GGUF block format such as "q4_1".
        shape: [rows, columns], or [columns] for a vector.
        offset: of its first byte in the file.
        bytes: how many it has there.
        interleaved_heads: zero, or the number of heads whose rows are stored pairwise, as llama.cpp's rotary embedding
            wants them: row 2i of a head is Hugging Face's row i, row 2i+1 its row i + head_dim/2.
    """

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._]{1,200}\Z")]
    file: FileName
    encoding: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9_]{1,16}\Z")]
    shape: Annotated[tuple[Positive, ...], msgspec.Meta(min_length=1, max_length=2)]
    offset: Annotated[int, msgspec.Meta(ge=0)]
    bytes: Annotated[int, msgspec.Meta(ge=1)]
    interleaved_heads: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0

    @property
    def rows(self) -> int:
        """How many rows; a vector is one row."""
        return 1 if len(self.shape) == 1 else self.shape[0]

    @property
    def columns(self) -> int:
        """Values in a row."""
        return self.shape[-1]


class TensorIndex(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole of tensors.json."""

    version: Literal[1] = 1
    tensors: tuple[StoredTensor, ...]


def stored_bytes(encoding: str, rows: int, columns: int) -> int:
    """Size of a tensor in its file.

    Raises:
        BundleError: the encoding is not supported, or the columns are no whole number of blocks.
    """
    if encoding in _PLAIN:
        return rows * columns * _PLAIN[encoding]
    if encoding not in _QUANTIZED:
        raise BundleError(f"weights stored as {encoding} are not supported")
    block, size = gguf.GGML_QUANT_SIZES[_QUANTIZED[encoding]]
    if columns % block:
        raise BundleError(f"rows of {columns} values are no whole number of {encoding} blocks")
    return rows * (columns // block) * size


def read_rows(tensor: StoredTensor, raw: Raw, start: int, stop: int) -> Float32:
    """Rows `start` to `stop` in Hugging Face's order.

    Args:
        tensor: what is read.
        raw: its bytes in the file, [tensor.bytes], uint8.
        start: first row.
        stop: one past the last row.

    Returns:
        [stop - start, columns], float32; may be a read-only view of `raw`.
    """
    picked = _picked(tensor, raw, start, stop)
    values: Float32
    if tensor.encoding == "f32":
        values = picked.view(np.dtype("<f4"))
    elif tensor.encoding == "f16":
        values = picked.view(np.dtype("<f2")).astype(np.float32)
    elif tensor.encoding == "bf16":
        values = (picked.view(np.dtype("<u2")).astype(np.uint32) << 16).view(np.float32)
    else:
        values = gguf.quants.dequantize(picked, _QUANTIZED[tensor.encoding])
    return values


def read_groups(tensor: StoredTensor, raw: Raw, start: int, stop: int) -> Groups | None:
    """Rows `start` to `stop` in Hugging Face's order, exactly as stored; None where they are not in groups of 32.

    Args:
        tensor: what is read.
        raw: its bytes in the file, [tensor.bytes], uint8.
        start: first row.
        stop: one past the last row.
    """
    if tensor.encoding not in ("q4_0", "q4_1", "q8_0"):
        return None
    picked = _picked(tensor, raw, start, stop)
    blocks = np.ascontiguousarray(picked).reshape(len(picked), tensor.columns // 32, -1)
    scales = blocks[..., :2].copy().view("<f2")[..., 0]
    if tensor.encoding == "q8_0":
        return Groups(blocks[..., 2:].copy().view(np.int8), scales, None)
    nibbles = blocks[..., -16:]
    codes = np.concatenate((nibbles & 15, nibbles >> 4), axis=-1)
    if tensor.encoding == "q4_0":
        return Groups(codes, scales, scales * np.float16(-8))
    return Groups(codes, scales, blocks[..., 2:4].copy().view("<f2")[..., 0])


def _picked(tensor: StoredTensor, raw: Raw, start: int, stop: int) -> Raw:
    """Stored rows, [stop - start, bytes of a row], in Hugging Face's order."""
    table = raw.reshape(tensor.rows, tensor.bytes // tensor.rows)
    if tensor.interleaved_heads:
        picked: Raw = table[_stored_rows(tensor.rows, tensor.interleaved_heads)[start:stop]]
        return picked
    return table[start:stop]


def _stored_rows(rows: int, heads: int) -> npt.NDArray[np.intp]:
    """For each row in Hugging Face's order, which stored row it is."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(rows)


def expected_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model of this architecture has, by its Hugging Face name."""
    hidden, inner = architecture.hidden_size, architecture.intermediate_size
    queries = architecture.num_heads * architecture.head_dim
    keys = architecture.num_kv_heads * architecture.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (architecture.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not architecture.tie_word_embeddings:
        shapes["lm_head.weight"] = (architecture.vocab_size, hidden)
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if architecture.attention_bias:
        layer |= {
            "self_attn.q_proj.bias": (queries,),
            "self_attn.k_proj.bias": (keys,),
            "self_attn.v_proj.bias": (keys,),
        }
        if architecture.kind != "qwen2":
            layer["self_attn.o_proj.bias"] = (hidden,)
    if architecture.qk_norm:
        layer["self_attn.q_norm.weight"] = (architecture.head_dim,)
        layer["self_attn.k_norm.weight"] = (architecture.head_dim,)
    for number in range(architecture.num_layers):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    if architecture.vision:
        shapes |= vision_shapes(VisionConfig(**msgspec.structs.asdict(architecture.vision)), hidden)
    return shapes


def check_tensors(architecture: Architecture, tensors: Iterable[StoredTensor], sizes: dict[str, int]) -> None:
    """Checks that `tensors` are exactly what the architecture has, and lie within their files.

    Args:
        architecture: of the model.
        tensors: where its tensors are said to lie.
        sizes: bytes of each weight file.

    Raises:
        BundleError: one is missing, unexpected, repeated, or has another shape, size or place than it can have; or the
            vision tower's numbers contradict one another.
    """
    try:
        expected = expected_shapes(architecture)
    except BonesError as error:
        raise BundleError(f"the model's configuration: {error}") from error
    for tensor in tensors:
        shape = expected.pop(tensor.name, None)
        if shape is None:
            raise BundleError(f"tensor {tensor.name} has no place in a {architecture.kind} model")
        if shape != tensor.shape:
            raise BundleError(f"tensor {tensor.name} has shape {list(tensor.shape)}, not {list(shape)}")
        if tensor.bytes != stored_bytes(tensor.encoding, tensor.rows, tensor.columns):
            raise BundleError(f"tensor {tensor.name} has a size that its encoding cannot have")
        if tensor.offset + tensor.bytes > sizes.get(tensor.file, 0):
            raise BundleError(f"tensor {tensor.name} reaches over the end of its file")
        if tensor.interleaved_heads and tensor.rows % (2 * tensor.interleaved_heads):
            raise BundleError(f"tensor {tensor.name} cannot have {tensor.interleaved_heads} heads")
    if expected:
        raise BundleError(
            f"tensor {min(expected)} is missing" + (f", and {len(expected) - 1} more" * (len(expected) > 1))
        )


def load_index(bundle: Bundle) -> TensorIndex:
    """The bundle's tensors.json, checked against its manifest.

    Raises:
        BundleError: damaged, or not a table of this model's tensors.
    """
    try:
        index = msgspec.json.decode(bundle.read(TENSORS_FILE), type=TensorIndex)
    except msgspec.MsgspecError as error:
        raise BundleError(f"{TENSORS_FILE}: {error}") from error
    manifest = bundle.manifest
    check_tensors(manifest.architecture, index.tensors, {name: manifest.files[name].bytes for name in manifest.weights})
    return index
