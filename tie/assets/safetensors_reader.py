"""A model from a Hugging Face directory: config.json, tokenizer.json, safetensors shards. Weights are not touched here.

The header of a shard is read here (8 bytes little-endian length, then JSON of dtype, shape and offsets), not by the
safetensors library: its NumPy side has no bfloat16, and the owner wants to know where in the file a tensor lies.
"""

import json
import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from tie.assets import vision_reader
from tie.assets.manifest import CHAT_TEMPLATE_FILE, SAFE_NAME, TOKENIZER_FILE, Architecture, TokenizerInfo
from tie.assets.source import ModelSource
from tie.assets.tensors import StoredTensor, expected_shapes
from tie.assets.tokenizer import Tokenizer
from tie.bones.errors import BonesError
from tie.daemon.errors import BundleError

_ENCODINGS: Final = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_MAX_HEADER: Final = 100 * 1024 * 1024  # the format's own limit
_LENGTH: Final = struct.Struct("<Q")
_KINDS: Final = ("llama", "qwen2", "qwen3", "mistral")
_ROPE_SCALINGS: Final = ("default", "linear", "llama3")


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_directory(path: Path) -> ModelSource:
    """Reads everything but the weights.

    Raises:
        BundleError: a file is missing or malformed, or the model is not supported.
    """
    config = _json(path / "config.json")
    shards = _shards(path)
    stored = [tensor for name, shard in shards.items() for tensor in read_header(name, shard)]
    images = None
    if config.get("model_type") in vision_reader.KINDS:
        stored = [msgspec.structs.replace(tensor, name=vision_reader.canonical(tensor.name)) for tensor in stored]
        text = vision_reader.text_config(config, tied=all(tensor.name != "lm_head.weight" for tensor in stored))
        processor = _processor(path)
        vision = vision_reader.vision_of(config, processor)
        images = vision_reader.images_of(config, processor, vision)
        architecture = msgspec.structs.replace(architecture_of(text), vision=vision)
        if images.token_id >= architecture.vocab_size:
            raise BundleError("config.json: the image token's id is outside the vocabulary")
        config = {**text, **{key: value for key, value in config.items() if key == "eos_token_id"}}
    else:
        architecture = architecture_of(config)
    try:
        tokenizer_json = (path / TOKENIZER_FILE).read_bytes()
    except OSError as error:
        raise BundleError(
            f"cannot read {path / TOKENIZER_FILE}: {error.strerror}",
            hint="save the tokenizer with transformers' fast tokenizers to get one",
        ) from error
    tokenizer_config = _json(path / "tokenizer_config.json", missing_is_empty=True)
    # Tied models may carry the output matrix, old ones the rotary frequencies, and vision towers layers and heads,
    # although none of these is used.
    wanted = _expected(architecture)
    tensors = tuple(tensor for tensor in stored if tensor.name in wanted)
    return ModelSource(
        name=re.sub(r"[^a-z0-9.]+", "-", path.resolve().name.lower()).strip("-.") or "model",
        architecture=architecture,
        tokenizer=_tokenizer_info(path, config, tokenizer_config, Tokenizer.from_json(tokenizer_json)),
        tokenizer_json=tokenizer_json,
        chat_template=_chat_template(path, tokenizer_config),
        weights=shards,
        weights_format="safetensors",
        tensors=tensors,
        images=images,
    )


