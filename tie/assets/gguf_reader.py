"""A model from a GGUF file: architecture, tokenizer and the place of every tensor. Weights are not touched here."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import gguf
import msgspec

from tie.assets.gguf_tokenizer import array, build_tokenizer, tokenizer_info
from tie.assets.manifest import Architecture
from tie.assets.source import ModelSource
from tie.assets.tensors import StoredTensor, stored_bytes
from tie.daemon.errors import BundleError

WEIGHTS_FILE: Final = "model.gguf"
_KINDS: Final = ("llama", "qwen2", "qwen3")
_USE_DIRECTORY: Final = "make the bundle from the model's Hugging Face directory instead"

_OUTER: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER: Final = re.compile(r"blk\.(\d{1,4})\.([a-z_]+)\.(weight|bias)")


def read_gguf(path: Path) -> ModelSource:
    """Reads everything but the weights.

    Raises:
        BundleError: not a GGUF file, or a model that is not supported.
    """
    try:
        reader = gguf.GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
        tensors = list(reader.tensors)
    except OSError as error:
        raise BundleError(f"cannot read {path}: {error.strerror}") from error
    except Exception as error:  # the library lets NumPy's and its own errors through
        raise BundleError(f"{path} is not a GGUF file, or is cut off") from error
    names = {tensor.name for tensor in tensors}
    architecture = _architecture(metadata, names)
    template = metadata.get("tokenizer.chat_template")
    return ModelSource(
        name=model_id(str(metadata.get("general.name") or path.stem)),
        architecture=architecture,
        tokenizer=tokenizer_info(metadata),
        tokenizer_json=build_tokenizer(metadata),
        chat_template=template if isinstance(template, str) else None,
        weights={WEIGHTS_FILE: path},
        weights_format="gguf",
        tensors=tuple(_stored(tensor, architecture) for tensor in tensors),
    )


def model_id(name: str) -> str:
    """A model id out of a free-form name: lower case, words joined by hyphens."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.")[:96].strip("-.") or "model"


def _architecture(metadata: Mapping[str, Any], names: set[str]) -> Architecture:
    kind = metadata.get("general.architecture")
    if kind not in _KINDS:
        raise BundleError(f"GGUF architecture {str(kind)[:40]!r} is not supported: {', '.join(_KINDS)} are")
    if "rope_freqs.weight" in names or metadata.get(f"{kind}.rope.scaling.type", "none") != "none":
        raise BundleError("a GGUF file with scaled rotary embeddings is not supported", hint=_USE_DIRECTORY)

    def value(key: str, default: Any = None) -> Any:
        found = metadata.get(f"{kind}.{key}", default)
        if found is None:
            raise BundleError(f"the GGUF file has no {kind}.{key}")
        return found

    heads = value("attention.head_count")
    head_dim = value("attention.key_length", value("embedding_length") // heads)
    if value("rope.dimension_count", head_dim) != head_dim:
        raise BundleError("a GGUF file with rotary embeddings on a part of the head is not supported")
    fields = {
        "kind": kind,
        "hidden_size": value("embedding_length"),
        "intermediate_size": value("feed_forward_length"),
        "num_layers": value("block_count"),
        "num_heads": heads,
        "num_kv_heads": value("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": len(array(metadata, "tokenizer.ggml.tokens", str)),
        "context_tokens": value("context_length"),
        # Stored as float32: seven digits are what was written, the rest is noise of the conversion.
        "rms_norm_eps": float(f"{value('attention.layer_norm_rms_epsilon'):.7g}"),
        "rope_theta": float(value("rope.freq_base", 10000.0)),
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": "blk.0.attn_q.bias" in names,
        "qk_norm": "blk.0.attn_q_norm.weight" in names,
        "sliding_window": metadata.get(f"{kind}.attention.sliding_window"),
    }
    try:
        return msgspec.convert(fields, Architecture)
    except msgspec.ValidationError as error:
        raise BundleError(f"the GGUF file describes an impossible model: {error}") from error


def _stored(tensor: gguf.ReaderTensor, architecture: Architecture) -> StoredTensor:
    name = _hugging_face_name(tensor.name)
    shape = tuple(int(size) for size in reversed(tensor.shape.tolist()))
    encoding = tensor.tensor_type.name.lower()
    heads = 0
    if architecture.kind == "llama":
        # Only llama-architecture files have their query and key rows rearranged.
        heads = {
            "q_proj": architecture.num_heads,
            "k_proj": architecture.num_kv_heads,
        }.get(name.split(".")[-2], 0)
        if heads and name.endswith(".bias"):
            raise BundleError("a llama GGUF file with attention biases is not supported", hint=_USE_DIRECTORY)
    if len(shape) > 2:
        raise BundleError(f"tensor {name} has {len(shape)} dimensions")
    return StoredTensor(
        name=name,
        file=WEIGHTS_FILE,
        encoding=encoding,
        shape=shape,
        offset=int(tensor.data_offset),
        bytes=stored_bytes(encoding, 1 if len(shape) == 1 else shape[0], shape[-1]),
        interleaved_heads=heads,
    )


def _hugging_face_name(name: str) -> str:
    if name in _OUTER:
        return _OUTER[name]
    found = _LAYER.fullmatch(name)
    part = _IN_LAYER.get(found[2]) if found else None
    if found is None or part is None:
        raise BundleError(f"tensor {name[:80]!r} has no place in a supported model")
    return f"model.layers.{found[1]}.{part}.{found[3]}"
