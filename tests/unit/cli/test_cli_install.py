"""Installing: what a tree is made of, steps that are taken back, and an image that is installed into."""

import base64
import hashlib
import os
import signal
import stat
import sys
from importlib import metadata
from pathlib import Path, PurePosixPath

import click
import pytest
from click.testing import CliRunner

from tie.cli.install import distributions, plan, removal, system, tree
from tie.cli.install.checks import installed
from tie.cli.install.command import install, uninstall
from tie.cli.install.distributions import Source
from tie.cli.install.machine import ASSETS, CONFIG, PREFIX, RUN, SYSUSERS, TREES, UNITS, Machine
from tie.cli.install.steps import Folder, Link, Step, WriteFiles, aside, carry_out
from tie.cli.install.system import Accounts, RunDirectory
from tie.daemon.errors import ConfigError

PYTHON = Path(f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}")


def _quietly(text: str) -> None:
    del text


def everything(folder: Path) -> dict[str, bytes | str]:
    return {
        path.relative_to(folder).as_posix(): str(path.readlink()) if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


# ---- distributions ---------------------------------------------------------------------------------------------------


def test_a_node_gets_what_it_needs_and_nothing_of_the_tests():
    names = {item.name.lower() for item in distributions.closure(["tie-inference[node]"])}
    assert {"grpcio", "tritonclient", "cryptography", "msgspec", "supervisor", "numpy", "packaging"} <= names
    assert not names & {"pytest", "mypy", "ruff", "torch", "transformers", "hypothesis", "grpcio-tools"}


def test_what_is_not_installed_is_named():
    with pytest.raises(ConfigError, match="no-such-distribution"):
        distributions.closure(["no-such-distribution"])


def test_another_version_than_the_locked_one_is_refused(tmp_path):
    lock = tmp_path / "requirements.lock"
    lock.write_text("click==0.0.1\n")
    with pytest.raises(ConfigError, match=r"click .* \(locked: 0\.0\.1\)"):
        distributions.check_lock([metadata.distribution("click")], lock)


def _distribution(folder: Path, *records: str) -> metadata.Distribution:
    info = folder / "thing-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thing\nVersion: 1\n")
    (info / "RECORD").write_text("".join(f"{line}\n" for line in records))
    return metadata.Distribution.at(info)


def test_a_file_that_was_changed_since_pip_installed_it_is_refused(tmp_path):
    content = b"x = 1\n"
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    (tmp_path / "thing.py").write_bytes(content)
    made = _distribution(tmp_path, f"thing.py,sha256={digest},6", "__pycache__/thing.pyc,,", "../../../bin/thing,,")
    (source,) = distributions.sources(made)
    assert source.path == PurePosixPath("site-packages/thing.py")
    assert distributions.read(source) == content
    (tmp_path / "thing.py").write_bytes(b"x = 2\n")
    with pytest.raises(ConfigError, match="has been changed"):
        distributions.read(source)


# ---- trees -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def sources(tmp_path) -> list[Source]:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "one.py").write_text("KINDS = {'a', 'b', 'c', 'd'}\n\ndef is_kind(x):\n    return x in {'e', 'f', 'g'}\n")
    (folder / "tool").write_text("#!/bin/sh\n")
    (folder / "tool").chmod(0o700)
    return [
        Source(PurePosixPath("site-packages/one.py"), folder / "one.py", ""),
        Source(PurePosixPath("share/tie/tool"), folder / "tool", ""),
    ]


def _lay(folder: Path, sources: list[Source]) -> str:
    tree.build(folder, sources, {"one": "one:is_kind"}, records={}, prefix=PREFIX, python=PYTHON)
    tree.compile_bytecode(folder, PREFIX)
    return tree.settle(folder)


def test_the_same_files_give_the_same_tree_and_the_same_archive_to_the_bit(tmp_path, sources):
    first = _lay(tmp_path / "first", sources)
    old = os.umask(0o077)
    try:
        second = _lay(tmp_path / "second", sources[::-1])
    finally:
        os.umask(old)
    assert first == second
    archives = [tree.archive(tmp_path / name, tmp_path / f"{name}.tar") for name in ("first", "second")]
    assert archives[0] == archives[1]
    assert list((tmp_path / "first").rglob("*.pyc"))


@pytest.mark.parametrize("change", ["content", "mode", "name", "link"])
def test_whatever_changes_in_a_tree_changes_its_hash(tmp_path, sources, change):
    folder = tmp_path / "tree"
    before = _lay(folder, sources)
    module = next(folder.rglob("one.py"))
    match change:
        case "content":
            module.write_text(module.read_text() + "#")
        case "mode":
            module.chmod(0o755)
        case "name":
            module.rename(module.with_name("two.py"))
        case "link":
            (folder / "bin/python").unlink()
            (folder / "bin/python").symlink_to("/usr/bin/true")
    assert tree.digest(folder) != before


