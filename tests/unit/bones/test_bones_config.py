"""The configuration of a model: what is read, and what is refused."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tie.bones.config import ModelConfig, RopeScaling
from tie.bones.errors import BonesError, ConfigError


def test_reads_json(tiny_fields):
    config = ModelConfig.from_json(json.dumps(tiny_fields))
    assert config == ModelConfig(**tiny_fields)
    assert config.group_size == 2
    assert config.sliding_window is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.kind = "qwen2"


def test_reads_rope_scaling(tiny_fields):
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = ModelConfig.from_json(json.dumps(tiny_fields | {"rope_scaling": scaling}))
    assert config.rope_scaling == RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)
    assert RopeScaling.from_object({"type": "linear", "factor": 2}) == RopeScaling("linear", 2.0)
    assert RopeScaling.from_object({"rope_type": "default"}) is None
    assert RopeScaling.from_object(None) is None


@pytest.mark.parametrize(
    "scaling",
    [
        5,
        "linear",
        {},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "linear"},
        {"rope_type": "linear", "factor": 0.5},
        {"rope_type": "linear", "factor": "2"},
        {"rope_type": "linear", "factor": 10**400},
        {"rope_type": "llama3", "factor": 8.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 4.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ],
)
def test_refuses_rope_scaling(scaling):
    with pytest.raises(ConfigError, match=r"rope_scaling|factor"):
        RopeScaling.from_object(scaling)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "gpt2"}, "kind"),
        ({"kind": ["llama"]}, "kind"),
        ({"num_layers": 0}, "num_layers"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"hidden_size": 1 << 40}, "hidden_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"vocab_size": 3.0}, "vocab_size"),
        ({"num_kv_heads": 3}, "multiple"),
        ({"head_dim": 7}, "even"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rope_theta": "10000"}, "rope_theta"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"qk_norm": 1}, "qk_norm"),
        ({"mlp_bias": True}, "unknown"),
    ],
)
def test_refuses_a_field(tiny_fields, change, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_json(json.dumps(tiny_fields | change))


def test_refuses_a_missing_field(tiny_fields):
    for name in ("kind", "hidden_size", "rope_theta"):
        fields = {key: value for key, value in tiny_fields.items() if key != name}
        with pytest.raises(ConfigError, match=name):
            ModelConfig.from_json(json.dumps(fields))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"llama"', b"\xff", "[" * 100000])
def test_refuses_what_is_no_object(text):
    with pytest.raises(ConfigError, match=r"JSON"):
        ModelConfig.from_json(text)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.data())
def test_any_json_gives_a_config_or_its_error(tiny_fields, data):
    fields = dict(tiny_fields)
    for name in data.draw(st.lists(st.sampled_from([*fields, "rope_scaling", "sliding_window"]), max_size=3)):
        fields[name] = data.draw(_JSON)
    try:
        config = ModelConfig.from_json(json.dumps(fields))
    except BonesError:
        return
    assert config.num_heads % config.num_kv_heads == 0