def _expected(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    try:
        return expected_shapes(architecture)
    except BonesError as error:
        raise BundleError(f"config.json describes an impossible model: {error}") from error


def _processor(path: Path) -> dict[str, Any]:
    """The image processor's configuration, which has been in two files over the years."""
    whole = _json(path / "processor_config.json", missing_is_empty=True)
    inner = whole.get("image_processor")
    return inner if isinstance(inner, dict) else _json(path / "preprocessor_config.json", missing_is_empty=True)


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """The architecture that a config.json describes.

    Raises:
        BundleError: not supported, or impossible.
    """
    kind = config.get("model_type")
    if kind not in _KINDS:
        raise BundleError(f"model type {str(kind)[:40]!r} is not supported: {', '.join(_KINDS)} are")
    for key, plain in {"hidden_act": "silu", "mlp_bias": False, "use_sliding_window": False}.items():
        if config.get(key, plain) != plain:
            raise BundleError(f"models with {key} = {config[key]!r} are not supported")
    if config.get("quantization_config"):
        raise BundleError(
            "quantized safetensors are not supported", hint="take the model's unquantized release or GGUF"
        )
    heads = config.get("num_attention_heads", 0)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scaling = rope.get("rope_type", rope.get("type", "default"))
    if scaling not in _ROPE_SCALINGS:
        raise BundleError(f"rotary embeddings scaled by {str(scaling)[:40]!r} are not supported")
    fields = {
        "kind": kind,
        "hidden_size": config.get("hidden_size"),
        "intermediate_size": config.get("intermediate_size"),
        "num_layers": config.get("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config.get("hidden_size", 0) // max(heads, 1),
        "vocab_size": config.get("vocab_size"),
        "context_tokens": config.get("max_position_embeddings"),
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope_theta": float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        "rope_scaling": {key: value for key, value in rope.items() if key != "rope_theta"}
        if scaling != "default"
        else None,
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
        # Qwen2's configuration does not say what its architecture always has.
        "attention_bias": kind == "qwen2" or bool(config.get("attention_bias", False)),
        "qk_norm": kind == "qwen3",
        "sliding_window": config.get("sliding_window") if kind == "mistral" else None,
    }
    try:
        return msgspec.convert(fields, Architecture)
    except msgspec.ValidationError as error:
        raise BundleError(f"config.json describes an impossible model: {error}") from error


def _tokenizer_info(
    path: Path, config: Mapping[str, Any], tokenizer_config: Mapping[str, Any], tokenizer: Tokenizer
) -> TokenizerInfo:
    special: dict[str, str] = {}
    for variable in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = tokenizer_config.get(variable)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            special[variable] = text
    generation = _json(path / "generation_config.json", missing_is_empty=True)
    ends: list[int] = []
    for eos in (generation.get("eos_token_id"), config.get("eos_token_id")):
        ends += eos if isinstance(eos, list) else [eos] if isinstance(eos, int) else []
    eos_id = tokenizer.token_id(special["eos_token"]) if "eos_token" in special else None
    ends += [eos_id] if eos_id is not None else []
    if not ends:
        raise BundleError("the model names no end-of-sequence token")
    bos_id = tokenizer.token_id(special["bos_token"]) if "bos_token" in special else None
    return TokenizerInfo(
        bos_id=bos_id,
        add_bos=bos_id is not None and tokenizer.starts_with(bos_id),
        end_of_turn_ids=tuple(dict.fromkeys(ends)),
        special_tokens=special,
    )


def _chat_template(path: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    try:
        return (path / CHAT_TEMPLATE_FILE).read_text("utf-8")
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"cannot read {path / CHAT_TEMPLATE_FILE}") from error
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}.get(
            "default"
        )
    return template if isinstance(template, str) else None


def _shards(path: Path) -> dict[str, Path]:
    """Weight files by name."""
    index = _json(path / "model.safetensors.index.json", missing_is_empty=True)
    if index:
        names = sorted({str(name) for name in dict(index.get("weight_map", {})).values()})
    else:
        names = sorted(file.name for file in path.glob("*.safetensors"))
        if "model.safetensors" in names:
            names = ["model.safetensors"]
    if not names or any(not re.match(SAFE_NAME, name) for name in names):
        raise BundleError(f"{path} has no usable *.safetensors files")
    return {name: path / name for name in names}


def read_header(name: str, path: Path) -> list[StoredTensor]:
    """Where each tensor of a safetensors file lies.

    Raises:
        BundleError: it is none.
    """
    try:
        with path.open("rb") as stream:
            (length,) = _LENGTH.unpack(stream.read(_LENGTH.size))
            if length > _MAX_HEADER:
                raise BundleError(f"{path} is not a safetensors file")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        entries = msgspec.convert(header, dict[str, _Entry])
        start = _LENGTH.size + length
        return [
            msgspec.convert(
                {
                    "name": tensor,
                    "file": name,
                    "encoding": _ENCODINGS.get(entry.dtype, entry.dtype.lower()),
                    # The kernel of a vision tower's patches is a matrix to us: the same bytes.
                    "shape": entry.shape if len(entry.shape) <= 2 else (entry.shape[0], math.prod(entry.shape[1:])),
                    "offset": start + entry.data_offsets[0],
                    "bytes": entry.data_offsets[1] - entry.data_offsets[0],
                },
                StoredTensor,
            )
            for tensor, entry in entries.items()
        ]
    except OSError as error:
        raise BundleError(f"cannot read {path}: {error.strerror}") from error
    except (struct.error, ValueError, AttributeError) as error:
        raise BundleError(f"{path} is not a safetensors file of a supported model") from error


def _json(path: Path, *, missing_is_empty: bool = False) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        if missing_is_empty:
            return {}
        raise BundleError(f"{path} is missing", hint="a model directory has Hugging Face's layout") from error
    except OSError as error:
        raise BundleError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise BundleError(f"{path} is not JSON") from error
    if not isinstance(value, dict):
        raise BundleError(f"{path} is not a JSON object")
    return value
