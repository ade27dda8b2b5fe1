"""An image that is installed into, and the commands that do it."""

import os
import sys
from importlib import metadata
from pathlib import Path, PurePosixPath

import click
import pytest
from click.testing import CliRunner

from folder_contents import everything
from install_steps import Fails, quietly
from tie.cli.install import distributions, plan, removal, system
from tie.cli.install.checks import installed
from tie.cli.install.command import install, uninstall
from tie.cli.install.machine import CONFIG, PREFIX, TREES, UNITS, Machine
from tie.cli.install.steps import carry_out
from tie.daemon.errors import ConfigError

PYTHON = Path(f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}")


@pytest.fixture
def image(tmp_path, monkeypatch, sources) -> Machine:
    """A machine's image with just enough in it, and an environment of one module to install from."""
    if os.geteuid() != 0:
        pytest.skip("needs root: it makes accounts in an image")
    root = tmp_path / "image"
    for folder in ("etc", "usr/bin", "usr/lib/systemd", "usr/lib/x86_64-linux-gnu", "usr/local/bin"):
        (root / folder).mkdir(parents=True)
    (root / "usr/lib/systemd/systemd").write_text("")
    (root / PYTHON.relative_to("/")).write_text("")
    (root / f"usr/lib/x86_64-linux-gnu/lib{PYTHON.name}.so.1.0").write_text("")
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")
    shared = [
        source
        for source in distributions.sources(metadata.distribution("tie-inference"))
        if "share" in source.path.parts
    ]
    monkeypatch.setattr(distributions, "sources", lambda item: [*sources, *shared] if item.name == "click" else [])
    monkeypatch.setattr(distributions, "record", lambda _: (PurePosixPath("site-packages/RECORD"), b""))
    return Machine(root)


def test_an_image_gets_a_node_once_and_loses_all_of_it_again(image):
    before = everything(image.root)
    image.check()
    carry_out(plan.steps(image, plan.Wish(gpu=True)), quietly)
    assert (image.at(UNITS) / "tie.target").is_file()
    assert (image.at(UNITS) / "gpuhealthd.service.d/50-gpu.conf").is_file()
    assert (image.root / "etc/systemd/system/multi-user.target.wants/tie.target").is_symlink()
    assert {"tie-runtime", "tie-edge-owner"} <= system.names(image)
    assert plan.steps(image, plan.Wish()) == []
    assert [step.says for step in plan.steps(image, plan.Wish(gpu=False))] == [
        "3 files of systemd below /usr/local/lib"
    ]
    found = {check.name: check.level for check in installed(image)}
    assert (found["installation"], found["units"], found["accounts"], found["model"]) == ("ok", "ok", "ok", "missing")
    for step in removal.steps(image, purge=False):
        step.do()
    left = everything(image.root)
    assert {name: left[name] for name in before if not name.startswith("etc/")} == {
        name: content for name, content in before.items() if not name.startswith("etc/")
    }
    assert system.names(image) == {"root"}
    assert not image.at(CONFIG).exists()
    assert removal.steps(image, purge=True) == []


def test_an_installation_that_fails_at_its_end_leaves_the_image_as_it_was(image):
    before = everything(image.root)
    with pytest.raises(ConfigError, match="on purpose"):
        carry_out([*plan.steps(image, plan.Wish()), Fails()], quietly)
    after = everything(image.root)
    assert {name for name in after if not name.startswith("etc/") or "tie" in name} == {
        name for name in before if not name.startswith("etc/")
    }
    assert system.names(image) == {"root"}


def test_an_edited_configuration_is_an_operators(image):
    carry_out(plan.steps(image, plan.Wish()), quietly)
    image.at(CONFIG).write_text("node_id = 'mine'\n")
    assert plan.steps(image, plan.Wish()) == []
    for step in removal.steps(image, purge=False):
        step.do()
    assert image.at(CONFIG).read_text() == "node_id = 'mine'\n"
    assert CONFIG in removal.kept(image, purge=False)
    for step in removal.steps(image, purge=True):
        step.do()
    assert not image.at(CONFIG).exists()


@pytest.mark.parametrize("lacks", ["usr/lib/systemd/systemd", str(PYTHON.relative_to("/"))])
def test_a_machine_that_a_node_cannot_run_on_is_refused(image, lacks):
    (image.root / lacks).unlink()
    with pytest.raises(ConfigError, match="there is no"):
        image.check()


# ---- the commands ----------------------------------------------------------------------------------------------------


def call(command: click.Command, image: Machine, *arguments: str) -> list[str]:
    """What a command says; its error is raised."""
    done = CliRunner().invoke(command, ["--root", str(image.root), *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output.splitlines()


def test_a_dry_run_says_what_the_real_one_does(image):
    would = [line.removeprefix("would do: ") for line in call(install, image, "--dry-run") if "would do" in line]
    assert would
    before = everything(image.root)
    assert call(install, image, "--dry-run")
    assert everything(image.root) == before
    assert call(install, image)[: len(would)] == would
    for name in ("0", "1"):
        (image.at(TREES) / name).mkdir()  # older versions
    would = [line.removeprefix("would do: ") for line in call(install, image, "--dry-run") if "would do" in line]
    assert would == [f"no longer needed: {TREES / name}" for name in ("0", "1")]
    assert call(install, image)[:2] == would
    would = [line.removeprefix("would do: ") for line in call(uninstall, image, "--dry-run")]
    assert call(uninstall, image) == would


def test_a_dry_run_refuses_what_the_real_one_refuses(image):
    (image.root / "usr/lib/systemd/systemd").unlink()
    with pytest.raises(ConfigError, match="no systemd"):
        call(install, image, "--dry-run")


@pytest.mark.parametrize("command", [install, uninstall])
def test_one_at_a_time_from_the_planning_on(image, command, monkeypatch):
    monkeypatch.setattr(plan, "steps", lambda *_: pytest.fail("it planned"))
    monkeypatch.setattr(removal, "steps", lambda *_, **__: pytest.fail("it planned"))
    with image.alone(), pytest.raises(ConfigError, match="under way"):
        call(command, image)


def test_containers_of_an_image_are_refused(image):
    before = everything(image.root)
    with pytest.raises(ConfigError, match="not of an image"):
        call(install, image, "--container", "app")
    assert everything(image.root) == before
    call(install, image, "--container", "none")


def test_what_is_in_the_way_is_named_and_stays(image):
    image.at(PREFIX).mkdir(parents=True)
    with pytest.raises(ConfigError, match=f"not ours: {PREFIX}"):
        call(install, image, "--dry-run")
    call(uninstall, image)
    assert image.at(PREFIX).is_dir()
