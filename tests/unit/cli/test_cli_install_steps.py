"""Steps of an installation: whatever was begun is taken back."""

import os
import signal
from pathlib import Path, PurePosixPath

import pytest

from folder_contents import everything
from install_steps import Fails, quietly
from tie.cli.install import removal
from tie.cli.install.machine import ASSETS, CONFIG, PREFIX, RUN, SYSUSERS, TREES, Machine
from tie.cli.install.steps import Folder, Link, Step, WriteFiles, aside, carry_out
from tie.cli.install.system import Accounts, RunDirectory
from tie.daemon.errors import ConfigError


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
        Fails(),
    ]
    said: list[str] = []
    with pytest.raises(ConfigError, match="on purpose"):
        carry_out(wanted, said.append)
    assert everything(tmp_path) == before
    assert {path for path in tmp_path.rglob("*") if path.is_dir()} == folders
    assert sum(line.startswith("taking back") for line in said) == len(wanted)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_takes_everything_back_and_nothing_interrupts_that(tmp_path, number):
    class Interrupted(Fails):
        def do(self) -> None:
            os.kill(os.getpid(), number)

    class Interrupting(Fails):
        def do(self) -> None:
            pass

        def undo(self) -> None:
            os.kill(os.getpid(), number)

    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    link = Link(Machine(tmp_path), "", PurePosixPath("/link"), PurePosixPath("after"))
    with pytest.raises(KeyboardInterrupt):
        carry_out([link, Interrupting(), Interrupted()], quietly)
    assert list(tmp_path.iterdir()) == []
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers


def test_what_cannot_be_taken_back_is_said_and_the_rest_is_taken_back(tmp_path):
    class Stuck(Fails):
        says = "what stays"

        def do(self) -> None:
            """Done."""

        def undo(self) -> None:
            raise ConfigError("the disk is full")

    said: list[str] = []
    link = Link(Machine(tmp_path), "", PurePosixPath("/link"), PurePosixPath("after"))
    with pytest.raises(ConfigError, match="on purpose"):
        carry_out([link, Stuck(), Fails()], said.append)
    assert "could not take back: what stays: the disk is full" in said
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_was_done_but_not_yet_noted_is_taken_back(tmp_path):
    class Late(Link):
        def do(self) -> None:
            super().do()
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        carry_out([Late(Machine(tmp_path), "", PurePosixPath("/some/link"), PurePosixPath("after"))], quietly)
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
            carry_out([step], quietly)
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
        carry_out([Folder(Machine(tmp_path), "", PurePosixPath("/opt/tree"), half)], quietly)
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
            carry_out([folder, Fails()], quietly)
        assert everything(tmp_path) == {"opt/tree/module": b"damaged"}
        assert user.read() == "damaged"
        folder.undo()
        assert everything(tmp_path) == {"opt/tree/module": b"damaged"}, "once is enough"
    else:
        carry_out([folder], quietly)
        assert (machine.at(place) / "module").read_text() == "whole"
        (left,) = aside(tmp_path / "opt")
        assert (left / "module").read_text() == "damaged", "whoever uses it finds all of it"
    user.close()
