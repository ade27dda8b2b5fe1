"""The demo model with an eye: its own weights, and beside them a tower and a connector of half a megabyte.

`tests/bench/train_digits.py` trains them on handwritten digits (E. Alpaydin and C. Kaynak, "Optical Recognition of
Handwritten Digits", UCI Machine Learning Repository, CC BY 4.0). The language model stays as it is, down to its
vocabulary: a token that it was given for notebooks, and that no conversation has, stands for an image.
"""

from pathlib import Path
from typing import Any, Final

import msgspec

from tie.assets.manifest import Images, Vision
from tie.assets.safetensors_reader import read_header
from tie.assets.source import ModelSource
from tie.assets.tokenizer import Tokenizer
from tie.daemon.errors import BundleError

WEIGHTS_FILE: Final = "vision.safetensors"
TOKEN: Final = "<empty_output>"  # noqa: S105 (of a vocabulary)
VISION: Final[dict[str, Any]] = {
    "connector": "pixel-shuffle", "hidden_size": 64, "intermediate_size": 128, "num_layers": 3, "num_heads": 4,
    "image_size": 32, "patch_size": 8, "layer_norm_eps": 1e-6, "final_norm": True, "scale_factor": 2,
    "connector_bias": False, "image_mean": (0.5, 0.5, 0.5), "image_std": (0.5, 0.5, 0.5),
}  # fmt: skip
IMAGES: Final[dict[str, Any]] = {"kind": "square", "side": 32, "longest_edge": 1, "split": False, "resample": 3}
TEMPLATE: Final = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '" + TOKEN + "' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def with_digits(source: ModelSource) -> ModelSource:
    """The demo model's source with the eye.

    Raises:
        BundleError: it is another model.
    """
    token_id = Tokenizer.from_json(source.tokenizer_json).token_id(TOKEN)
    if token_id is None or source.architecture.hidden_size != 576:
        raise BundleError("the digits demo is made for SmolLM2-135M")
    path = Path(__file__).with_name(WEIGHTS_FILE)
    return ModelSource(
        name=source.name,
        architecture=msgspec.structs.replace(source.architecture, vision=msgspec.convert(VISION, Vision)),
        tokenizer=source.tokenizer,
        tokenizer_json=source.tokenizer_json,
        chat_template=TEMPLATE,
        weights={**source.weights, WEIGHTS_FILE: path},
        weights_format=source.weights_format,
        tensors=(*source.tensors, *read_header(WEIGHTS_FILE, path)),
        images=msgspec.convert({**IMAGES, "token_id": token_id}, Images),
    )