def test_a_tree_is_laid_out_as_an_environment_that_nobody_can_write(tmp_path, sources):
    folder = tmp_path / "tree"
    _lay(folder, sources)
    assert (folder / "bin/one").read_text().startswith(f"#!{PREFIX}/bin/python -P\n")
    assert (folder / "bin/python").readlink() == PYTHON
    for path in folder.rglob("*"):
        if not path.is_symlink():
            assert stat.S_IMODE(path.stat().st_mode) in (0o644, 0o755)
            assert path.stat().st_mtime == tree.EPOCH


def test_what_cannot_be_read_leaves_no_tree(tmp_path, sources):
    missing = Source(PurePosixPath("site-packages/gone.py"), tmp_path / "gone.py", "")
    with pytest.raises(ConfigError, match="cannot read"):
        _lay(tmp_path / "tree", [*sources, missing])
    assert not (tmp_path / "tree").exists()


# ---- steps -----------------------------------------------------------------------------------------------------------


class _Fails:
    says = "what fails"

    def do(self) -> None:
        raise ConfigError("on purpose")

    def undo(self) -> None:
        """Nothing was done."""


def test_whatever_fails_is_taken_back(tmp_path):
    machine = Machine(tmp_path)
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/kept").write_text("old")
    (tmp_path / "link").symlink_to("before")
    before = everything(tmp_path)
    folders = {path for path in tmp_path.rglob("*") if path.is_dir()}
    wanted = [
        Folder(machine, "", PurePosixPath("/opt/some/tree"), lambda folder: folder.mkdir()),
        WriteFiles(machine, "", {PurePosixPath("/etc/kept"): b"new", PurePosixPath("/usr/new/file"): b"x"}),
        WriteFiles(machine, "", {PurePosixPath("/etc/kept"): None}),
        Link(machine, "", PurePosixPath("/link"), PurePosixPath("after")),
        Link(machine, "", PurePosixPath("/other/link"), PurePosixPath("after")),
        _Fails(),
    ]
    said: list[str] = []
    with pytest.raises(ConfigError, match="on purpose"):
        carry_out(wanted, said.append)
    assert everything(tmp_path) == before
    assert {path for path in tmp_path.rglob("*") if path.is_dir()} == folders
    assert sum(line.startswith("taking back") for line in said) == len(wanted)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_takes_everything_back_and_nothing_interrupts_that(tmp_path, number):
    class Interrupted(_Fails):
        def do(self) -> None:
            os.kill(os.getpid(), number)

    class Interrupting(_Fails):
        def do(self) -> None:
            pass

        def undo(self) -> None:
            os.kill(os.getpid(), number)

    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    link = Link(Machine(tmp_path), "", PurePosixPath("/link"), PurePosixPath("after"))
    with pytest.raises(KeyboardInterrupt):
        carry_out([link, Interrupting(), Interrupted()], _quietly)
    assert list(tmp_path.iterdir()) == []
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers


def test_what_cannot_be_taken_back_is_said_and_the_rest_is_taken_back(tmp_path):
    class Stuck(_Fails):
        says = "what stays"

        def do(self) -> None:
            """Done."""

        def undo(self) -> None:
            raise ConfigError("the disk is full")

    said: list[str] = []
    link = Link(Machine(tmp_path), "", PurePosixPath("/link"), PurePosixPath("after"))
    with pytest.raises(ConfigError, match="on purpose"):
        carry_out([link, Stuck(), _Fails()], said.append)
    assert "could not take back: what stays: the disk is full" in said
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_was_done_but_not_yet_noted_is_taken_back(tmp_path):
    class Late(Link):
        def do(self) -> None:
            super().do()
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        carry_out([Late(Machine(tmp_path), "", PurePosixPath("/some/link"), PurePosixPath("after"))], _quietly)
    assert list(tmp_path.iterdir()) == []


class _Breaks(Machine):
    """A machine whose programs do half of their work and fail."""

    def run(self, *argv: str, stdin: str = "") -> str:
        del stdin
        match argv[0]:
            case "systemd-sysusers":
                with self.at(PurePosixPath("/etc/passwd")).open("a") as file:
                    file.write("tie-kps:x:999:999::/:/bin/false\n")
            case "systemd-tmpfiles":
                (self.at(RUN) / "keys").mkdir(parents=True)
            case "userdel":
                file = self.at(PurePosixPath("/etc/passwd"))
                file.write_text(
                    "".join(line for line in file.read_text().splitlines(True) if not line.startswith(argv[-1]))
                )
                return ""
        raise ConfigError("on purpose")


