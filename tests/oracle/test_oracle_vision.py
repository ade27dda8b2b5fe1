"""Models that take images against transformers, on small random weights: pixels to logits, in float32."""

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    SiglipVisionConfig,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)
from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig
from transformers.models.smolvlm.configuration_smolvlm import SmolVLMVisionConfig

from image_corpus import photograph
from tie.assets.safetensors_reader import read_directory
from tie.assets.sample import write_sample_model
from tie.assets.tensors import read_rows
from tie.bones.batch import Given
from tie.bones.config import ModelConfig
from tie.bones.executor import Batch, Executor, SequenceSlice
from tie.runtime.images.orders import Preparation
from tie.runtime.images.preparing import prepare

pytestmark = pytest.mark.oracle

TOLERANCE = 1e-3
VOCABULARY = 259  # the sample tokenizer's
IMAGE = 258
TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096,
    "initializer_range": 0.2, "pad_token_id": None, "bos_token_id": None, "eos_token_id": 2,
}  # fmt: skip
TOWER = {
    "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8, "initializer_range": 0.2,
}  # fmt: skip
PROCESSOR = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.25, 0.2], "resample": 1}
TILES = {**PROCESSOR, "size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 32}, "do_image_splitting": True}
SIZES = [(50, 70), (31, 7), (200, 90), (1, 1)]


class Case(NamedTuple):
    reference: PreTrainedModel
    executor: Executor
    preparation: Preparation


def _idefics3(directory: Path) -> Case:
    torch.manual_seed(1)
    config = Idefics3Config(
        text_config=LlamaConfig(**TEXT),
        vision_config=Idefics3VisionConfig(**TOWER),
        scale_factor=2,
        image_token_id=IMAGE,
    )
    return _case(directory, Idefics3ForConditionalGeneration(config), TILES)


def _smolvlm(directory: Path) -> Case:
    torch.manual_seed(2)
    config = SmolVLMConfig(
        text_config=LlamaConfig(**TEXT),
        vision_config=SmolVLMVisionConfig(**TOWER),
        scale_factor=4,
        image_token_id=IMAGE,
        tie_word_embeddings=True,
    )
    return _case(directory, SmolVLMForConditionalGeneration(config), {**TILES, "do_image_splitting": False})


def _llava(directory: Path, layer: int, **more: Any) -> Case:
    torch.manual_seed(3)
    config = LlavaConfig(
        text_config=LlamaConfig(**TEXT), vision_config=SiglipVisionConfig(**TOWER), image_token_index=IMAGE,
        vision_feature_select_strategy="full", vision_feature_layer=layer, image_seq_length=16, **more,
    )  # fmt: skip
    processor = {**PROCESSOR, "size": {"height": 32, "width": 32}, "resample": 3}
    return _case(directory, LlavaForConditionalGeneration(config), processor)


CASES = {
    "idefics3": _idefics3,
    "smolvlm": _smolvlm,
    "llava": lambda directory: _llava(directory, -2),
    "llava-last-layer": lambda directory: _llava(directory, -1, multimodal_projector_bias=False),
}


def _case(directory: Path, reference: PreTrainedModel, processor: dict[str, Any]) -> Case:
    """Saved by transformers, read as a bundle's source is."""
    reference = reference.eval().float()
    random_ = torch.Generator().manual_seed(3)
    with torch.no_grad():  # norms and biases start as ones and zeros, which would hide a missing one
        for name, parameter in reference.named_parameters():
            if parameter.dim() == 1:
                base = 1.0 if "norm" in name and name.endswith("weight") else 0.0
                parameter.copy_(base + 0.3 * torch.randn(parameter.shape, generator=random_))
    write_sample_model(
        directory, kind="llama", seed=0, layers=1, hidden_size=16, heads=1, kv_heads=1, context_tokens=16, tied=True
    )
    reference.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    source = read_directory(directory)
    stored = {name: np.memmap(path, np.uint8, "r") for name, path in source.weights.items()}
    tensors = {
        tensor.name: torch.from_numpy(
            read_rows(tensor, stored[tensor.file][tensor.offset : tensor.offset + tensor.bytes], 0, tensor.rows).copy()
        ).view(tensor.shape)
        for tensor in source.tensors
    }
    config = ModelConfig.from_json(msgspec.json.encode(source.architecture))
    executor = Executor(config, tensors, num_blocks=200, block_tokens=16, dtype="f32", threads=2)
    images = source.images
    assert images is not None
    assert images.token_id == IMAGE
    how = Preparation(images.kind, images.side, images.longest_edge, images.split, images.resample)
    assert load_file(directory / "model.safetensors")
    return Case(reference, executor, how)


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory) -> Case:
    return CASES[request.param](tmp_path_factory.mktemp(request.param))


def _pixels(tiles: np.ndarray) -> torch.Tensor:
    values = (tiles.astype(np.float32) / 255 - PROCESSOR["image_mean"]) / PROCESSOR["image_std"]
    return torch.from_numpy(values.astype(np.float32)).permute(0, 3, 1, 2)


def _reference(case: Case, tokens: list[int], tiles: np.ndarray) -> torch.Tensor:
    pixels = _pixels(tiles)
    if not isinstance(case.reference, LlavaForConditionalGeneration):
        pixels = pixels[None]
    with torch.inference_mode():
        return case.reference(input_ids=torch.tensor([tokens]), pixel_values=pixels, use_cache=False).logits[0]


@pytest.mark.parametrize("sizes", [SIZES[:1], SIZES[1:2], SIZES], ids=["one", "tiny", "several"])
@pytest.mark.parametrize("chunk", [1000, 23])
def test_logits_are_those_of_transformers(case, sizes, chunk, sequences):
    vision = case.executor.vision
    chance = random.Random(5)  # noqa: S311 - no secret
    tokens: list[int] = []
    places: list[tuple[int, np.ndarray]] = []
    everything = []
    for number, size in enumerate(sizes):
        tokens += chance.choices(range(250), k=11)
        prepared = prepare(photograph(*size, seed=number), case.preparation)
        everything.append(prepared.tiles)
        for vectors in vision.encode(prepared.tiles):
            tokens += chance.choices(range(250), k=2)
            places.append((len(tokens), vectors))
            tokens += [IMAGE] * len(vectors)
    tokens += chance.choices(range(250), k=9)
    ours = []
    table = list(range(len(tokens) // 16 + 1))
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        given = tuple(
            Given(max(0, first - start), vectors[max(0, start - first) : start + len(part) - first])
            for first, vectors in places
            if first < start + len(part) and first + len(vectors) > start
        )
        ours.append(case.executor.forward(Batch((SequenceSlice(part, start, table, len(part), given=given),))).clone())
    wanted = _reference(case, tokens, np.concatenate(everything))
    worst = (torch.cat(ours) - wanted).abs().max()
    print(f"{len(everything)} images, {len(tokens)} positions, logits to {wanted.abs().max():.1f}: {worst:.1e}")
    assert worst < TOLERANCE


def test_an_image_is_seen(case):
    """Else all would agree with a model that looks at nothing."""
    tokens = [1, 2, 3]
    vision = case.executor.vision
    seen = [
        case.executor.forward(
            Batch(
                (
                    SequenceSlice(
                        [*tokens, *[IMAGE] * vision.config.tokens, 5],
                        0,
                        list(range(4)),
                        1,
                        given=(Given(3, vision.encode(tile)[0]),),
                    ),
                )
            )
        ).clone()
        for tile in (np.zeros((1, 32, 32, 3), dtype=np.uint8), photograph(32, 32)[None])
    ]
    assert (seen[0] - seen[1]).abs().max() > 0.1
