"""The model that an installation brings: what is copied, what is compared, and what the link says."""

import os
from pathlib import Path

import pytest

from tie.assets import active
from tie.assets.bundle import open_bundle
from tie.assets.manifest import MANIFEST_FILE
from tie.assets.sample import make_sample_bundle
from tie.cli.install import model
from tie.cli.install.machine import ASSETS, Machine
from tie.cli.install.model import ACTIVE
from tie.cli.install.steps import carry_out
from tie.daemon.errors import BundleError


def _quietly(text: str) -> None:
    del text


@pytest.fixture
def bundle(tmp_path) -> Path:
    return make_sample_bundle(tmp_path / "bundle", model="m", release="1").directory


@pytest.fixture
def machine(tmp_path) -> Machine:
    (tmp_path / "machine").mkdir()
    return Machine(tmp_path / "machine")


def put(machine: Machine, bundle: Path) -> list[str]:
    """Brings a model onto the machine; what was to be done."""
    steps = model.steps(machine, bundle, demo=False)
    carry_out(steps, _quietly)
    return [type(step).__name__ for step in steps]


def test_what_the_manifest_names_is_copied_and_nothing_else(machine, bundle):
    (bundle / "notes.txt").write_text("not the node's business")
    (bundle / "folder").mkdir()
    assert put(machine, bundle) == ["Folder", "Link"]
    there = open_bundle(machine.at(ACTIVE))
    there.verify()
    assert {path.name for path in there.directory.iterdir()} == {MANIFEST_FILE, *there.manifest.files}
    assert put(machine, bundle) == []


def test_it_is_the_copy_that_is_verified(machine, bundle, monkeypatch):
    """What is read at the time of the copying is what counts: it may be another content than a moment before."""
    wanted = open_bundle(bundle)
    steps = model.steps(machine, bundle, demo=False)
    file = bundle / next(iter(wanted.manifest.weights))
    size = file.stat().st_size
    file.write_bytes(os.urandom(size))
    monkeypatch.setattr(type(wanted), "verify", _only_below(machine, type(wanted).verify))
    with pytest.raises(BundleError, match="not what the manifest says"):
        carry_out(steps, _quietly)
    assert list(machine.root.iterdir()) == []


def _only_below(machine: Machine, verify):
    def verified(self, progress=None) -> None:
        assert self.directory.is_relative_to(machine.root)
        verify(self, progress)

    return verified


def test_another_bundle_in_the_place_of_the_one_that_was_planned_for_is_refused(machine, bundle, tmp_path):
    steps = model.steps(machine, bundle, demo=False)
    bundle.rename(tmp_path / "gone")
    make_sample_bundle(bundle, model="m", release="2", seed=1)
    with pytest.raises(BundleError):
        carry_out(steps, _quietly)
    assert list(machine.root.iterdir()) == []


def test_a_damaged_model_is_laid_anew(machine, bundle):
    put(machine, bundle)
    place = machine.at(ACTIVE).resolve()
    (place / MANIFEST_FILE).write_text("{}")
    assert put(machine, bundle) == ["Folder"]
    open_bundle(place).verify()


def test_two_contents_cannot_have_one_release(machine, bundle, tmp_path):
    put(machine, bundle)
    other = make_sample_bundle(tmp_path / "other", model="m", release="1", seed=1).directory
    assert open_bundle(other).manifest != open_bundle(bundle).manifest
    with pytest.raises(BundleError, match="same name and release"):
        model.steps(machine, other, demo=False)


def test_what_was_activated_already_is_not_linked_again(machine, bundle):
    put(machine, bundle)
    name = machine.link(ACTIVE)
    machine.at(ACTIVE).unlink()
    machine.at(ACTIVE).symlink_to(ASSETS / name)  # as `tie assets activate` makes it
    assert model.steps(machine, bundle, demo=False) == []
    assert ACTIVE.name == active.LINK
