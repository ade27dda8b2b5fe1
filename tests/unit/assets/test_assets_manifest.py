"""The manifest: strictly what it should be, and what the executor reads."""

import msgspec
import pytest

from tie.assets import manifest as manifests
from tie.bones.config import ModelConfig


def _changed(sample, *path, value):
    tree = msgspec.to_builtins(sample.manifest)
    node = tree
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return msgspec.json.encode(tree)


def test_round_trip_is_one_spelling(sample):
    encoded = manifests.encode(sample.manifest)
    assert manifests.decode(encoded) == sample.manifest
    assert manifests.encode(manifests.decode(encoded)) == encoded


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("version",), 2),
        (("surprise",), 1),
        (("model",), "../etc"),
        (("model",), "a\n"),
        (("release",), ""),
        (("files", "../../etc/passwd"), {"sha256": "0" * 64, "bytes": 1}),
        (("files", "a/b"), {"sha256": "0" * 64, "bytes": 1}),
        (("files", ".hidden"), {"sha256": "0" * 64, "bytes": 1}),
        (("files", "manifest.json"), {"sha256": "0" * 64, "bytes": 1}),
        (("files", "tokenizer.json", "sha256"), "xyz"),
        (("files", "tokenizer.json", "bytes"), -1),
        (("weights",), []),
        (("weights",), ["absent.gguf"]),
        (("weights",), ["model.safetensors", "model.safetensors"]),
        (("weights_format",), "pickle"),
        (("architecture", "kind"), "gpt"),
        (("architecture", "num_kv_heads"), 3),
        (("architecture", "head_dim"), 15),
        (("architecture", "rms_norm_eps"), 0),
        (("tokenizer", "end_of_turn_ids"), [-1]),
    ],
)
def test_refuses(sample, path, value):
    with pytest.raises(msgspec.MsgspecError):
        manifests.decode(_changed(sample, *path, value=value))


def test_architecture_is_what_the_executor_reads(sample, demo):
    for bundle in (sample, demo):
        config = ModelConfig.from_json(msgspec.json.encode(bundle.manifest.architecture))
        assert config.hidden_size == bundle.manifest.architecture.hidden_size
        assert config.rms_norm_eps == bundle.manifest.architecture.rms_norm_eps
