"""A small bundle with random weights: a real one, for tests and for trying a node without a model."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np
import safetensors.numpy
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tie.assets.build import create_bundle, read_source
from tie.assets.bundle import Bundle
from tie.assets.manifest import CHAT_TEMPLATE_FILE, TOKENIZER_FILE, Architecture
from tie.assets.safetensors_reader import architecture_of
from tie.assets.tensors import expected_shapes
from tie.assets.vision_reader import vision_of

Kind = Literal["llama", "qwen2", "qwen3", "mistral"]

_SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHATML: Final = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_sample_bundle(
    destination: Path,
    *,
    kind: Kind = "llama",
    seed: int = 0,
    layers: int = 2,
    hidden_size: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    context_tokens: int = 512,
    tied: bool = True,
    model: str = "sample",
    release: str = "",
    system_prompts: Mapping[str, str] | None = None,
) -> Bundle:
    """Makes a bundle with random weights and a tokenizer with one token per byte (vocabulary: 259).

    The same arguments give the same bundle, file for file.

    Args:
        destination: where; must not exist, or hold the same bundle.
        kind: architecture.
        seed: of the weights.
        layers: how many.
        hidden_size: a multiple of `heads`; the feed-forward layer is three times as wide.
        heads: query heads.
        kv_heads: key and value heads.
        context_tokens: the longest sequence.
        tied: the output matrix is the embedding.
        model: its id.
        release: default: made from the content.
        system_prompts: texts to register, by name.
    """
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_sample_model(
            directory,
            kind=kind,
            seed=seed,
            layers=layers,
            hidden_size=hidden_size,
            heads=heads,
            kv_heads=kv_heads,
            context_tokens=context_tokens,
            tied=tied,
        )
        return create_bundle(
            read_source(directory), destination, model=model, release=release, system_prompts=system_prompts or {}
        )


def write_sample_model(
    directory: Path,
    *,
    kind: Kind,
    seed: int,
    layers: int,
    hidden_size: int,
    heads: int,
    kv_heads: int,
    context_tokens: int,
    tied: bool,
) -> None:
    """Writes such a model in Hugging Face's layout into an existing directory. Arguments as `make_sample_bundle`."""
    vocabulary = sorted(pre_tokenizers.ByteLevel.alphabet())
    config: dict[str, Any] = {
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "model_type": kind,
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden_size // heads,
        "vocab_size": len(_SPECIAL) + len(vocabulary),
        "max_position_embeddings": context_tokens,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if kind == "mistral":
        config["sliding_window"] = None
    _write_json(directory / "config.json", config)
    _write_json(
        directory / "tokenizer_config.json",
        {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"},
    )
    (directory / CHAT_TEMPLATE_FILE).write_text(_CHATML)
    tokens = {token: index for index, token in enumerate([*_SPECIAL, *vocabulary])}
    backend = tokenizers.Tokenizer(models.BPE(tokens, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    (directory / TOKENIZER_FILE).write_text(backend.to_str(pretty=False))
    _write_weights(directory, architecture_of(config), seed)


def _write_weights(directory: Path, architecture: Architecture, seed: int) -> None:
    random = np.random.default_rng(seed)
    weights = {
        # Norms near one and matrices at the scale of a trained model: activations neither vanish nor explode.
        name: (1 + 0.1 * random.standard_normal(shape) if name.endswith("norm.weight") else
               random.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
        for name, shape in expected_shapes(architecture).items()
    }  # fmt: skip
    safetensors.numpy.save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def make_sample_vision_bundle(
    destination: Path,
    *,
    seed: int = 0,
    context_tokens: int = 512,
    model: str = "sample-vision",
    system_prompts: Mapping[str, str] | None = None,
) -> Bundle:
    """Makes a bundle like `make_sample_bundle`'s that takes images: of Idefics3's kind, squares of 32 pixels.

    An image becomes up to 3 by 3 squares and one more, each 4 positions of a prompt.
    """
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_sample_model(
            directory, kind="llama", seed=seed, layers=2, hidden_size=64, heads=4, kv_heads=2,
            context_tokens=context_tokens, tied=True,
        )  # fmt: skip
        _add_vision(directory, seed)
        return create_bundle(read_source(directory), destination, model=model, system_prompts=system_prompts or {})


def _add_vision(directory: Path, seed: int) -> None:
    """Gives a sample model a tower, the tokens that Idefics3 has around images, and a template with places for them."""
    text = json.loads((directory / "config.json").read_text())
    backend = tokenizers.Tokenizer.from_file(str(directory / TOKENIZER_FILE))
    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
    added = ["<fake_token_around_image>", "<global-img>", "<image>", *tiles]
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in added])
    (directory / TOKENIZER_FILE).write_text(backend.to_str(pretty=False))
    (directory / CHAT_TEMPLATE_FILE).write_text(
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
        "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '<image>' }}"
        "{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
        "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    tower = {
        "model_type": "idefics3_vision", "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "image_size": 32, "patch_size": 8,
    }  # fmt: skip
    text["vocab_size"] = backend.get_vocab_size()
    whole = {
        "model_type": "idefics3", "text_config": text, "vision_config": tower, "scale_factor": 2,
        "image_token_id": backend.token_to_id("<image>"), "eos_token_id": 2,
    }  # fmt: skip
    _write_json(directory / "config.json", whole)
    processor = {
        "size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 32}, "do_image_splitting": True, "resample": 1,
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    }  # fmt: skip
    _write_json(directory / "preprocessor_config.json", processor)
    architecture = msgspec.structs.replace(architecture_of(text), vision=vision_of(whole, processor))
    _write_weights(directory, architecture, seed)
