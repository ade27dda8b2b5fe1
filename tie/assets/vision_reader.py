"""What config.json and preprocessor_config.json of a Hugging Face directory say of a model that takes images."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, TypeVar

import msgspec

from tie.assets.manifest import Images, Vision
from tie.daemon.errors import BundleError

T = TypeVar("T")
KINDS: Final = ("idefics3", "smolvlm", "llava")
_TOWERS: Final = {"idefics3": "idefics3_vision", "smolvlm": "smolvlm_vision", "llava": "siglip_vision_model"}
# What a tower's own configuration leaves out where it is as usual.
_SIGLIP: Final = {"hidden_size": 768, "num_attention_heads": 12, "image_size": 224, "patch_size": 16}
_IDEFICS3: Final = {"hidden_size": 1152, "num_attention_heads": 16, "image_size": 224, "patch_size": 32}
_COMMON: Final = {
    "intermediate_size": 3072, "num_hidden_layers": 12, "num_channels": 3, "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}  # fmt: skip
_TEXT_DEFAULTS: Final = {"num_attention_heads": 32, "num_hidden_layers": 32, "max_position_embeddings": 2048}
# Names in checkpoints, old and new, and the ones they have here.
_NAMES: Final = MappingProxyType(
    {
        re.compile(r"^(model\.)?(text_model|language_model)\.(model\.)?(?!lm_head)"): "model.",
        re.compile(r"^(language_model\.)?lm_head\."): "lm_head.",
        re.compile(r"^(model\.)?(vision_tower\.)?vision_model\."): "vision_model.",
        re.compile(r"^(model\.)?vision_tower\."): "vision_model.",
        re.compile(r"^(model\.)?connector\."): "connector.",
        re.compile(r"^(model\.)?multi_modal_projector\."): "multi_modal_projector.",
    }
)


def canonical(name: str) -> str:
    """A tensor's name without what its kind of model puts before it."""
    for pattern, prefix in _NAMES.items():
        if pattern.match(name):
            return pattern.sub(prefix, name, count=1)
    return name


def text_config(config: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    """The language model's configuration, as one of its own would be.

    Args:
        config: of the whole.
        tied: whether there is no output matrix of its own.
    """
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise BundleError("config.json has no text_config")
    return {"model_type": "llama", **_TEXT_DEFAULTS, **text, "tie_word_embeddings": tied}


def vision_of(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Vision:
    """The tower and its connector.

    Raises:
        BundleError: not supported, or impossible.
    """
    kind = config["model_type"]
    given = config.get("vision_config")
    if not isinstance(given, dict):
        raise BundleError("config.json has no vision_config")
    if given.get("model_type", _TOWERS[kind]) != _TOWERS[kind]:
        raise BundleError(
            f"a vision tower of type {str(given.get('model_type'))[:40]!r} is not supported: {_TOWERS[kind]} is"
        )
    llava = kind == "llava"
    tower = {**_COMMON, **(_SIGLIP if llava else _IDEFICS3), **given}
    if tower["hidden_act"] != "gelu_pytorch_tanh" or tower["num_channels"] != 3:
        raise BundleError("a vision tower of other activations or colours is not supported")
    layers = tower["num_hidden_layers"]
    if llava:
        layer = config.get("vision_feature_layer", -2)
        if not isinstance(layer, int) or not -layers <= layer < 0:
            raise BundleError("vision_feature_layer must be one layer, counted from the last")
        if config.get("vision_feature_select_strategy", "default") != "full":
            raise BundleError("vision_feature_select_strategy must be full: a SigLIP tower has no class token to drop")
        if config.get("projector_hidden_act", "gelu") != "gelu":
            raise BundleError("a projector with another activation than gelu is not supported")
        layers += 1 + layer
    fields = {
        "connector": "mlp" if llava else "pixel-shuffle",
        "hidden_size": tower["hidden_size"],
        "intermediate_size": tower["intermediate_size"],
        "num_layers": layers,
        "num_heads": tower["num_attention_heads"],
        "image_size": tower["image_size"],
        "patch_size": tower["patch_size"],
        "layer_norm_eps": tower["layer_norm_eps"],
        "final_norm": not llava,
        "scale_factor": 1 if llava else config.get("scale_factor", 2),
        "connector_bias": llava and bool(config.get("multimodal_projector_bias", True)),
        "image_mean": processor.get("image_mean", (0.5, 0.5, 0.5)),
        "image_std": processor.get("image_std", (0.5, 0.5, 0.5)),
    }
    return _converted(fields, Vision)


def images_of(config: Mapping[str, Any], processor: Mapping[str, Any], vision: Vision) -> Images:
    """How pictures are prepared, and what stands for one in a prompt.

    Raises:
        BundleError: not supported, or impossible.
    """
    if not processor:
        raise BundleError(
            "preprocessor_config.json is missing", hint="a model that takes images says there how it wants them"
        )
    plain = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True}
    if any(processor.get(name) not in {None, wanted} for name, wanted in plain.items()):
        raise BundleError("an image processor that leaves out a step is not supported")
    if abs(processor.get("rescale_factor", 1 / 255) * 255 - 1) > 1e-6:
        raise BundleError("an image processor that scales to another range is not supported")
    size = processor.get("size", {})
    if vision.connector == "pixel-shuffle":
        side = processor.get("max_image_size", {"longest_edge": 364}).get("longest_edge")
        longest, split = size.get("longest_edge", 4 * 364), processor.get("do_image_splitting", True)
        fields = {"kind": "tiles", "longest_edge": longest, "split": split, "resample": processor.get("resample", 1)}
    else:
        side = size.get("height")
        if size.get("width") != side or processor.get("do_center_crop") or processor.get("do_pad"):
            raise BundleError("an image processor that crops or pads is not supported: squares of one size are")
        fields = {"kind": "square", "longest_edge": 1, "split": False, "resample": processor.get("resample", 3)}
    if side != vision.image_size:
        raise BundleError("the image processor makes squares of another size than the vision tower takes")
    token_id = config.get("image_token_id", config.get("image_token_index"))
    return _converted({**fields, "side": side, "token_id": token_id}, Images)


def _converted(fields: Mapping[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise BundleError(f"the model's configuration describes an impossible vision tower: {error}") from error
