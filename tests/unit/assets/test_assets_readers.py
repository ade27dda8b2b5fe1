"""Readers of GGUF and safetensors: the same model from either gives the same tensors; what is wrong says so."""

import json
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from tie.assets.build import create_bundle, read_source
from tie.assets.gguf_reader import read_gguf
from tie.assets.safetensors_reader import read_directory
from tie.assets.sample import write_sample_model
from tie.assets.tensors import StoredTensor, check_tensors, load_index, read_rows
from tie.daemon.errors import BundleError

SMALL = {"seed": 5, "layers": 2, "hidden_size": 64, "heads": 4, "kv_heads": 2, "context_tokens": 64}
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture(params=["llama", "qwen2", "qwen3", "mistral"])
def directory(request, tmp_path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    write_sample_model(path, kind=request.param, tied=request.param != "qwen2", **SMALL)
    return path


def _read_all(source) -> dict[str, np.ndarray]:
    files = {name: np.fromfile(path, np.uint8) for name, path in source.weights.items()}
    return {
        tensor.name: read_rows(
            tensor, files[tensor.file][tensor.offset : tensor.offset + tensor.bytes], 0, tensor.rows
        ).reshape(tensor.shape)
        for tensor in source.tensors
    }


def _write_gguf(directory: Path, file: Path, quantization=None) -> None:
    """The model of `directory` as the converters of llama.cpp write it."""
    config = json.loads((directory / "config.json").read_text())
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    kind = config["model_type"]
    writer = gguf.GGUFWriter(file, kind)
    writer.add_name("Some Model 1.5")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    vocabulary = tokenizer["model"]["vocab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(list(vocabulary))
    writer.add_token_types([gguf.TokenType.CONTROL if len(token) > 1 else 1 for token in vocabulary])
    writer.add_token_merges(["a b"] if "ab" in vocabulary else [])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template((directory / "chat_template.jinja").read_text())
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, original in safetensors.numpy.load_file(directory / "model.safetensors").items():
        values = original
        if name in OUTER:
            target = OUTER[name]
        else:
            _, _, layer, rest = name.split(".", 3)
            module, _, suffix = rest.rpartition(".")
            target = f"blk.{layer}.{PARTS[module]}.{suffix}"
            count = heads.get(PARTS[module])
            if count and kind == "llama":
                values = original.reshape(count, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        if quantization is not None and values.ndim == 2:
            data = gguf.quants.quantize(values, quantization)
            writer.add_tensor(target, data, raw_dtype=quantization)
        else:
            writer.add_tensor(target, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_safetensors_values(directory):
    expected = safetensors.numpy.load_file(directory / "model.safetensors")
    found = _read_all(read_directory(directory))
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)


def test_gguf_equals_its_origin(directory, tmp_path):
    if "mistral" in (directory / "config.json").read_text():
        pytest.skip("llama.cpp writes Mistral as llama")
    _write_gguf(directory, tmp_path / "model.gguf")
    origin, source = read_directory(directory), read_gguf(tmp_path / "model.gguf")
    assert source.name == "some-model-1.5"
    assert source.architecture == origin.architecture
    assert source.chat_template == origin.chat_template
    expected, found = _read_all(origin), _read_all(source)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "F16", "BF16"])
def test_gguf_quantized(tmp_path, name):
    directory = tmp_path / "model"
    directory.mkdir()
    write_sample_model(directory, kind="llama", tied=True, **SMALL)
    _write_gguf(directory, tmp_path / "model.gguf", gguf.GGMLQuantizationType[name])
    bundle = create_bundle(read_source(tmp_path / "model.gguf"), tmp_path / "bundle")
    stored = {tensor.name: tensor for tensor in load_index(bundle).tensors}
    assert stored["model.layers.0.self_attn.q_proj.weight"].encoding == name.lower()
    expected = _read_all(read_directory(directory))
    coarse = {"Q8_0": 0.02, "Q4_0": 0.3, "Q4_1": 0.3, "F16": 0.001, "BF16": 0.01}[name]
    for tensor, values in _read_all(read_source(tmp_path / "model.gguf")).items():
        assert np.abs(values - expected[tensor]).max() <= coarse * np.abs(expected[tensor]).max()


def test_rows_may_be_read_piecewise(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    write_sample_model(directory, kind="llama", tied=True, **SMALL)
    _write_gguf(directory, tmp_path / "model.gguf")
    source = read_gguf(tmp_path / "model.gguf")
    whole = _read_all(source)
    data = np.fromfile(tmp_path / "model.gguf", np.uint8)
    for tensor in source.tensors:
        raw = data[tensor.offset : tensor.offset + tensor.bytes]
        pieces = [read_rows(tensor, raw, at, min(at + 7, tensor.rows)) for at in range(0, tensor.rows, 7)]
        np.testing.assert_array_equal(np.concatenate(pieces).reshape(tensor.shape), whole[tensor.name])


def test_shards_and_bfloat16(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    write_sample_model(directory, kind="llama", tied=True, **SMALL)
    values = safetensors.numpy.load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    weight_map = {}
    for number, names in enumerate([sorted(values)[::2], sorted(values)[1::2]]):
        shard = f"model-{number}.safetensors"
        weight_map |= dict.fromkeys(names, shard)
        words = [(values[name].view(np.uint32) >> 16).astype(np.uint16) for name in names]
        ends = np.cumsum([item.nbytes for item in words]).tolist()
        described = {
            name: {"dtype": "BF16", "shape": item.shape, "data_offsets": [end - item.nbytes, end]}
            for name, item, end in zip(names, words, ends, strict=True)
        }
        header = json.dumps(described).encode()
        data = b"".join(item.tobytes() for item in words)
        (directory / shard).write_bytes(struct.pack("<Q", len(header)) + header + data)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    bundle = create_bundle(read_source(directory), tmp_path / "bundle")
    assert bundle.manifest.weights == ("model-0.safetensors", "model-1.safetensors")
    for name, found in _read_all(read_directory(directory)).items():
        np.testing.assert_array_equal(found, (values[name].view(np.uint32) & 0xFFFF0000).view(np.float32))


def _edit(path: Path, **changes) -> None:
    value = json.loads(path.read_text())
    value.update(changes)
    path.write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "gpt2"}, "not supported"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "yarn"),
        ({"hidden_size": None}, "impossible"),
        ({"num_hidden_layers": 3}, "missing"),
        ({"num_hidden_layers": 1}, None),
        ({"intermediate_size": 77}, "shape"),
        ({"tie_word_embeddings": False}, "lm_head"),
    ],
)
def test_configuration_that_does_not_fit(tmp_path, changes, said):
    directory = tmp_path / "model"
    directory.mkdir()
    write_sample_model(directory, kind="llama", tied=True, **SMALL)
    _edit(directory / "config.json", **changes)
    if said is None:
        # Layers beyond the configured ones are not read, as in Hugging Face.
        assert create_bundle(read_source(directory), tmp_path / "bundle").manifest.architecture.num_layers == 1
        return
    with pytest.raises(BundleError, match=said):
        create_bundle(read_source(directory), tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_scaled_rotary_embedding_is_kept(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    write_sample_model(directory, kind="llama", tied=True, **SMALL)
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    _edit(directory / "config.json", rope_parameters={**scaling, "rope_theta": 5e5}, rope_theta=None)
    architecture = read_directory(directory).architecture
    assert architecture.rope_scaling == scaling
    assert architecture.rope_theta == 5e5


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff" * 64, b"\x00" * 64])
def test_files_that_are_something_else(tmp_path, name, content):
    directory = tmp_path / "model"
    directory.mkdir()
    write_sample_model(directory, kind="llama", tied=True, **SMALL)
    (directory / name).write_bytes(content)
    with pytest.raises(BundleError):
        create_bundle(read_source(directory), tmp_path / "bundle")


def _read_and_check(directory: Path) -> None:
    source = read_directory(directory)
    check_tensors(source.architecture, source.tensors, {"model.safetensors": 10**9})


@given(header=st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.dictionaries(st.text(), inner)))
def test_any_safetensors_header(tmp_path_factory, header):
    directory = tmp_path_factory.getbasetemp() / "headers"
    if not directory.exists():
        directory.mkdir()
        write_sample_model(directory, kind="llama", tied=True, **SMALL)
    data = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(data)) + data)
    with pytest.raises(BundleError):
        _read_and_check(directory)