def test_the_half_of_a_step_that_was_done_is_taken_back(tmp_path):
    machine = _Breaks(tmp_path)
    machine.at(SYSUSERS).parent.mkdir(parents=True)
    machine.at(SYSUSERS).write_text("")
    machine.at(RUN).parent.mkdir()
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    before = everything(tmp_path)
    for step in (Accounts(machine, ["root", "tie-kps"], []), RunDirectory(machine)):
        with pytest.raises(ConfigError, match="on purpose"):
            carry_out([step], _quietly)
        assert everything(tmp_path) == before
        assert not machine.at(RUN).exists()


@pytest.mark.parametrize(
    "step",
    [
        lambda machine: WriteFiles(machine, "", {CONFIG: b"new"}, [["false"]]),
        lambda machine: Link(machine, "", PREFIX, TREES),
        lambda machine: Folder(machine, "", TREES, lambda folder: folder.mkdir()),
        lambda machine: Accounts(machine, ["root"], ["root"]),
        RunDirectory,
    ],
)
def test_what_was_never_begun_takes_nothing_away(tmp_path, step):
    machine = Machine(tmp_path)
    for place in (CONFIG, PREFIX, TREES / "1", RUN / "keys"):
        machine.at(place).mkdir(parents=True)
    (tmp_path / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    before = list(tmp_path.rglob("*"))
    made: Step = step(machine)
    made.undo()
    assert list(tmp_path.rglob("*")) == before


def test_two_installations_at_once_are_refused(tmp_path):
    with Machine(tmp_path).alone(), pytest.raises(ConfigError, match="under way"), Machine(tmp_path).alone():
        raise AssertionError("unreachable")
    with Machine(tmp_path).alone():
        pass


def test_of_old_versions_the_last_one_stays(tmp_path):
    machine = Machine(tmp_path)
    for name in ("1", "2", "3"):
        machine.at(TREES / name / "tree").mkdir(parents=True)
    machine.at(PREFIX).symlink_to(TREES / "3/tree")
    (machine.at(TREES) / ".3.0123abcd").mkdir()  # what was damaged
    machine.at(ASSETS / "demo").mkdir(parents=True)
    machine.at(ASSETS / ".demo.0123abcd").mkdir()
    for old in removal.spent(machine, before=TREES / "2", after=TREES / "3"):
        old.do()
    assert {path.name for path in machine.at(ASSETS).iterdir()} == {"demo"}
    assert {path.name for path in machine.at(TREES).iterdir()} == {"2", "3"}


def test_a_folder_that_cannot_be_made_whole_does_not_appear(tmp_path):
    def half(folder: Path) -> None:
        folder.mkdir()
        (folder / "part").write_text("x")
        raise ConfigError("on purpose")

    with pytest.raises(ConfigError):
        carry_out([Folder(Machine(tmp_path), "", PurePosixPath("/opt/tree"), half)], _quietly)
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_mended_is_moved_aside_and_comes_back_if_need_be(tmp_path, fails):
    machine, place = Machine(tmp_path), PurePosixPath("/opt/tree")
    machine.at(place).mkdir(parents=True)
    (machine.at(place) / "module").write_text("damaged")
    user = (machine.at(place) / "module").open()

    def make(folder: Path) -> None:
        folder.mkdir()
        (folder / "module").write_text("whole")

    folder = Folder(machine, "", place, make)
    if fails:
        with pytest.raises(ConfigError, match="on purpose"):
            carry_out([folder, _Fails()], _quietly)
        assert everything(tmp_path) == {"opt/tree/module": b"damaged"}
        assert user.read() == "damaged"
        folder.undo()
        assert everything(tmp_path) == {"opt/tree/module": b"damaged"}, "once is enough"
    else:
        carry_out([folder], _quietly)
        assert (machine.at(place) / "module").read_text() == "whole"
        (left,) = aside(tmp_path / "opt")
        assert (left / "module").read_text() == "damaged", "whoever uses it finds all of it"
    user.close()


# ---- an image --------------------------------------------------------------------------------------------------------


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
    carry_out(plan.steps(image, plan.Wish(gpu=True)), _quietly)
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
        carry_out([*plan.steps(image, plan.Wish()), _Fails()], _quietly)
    after = everything(image.root)
    assert {name for name in after if not name.startswith("etc/") or "tie" in name} == {
        name for name in before if not name.startswith("etc/")
    }
    assert system.names(image) == {"root"}


def test_an_edited_configuration_is_an_operators(image):
    carry_out(plan.steps(image, plan.Wish()), _quietly)
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
