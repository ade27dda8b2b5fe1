"""What a model's source, a GGUF file or a Hugging Face directory, gives to a bundle."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tie.assets.manifest import Architecture, Images, TokenizerInfo
from tie.assets.tensors import StoredTensor


@dataclass(frozen=True)
class ModelSource:
    """A model read from its source format, weights not yet touched.

    Attributes:
        name: a model id made from what the source calls itself.
        tokenizer_json: content of tokenizer.json.
        chat_template: Jinja source, or None for a base model.
        weights: name in the bundle → the source's weight file.
        tensors: where each tensor lies in those files.
        images: how the model wants them, where it takes any.
    """

    name: str
    architecture: Architecture
    tokenizer: TokenizerInfo
    tokenizer_json: bytes
    chat_template: str | None
    weights: dict[str, Path]
    weights_format: Literal["gguf", "safetensors"]
    tensors: tuple[StoredTensor, ...]
    images: Images | None = None
