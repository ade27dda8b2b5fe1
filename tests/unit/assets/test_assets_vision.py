"""Bundles of models that take images: what is read, and what is refused by name."""

import json

import msgspec
import pytest

from tie.assets import sample
from tie.assets.build import create_bundle, read_source
from tie.assets.bundle import open_bundle
from tie.assets.digits.bundle import with_digits
from tie.assets.safetensors_reader import read_directory
from tie.assets.sample import make_sample_vision_bundle, write_sample_model
from tie.assets.tensors import load_index
from tie.assets.vision_reader import canonical
from tie.bones.config import ModelConfig
from tie.daemon.errors import BundleError


@pytest.fixture
def directory(tmp_path):
    write_sample_model(
        tmp_path, kind="llama", seed=0, layers=2, hidden_size=64, heads=4, kv_heads=2, context_tokens=512, tied=True
    )
    sample._add_vision(tmp_path, 0)
    return tmp_path


def changed(directory, file, **values):
    path = directory / file
    whole = json.loads(path.read_text())
    for name, value in values.items():
        *outer, last = name.split("__")
        inner = whole
        for key in outer:
            inner = inner[key]
        inner[last] = value
    path.write_text(json.dumps(whole))


def test_a_bundle_has_the_tower_and_how_images_are_prepared(tmp_path):
    make_sample_vision_bundle(tmp_path / "bundle")
    bundle = open_bundle(tmp_path / "bundle")
    vision, images = bundle.manifest.architecture.vision, bundle.manifest.images
    assert (vision.connector, vision.image_size, vision.tokens) == ("pixel-shuffle", 32, 4)
    assert (images.kind, images.side, images.longest_edge, images.split) == ("tiles", 32, 96, True)
    assert ModelConfig.from_json(msgspec.json.encode(bundle.manifest.architecture)).vision.tokens == 4
    assert {tensor.name for tensor in load_index(bundle).tensors} > {"connector.modality_projection.proj.weight"}


def test_the_same_source_gives_the_same_bundle(tmp_path, directory):
    one = make_sample_vision_bundle(tmp_path / "one")
    assert make_sample_vision_bundle(tmp_path / "two").manifest == one.manifest
    assert create_bundle(read_source(directory), tmp_path / "three", model="sample-vision").manifest == one.manifest


@pytest.mark.parametrize(
    ("file", "values", "said"),
    [
        ("config.json", {"vision_config__model_type": "clip_vision_model"}, "clip_vision_model"),
        ("config.json", {"vision_config__hidden_act": "relu"}, "activations"),
        ("config.json", {"vision_config__patch_size": 7}, "do not divide"),
        ("config.json", {"vision_config__num_hidden_layers": 3}, "is missing"),
        ("config.json", {"vision_config": 1}, "vision_config"),
        ("config.json", {"text_config": None}, "text_config"),
        ("config.json", {"image_token_id": None}, "impossible"),
        ("config.json", {"image_token_id": 100_000}, "outside the vocabulary"),
        ("preprocessor_config.json", {"max_image_size__longest_edge": 64}, "another size"),
        ("preprocessor_config.json", {"do_normalize": False}, "leaves out"),
        ("preprocessor_config.json", {"rescale_factor": 1.0}, "range"),
        ("preprocessor_config.json", {"resample": 9}, "impossible"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(directory, tmp_path, file, values, said):
    changed(directory, file, **values)
    with pytest.raises(BundleError, match=said):
        create_bundle(read_directory(directory), tmp_path / "bundle")


def test_a_model_that_does_not_say_how_it_wants_images_is_none(directory):
    (directory / "preprocessor_config.json").unlink()
    with pytest.raises(BundleError, match="preprocessor_config"):
        read_directory(directory)


def test_the_image_processor_may_be_in_the_newer_file(directory):
    before = read_directory(directory)
    old = directory / "preprocessor_config.json"
    (directory / "processor_config.json").write_text(json.dumps({"image_processor": json.loads(old.read_text())}))
    old.unlink()
    assert read_directory(directory) == before


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("model.text_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.language_model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("vision_tower.vision_model.post_layernorm.bias", "vision_model.post_layernorm.bias"),
        ("model.vision_tower.encoder.layers.0.mlp.fc1.bias", "vision_model.encoder.layers.0.mlp.fc1.bias"),
        ("model.connector.modality_projection.proj.weight", "connector.modality_projection.proj.weight"),
        ("model.multi_modal_projector.linear_1.weight", "multi_modal_projector.linear_1.weight"),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
    ],
)
def test_names_of_checkpoints_old_and_new(name, known):
    assert canonical(name) == known


def test_the_digits_demo_is_for_its_model_alone(directory):
    with pytest.raises(BundleError, match="SmolLM2"):
        with_digits(read_directory(directory))
