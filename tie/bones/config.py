"""The architecture of a model, as its bundle states it: everything the forward pass must know besides the weights."""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

from tie.bones.errors import ConfigError
from tie.bones.vision.config import VisionConfig

Kind = Literal["llama", "mistral", "qwen2", "qwen3"]

_MAX_DIMENSION = 1 << 24  # no dimension of a real model comes near; keeps products far from overflow


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies of a model are stretched beyond the context that it was trained on.

    Attributes:
        kind: "linear" divides all frequencies by `factor` (Chen et al. 2023, arXiv 2306.15595); "llama3" divides the
            low ones, keeps the high ones and blends between (as in Llama 3.1's reference code).
        factor: the stretch, at least 1.
        low_freq_factor: llama3: wavelengths above original_context / low_freq_factor are stretched fully.
        high_freq_factor: llama3: wavelengths below original_context / high_freq_factor are kept.
        original_context: llama3: tokens of context before stretching.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    @classmethod
    def from_object(cls, value: object) -> "RopeScaling | None":
        """Reads Hugging Face's `rope_scaling` object (`rope_type`, or the older `type`); "default" means none.

        Raises:
            ConfigError: not an object, an unknown type, or a missing or impossible number.
        """
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise ConfigError("rope_scaling must be an object or null")
        kind = value.get("rope_type", value.get("type"))
        if kind == "default":
            return None
        if kind == "linear":
            return cls("linear", _number(value, "factor", minimum=1.0))
        if kind == "llama3":
            scaling = cls(
                "llama3",
                _number(value, "factor", minimum=1.0),
                _number(value, "low_freq_factor"),
                _number(value, "high_freq_factor"),
                int(_number(value, "original_max_position_embeddings", minimum=1.0)),
            )
            if scaling.high_freq_factor <= scaling.low_freq_factor:
                raise ConfigError("rope_scaling: high_freq_factor must be above low_freq_factor")
            return scaling
        raise ConfigError("rope_scaling: only the types default, linear and llama3 are supported")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One decoder-only model of the Llama family.

    Attributes:
        kind: which relative of Llama. It decides which projections have biases where `attention_bias` is set.
        hidden_size: width of the residual stream.
        intermediate_size: width of the feed-forward layer.
        num_layers: decoder layers.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides num_heads.
        head_dim: width of a head; even.
        vocab_size: rows of the embedding.
        context_tokens: positions that the model was made for; longer sequences are refused.
        rms_norm_eps: epsilon of every RMSNorm.
        rope_theta: base of the rotary frequencies.
        rope_scaling: None, or how they are stretched.
        tie_word_embeddings: the embedding is the output matrix too, and lm_head.weight does not exist.
        attention_bias: q, k and v (and, but for qwen2, o) have biases.
        qk_norm: an RMSNorm over each head of q and k before rotation.
        sliding_window: None, or how many tokens, itself included, a token attends to.
        vision: None, or the tower of a model that takes images.
    """

    kind: Kind
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_tokens: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    vision: VisionConfig | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError where the numbers cannot describe a model."""
        if self.kind not in get_args(Kind):
            raise ConfigError(f"kind must be one of {', '.join(get_args(Kind))}")
        for name in _COUNTS:
            _check_count(name, getattr(self, name))
        if self.sliding_window is not None:
            _check_count("sliding_window", self.sliding_window)
        for name in ("rms_norm_eps", "rope_theta"):
            _number({name: getattr(self, name)}, name)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError("num_heads must be a multiple of num_kv_heads")
        if self.head_dim % 2:
            raise ConfigError("head_dim must be even: rotary embedding pairs its halves")

    @classmethod
    def from_json(cls, text: str | bytes) -> "ModelConfig":
        """Reads the JSON object that the model owner hands out (the bundle manifest's `architecture`).

        Raises:
            ConfigError: not JSON, an unknown or missing field, or an impossible value. A field that is not known could
                change what the model computes, so none is ignored.
        """
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError("the model configuration is not JSON") from error
        if not isinstance(value, dict):
            raise ConfigError("the model configuration must be a JSON object")
        fields = {field.name: field for field in dataclasses.fields(cls)}
        if unknown := sorted(value.keys() - fields.keys()):
            raise ConfigError(f"the model configuration has {len(unknown)} unknown fields")
        for name, field in fields.items():
            if name not in value and field.default is dataclasses.MISSING:
                raise ConfigError(f"the model configuration lacks {name}")
        value["rope_scaling"] = RopeScaling.from_object(value.get("rope_scaling"))
        value["vision"] = VisionConfig.from_object(value.get("vision"))
        return cls(**value)

    @property
    def group_size(self) -> int:
        """Query heads that share one key and value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def output_bias(self) -> bool:
        """Whether the attention's output projection has a bias: Qwen2 has biases on q, k and v only."""
        return self.attention_bias and self.kind != "qwen2"


_COUNTS = (
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "context_tokens",
)
_FLAGS = ("tie_word_embeddings", "attention_bias", "qk_norm")


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MAX_DIMENSION:
        raise ConfigError(f"{name} must be a whole number from 1 to {_MAX_DIMENSION}")


def _number(holder: Mapping[str, Any], name: str, *, minimum: float = 0.0) -> float:
    """A finite number above zero and at least `minimum`, or ConfigError."""
    value = holder.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ConfigError(f"{name} must be a number")
    try:
        number = float(value)
    except OverflowError as error:
        raise ConfigError(f"{name} must be a number of ordinary size") from error
    if not math.isfinite(number) or number <= 0 or number < minimum:
        raise ConfigError(f"{name} must be finite, above 0 and at least {minimum:g}")
    return number