def test_truncated_gguf(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    write_sample_model(directory, kind="llama", tied=True, **SMALL)
    _write_gguf(directory, tmp_path / "model.gguf")
    data = (tmp_path / "model.gguf").read_bytes()
    for size in (0, 3, 20, 500, len(data) // 2, len(data) - 100):
        (tmp_path / "cut.gguf").write_bytes(data[:size])
        with pytest.raises(BundleError):
            create_bundle(read_source(tmp_path / "cut.gguf"), tmp_path / "bundle")


def test_absent_source(tmp_path):
    with pytest.raises(BundleError):
        read_source(tmp_path / "absent.gguf")
    with pytest.raises(BundleError):
        read_source(tmp_path)


def test_table_that_lies(sample):
    tensors = list(load_index(sample).tensors)
    sizes = {"model.safetensors": sample.manifest.files["model.safetensors"].bytes}

    def changed(**fields) -> list[StoredTensor]:
        first = {name: getattr(tensors[0], name) for name in StoredTensor.__struct_fields__}
        return [StoredTensor(**{**first, **fields}), *tensors[1:]]

    check_tensors(sample.manifest.architecture, tensors, sizes)
    for lie in (
        tensors[1:],
        [*tensors, tensors[0]],
        changed(offset=sizes["model.safetensors"]),
        changed(file="other.safetensors"),
        changed(bytes=4),
        changed(encoding="q9_9"),
        changed(interleaved_heads=1000),
        changed(shape=(1, 1)),
    ):
        with pytest.raises(BundleError):
            check_tensors(sample.manifest.architecture, lie, sizes)
