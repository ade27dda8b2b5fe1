"""Bundles on disk: opening, checking, making."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tie.assets import build
from tie.assets.build import BundleExistsError, create_bundle, read_source
from tie.assets.bundle import open_bundle
from tie.assets.sample import make_sample_bundle, write_sample_model
from tie.daemon.errors import BundleError


@pytest.fixture
def source(tmp_path):
    directory = tmp_path / "Some Model"
    directory.mkdir()
    write_sample_model(
        directory, kind="llama", seed=1, layers=1, hidden_size=32, heads=2, kv_heads=1, context_tokens=64, tied=True
    )
    return directory


def test_sample_opens_and_verifies(sample):
    counted = []
    open_bundle(sample.directory).verify(counted.append)
    assert sum(counted) == sum(entry.bytes for entry in sample.manifest.files.values())


def test_sample_is_reproducible(tmp_path):
    first, second = (make_sample_bundle(tmp_path / name, seed=3) for name in ("a", "b"))
    assert first.manifest == second.manifest
    assert make_sample_bundle(tmp_path / "c", seed=4).manifest.release != first.manifest.release


def test_registered_prompt_begins_every_conversation_with_it(sample, sample_tokenizer):
    (prompt,) = sample.manifest.system_prompts
    assert sample_tokenizer.decode(prompt.token_ids) == "system\nBe brief.\n"


def test_missing_is_no_bundle(tmp_path):
    with pytest.raises(BundleError, match="no model bundle") as caught:
        open_bundle(tmp_path / "absent")
    assert "tie assets" in caught.value.hint


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff" * 100])
def test_manifest_that_is_none(own_sample, content):
    (own_sample / "manifest.json").write_bytes(content)
    with pytest.raises(BundleError):
        open_bundle(own_sample)


@given(st.binary(max_size=200))
def test_any_bytes_are_no_manifest(tmp_path_factory, data):
    directory = tmp_path_factory.getbasetemp() / "any"
    directory.mkdir(exist_ok=True)
    (directory / "manifest.json").write_bytes(data)
    with pytest.raises(BundleError):
        open_bundle(directory)


def test_missing_file(own_sample):
    (own_sample / "tokenizer.json").unlink()
    with pytest.raises(BundleError):
        open_bundle(own_sample)


def test_wrong_size(own_sample):
    with (own_sample / "tokenizer.json").open("ab") as stream:
        stream.write(b" ")
    with pytest.raises(BundleError, match=r"tokenizer\.json"):
        open_bundle(own_sample)


def test_link_out_of_the_bundle_is_refused(own_sample, tmp_path):
    file = own_sample / "tokenizer.json"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BundleError):
        open_bundle(own_sample)


def test_flipped_byte_is_found(own_sample):
    file = own_sample / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(BundleError, match=r"model\.safetensors"):
        open_bundle(own_sample).verify()
    text = own_sample / "tokenizer.json"
    text.write_bytes(text.read_bytes()[:-1] + b" ")
    with pytest.raises(BundleError, match=r"tokenizer\.json"):
        open_bundle(own_sample).read("tokenizer.json")


def test_unlisted_name(sample):
    with pytest.raises(BundleError):
        sample.path("../secrets")


def test_same_again_is_success_and_touches_nothing(source, tmp_path):
    made = create_bundle(read_source(source), tmp_path / "out")
    assert made.manifest.model == "some-model"
    before = (tmp_path / "out").stat().st_ino
    again = create_bundle(read_source(source), tmp_path / "out")
    assert again.manifest == made.manifest
    assert (tmp_path / "out").stat().st_ino == before


def test_other_needs_force(source, tmp_path):
    create_bundle(read_source(source), tmp_path / "out", model="one")
    with pytest.raises(BundleExistsError) as caught:
        create_bundle(read_source(source), tmp_path / "out", model="two")
    assert "--force" in caught.value.hint
    assert open_bundle(tmp_path / "out").manifest.model == "one"
    assert create_bundle(read_source(source), tmp_path / "out", model="two", force=True).manifest.model == "two"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["Some Model", "out"]


def test_a_file_in_the_way(source, tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(BundleExistsError):
        create_bundle(read_source(source), tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


def test_source_that_changes_meanwhile_leaves_nothing(source, tmp_path, monkeypatch):
    place = build._place

    def change_then_place(file, destination, progress):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        place(file, destination, progress)

    monkeypatch.setattr(build, "_place", change_then_place)
    with pytest.raises(BundleError, match="manifest"):
        create_bundle(read_source(source), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["Some Model"]


@pytest.mark.parametrize("mode", [0o644, 0o600, 0o666])
def test_weights_are_shared_or_copied_whatever_their_mode(source, tmp_path, mode):
    weights = source / "model.safetensors"
    weights.chmod(mode)
    made = create_bundle(read_source(source), tmp_path / "out")
    made.verify()
    assert made.path("model.safetensors").stat().st_mode & 0o444 == 0o444 or mode == 0o600
    if mode != 0o644:
        assert made.path("model.safetensors").stat().st_ino != weights.stat().st_ino


def test_unusable_names_are_refused(source, tmp_path):
    for options in ({"model": "../x"}, {"release": "a b"}, {"system_prompts": {"a/b": "text"}}):
        with pytest.raises(BundleError):
            create_bundle(read_source(source), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_base_model_has_no_system_prompts(source, tmp_path):
    (source / "chat_template.jinja").unlink()
    with pytest.raises(BundleError, match="chat template"):
        create_bundle(read_source(source), tmp_path / "out", system_prompts={"a": "b"})
    made = create_bundle(read_source(source), tmp_path / "out")
    assert "chat_template.jinja" not in made.manifest.files
    assert msgspec.json.decode((tmp_path / "out" / "manifest.json").read_bytes())["weights_format"] == "safetensors"


@pytest.mark.parametrize("name", ["manifest.json", "notes.txt"])
def test_force_replaces_bundles_and_nothing_else(source, tmp_path, name):
    mine = tmp_path / "work" / "src"
    mine.mkdir(parents=True)
    (mine / "program.py").write_text("mine")
    (tmp_path / "work" / name).write_text("{}")
    with pytest.raises(BundleExistsError, match="is no bundle"):
        create_bundle(read_source(source), tmp_path / "work", force=True)
    assert (mine / "program.py").read_text() == "mine"


def test_force_replaces_a_damaged_bundle(source, tmp_path):
    create_bundle(read_source(source), tmp_path / "out")
    (tmp_path / "out" / "manifest.json").write_text("{")
    create_bundle(read_source(source), tmp_path / "out", force=True).verify()


def test_an_empty_directory_is_taken(source, tmp_path):
    (tmp_path / "out").mkdir()
    create_bundle(read_source(source), tmp_path / "out").verify()


def test_a_bundle_out_of_a_bundle_differs_in_its_prompts_alone(tmp_path):
    """What the model owner compares to keep its weights."""
    first = make_sample_bundle(tmp_path / "first", model="one", system_prompts={"old": "You are old."})
    again = create_bundle(read_source(first.directory), tmp_path / "again", system_prompts={"new": "You are new."})
    before, after = (msgspec.to_builtins(bundle.manifest) for bundle in (first, again))
    assert {key for key in before if before[key] != after[key]} == {"release", "system_prompts"}
    same = create_bundle(read_source(first.directory), tmp_path / "same", system_prompts={"old": "You are old."})
    assert same.manifest == first.manifest
