"""The architecture of a vision tower and of what connects it to the language model."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

from tie.bones.errors import ConfigError

Connector = Literal["pixel-shuffle", "mlp"]

_MAX_DIMENSION = 1 << 16
_COUNTS = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "image_size", "patch_size", "scale_factor")


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """A SigLIP tower (Zhai et al. 2023, arXiv 2303.15343) over squares of one size, and a connector.

    Attributes:
        connector: "pixel-shuffle" (Idefics3, SmolVLM): neighbouring patches become one vector, then one matrix;
            "mlp" (LLaVA): two matrices with GELU between them.
        hidden_size: width of the tower.
        intermediate_size: of its feed-forward layers.
        num_layers: of it that are computed: where the connector takes the output of an earlier layer, up to that one.
        num_heads: of its attention.
        image_size: side of a square, in pixels; a multiple of patch_size.
        patch_size: side of a patch.
        layer_norm_eps: epsilon of every LayerNorm.
        final_norm: whether the tower's last LayerNorm is applied.
        scale_factor: patches on a side that become one vector; 1 for "mlp".
        connector_bias: the connector's matrices have biases.
        image_mean: of each colour, subtracted from values between 0 and 1.
        image_std: of each colour, by which the rest is divided.
    """

    connector: Connector
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    image_size: int
    patch_size: int
    layer_norm_eps: float
    final_norm: bool
    scale_factor: int
    connector_bias: bool
    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]

    def __post_init__(self) -> None:
        """Raises ConfigError where the numbers cannot describe a tower."""
        if self.connector not in get_args(Connector):
            raise ConfigError("vision: an unknown connector")
        for name in _COUNTS:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MAX_DIMENSION:
                raise ConfigError(f"vision.{name} must be a whole number from 1 to {_MAX_DIMENSION}")
        if not isinstance(self.final_norm, bool) or not isinstance(self.connector_bias, bool):
            raise ConfigError("vision.final_norm and vision.connector_bias must be true or false")
        numbers = (self.layer_norm_eps, *self.image_mean, *self.image_std)
        if len(self.image_mean) != 3 or len(self.image_std) != 3 or not all(map(_finite, numbers)):
            raise ConfigError("vision: a number is none")
        if self.layer_norm_eps <= 0 or min(self.image_std) <= 0:
            raise ConfigError("vision.layer_norm_eps and vision.image_std must be above 0")
        if self.hidden_size % self.num_heads or self.image_size % self.patch_size or self.grid % self.scale_factor:
            raise ConfigError("vision: heads, patches or the scale factor do not divide what they part")

    @classmethod
    def from_object(cls, value: object) -> "VisionConfig | None":
        """Reads the `vision` object of a model's configuration.

        Raises:
            ConfigError: not an object, an unknown or missing field, or an impossible value.
        """
        if value is None:
            return None
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(value, Mapping) or value.keys() != names:
            raise ConfigError("vision must be an object with exactly the fields that are known")
        fields: dict[str, Any] = dict(value)
        for name in ("image_mean", "image_std"):
            if not isinstance(fields[name], list | tuple):
                raise ConfigError(f"vision.{name} must be a list")
            fields[name] = tuple(fields[name])
        return cls(**fields)

    @property
    def grid(self) -> int:
        """Patches on a side of a square."""
        return self.image_size // self.patch_size

    @property
    def tokens(self) -> int:
        """Vectors that a square becomes."""
        return (self.grid // self.scale_factor) ** 2


def vision_shapes(config: VisionConfig, text_size: int) -> dict[str, tuple[int, ...]]:
    """Every tensor of tower and connector, by Hugging Face's name without what stands before it, with its shape.

    The patches' kernel is a matrix here: `[hidden, 3 * patch * patch]`, the same bytes.

    Args:
        config: of both.
        text_size: width of the language model.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "vision_model.embeddings.patch_embedding.weight": (hidden, 3 * config.patch_size**2),
        "vision_model.embeddings.patch_embedding.bias": (hidden,),
        "vision_model.embeddings.position_embedding.weight": (config.grid**2, hidden),
    }
    if config.final_norm:
        shapes |= {f"vision_model.post_layernorm.{part}": (hidden,) for part in ("weight", "bias")}
    for number in range(config.num_layers):
        prefix = f"vision_model.encoder.layers.{number}."
        for name, rows, columns in (
            *((f"self_attn.{one}_proj", hidden, hidden) for one in ("q", "k", "v", "out")),
            ("mlp.fc1", inner, hidden),
            ("mlp.fc2", hidden, inner),
        ):
            shapes |= {f"{prefix}{name}.weight": (rows, columns), f"{prefix}{name}.bias": (rows,)}
        for name in ("layer_norm1", "layer_norm2"):
            shapes |= {f"{prefix}{name}.{part}": (hidden,) for part in ("weight", "bias")}
    if config.connector == "pixel-shuffle":
        matrices = {"connector.modality_projection.proj": (text_size, hidden * config.scale_factor**2)}
    else:
        matrices = {
            "multi_modal_projector.linear_1": (text_size, hidden),
            "multi_modal_projector.linear_2": (text_size, text_size),
        }
    for name, shape in matrices.items():
        shapes[f"{name}.weight"] = shape
        if config.connector_bias:
            shapes[f"{name}.bias"] = shape[:1]
    return shapes


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
