"""What an installation does: steps that can each be taken back, so that one that fails leaves the machine as it was."""

import contextlib
import secrets
import shutil
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Protocol

from tie.cli.install.machine import CONFIG, RUN, SYSUSERS, TMPFILES, Machine

Say = Callable[[str], None]


class Step(Protocol):
    """One change of a machine.

    Attributes:
        says: what it does, for people.
    """

    @property
    def says(self) -> str:
        """What it does."""

    def do(self) -> None:
        """Does it whole, or raises and leaves nothing of it."""

    def undo(self) -> None:
        """Takes back what `do` did."""


def carry_out(steps: Iterable[Step], say: Say) -> None:
    """Does all steps, or takes back those that were done, the last first, and raises what went wrong.

    SIGTERM and SIGHUP count as an interrupt; while something is taken back no signal interrupts that.
    """
    done: list[Step] = []
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    before[signal.SIGINT] = signal.getsignal(signal.SIGINT)
    try:
        for step in steps:
            say(step.says)
            step.do()
            done.append(step)
    except BaseException:
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        for step in reversed(done):
            say(f"taking back: {step.says}")
            with contextlib.suppress(Exception):  # what went wrong first is what has to be told
                step.undo()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class WriteFiles:
    """Files with their content; `None` removes one.

    Attributes:
        then: programs to run once they are written, and once they have been put back.
    """

    machine: Machine
    says: str
    contents: dict[PurePosixPath, bytes | None]
    then: Sequence[Sequence[str]] = ()
    _before: dict[Path, bytes | None] = field(default_factory=dict)
    _made: list[Path] = field(default_factory=list)

    def do(self) -> None:
        """Writes each at once: a reader sees the old file or the new one."""
        try:
            for place, content in self.contents.items():
                path = self.machine.at(place)
                self._before[path] = path.read_bytes() if path.is_file() else None
                if content is None:
                    path.unlink(missing_ok=True)
                    _remove_empty(path.parent, self.machine)
                else:
                    self._made += _make_folder(path.parent)
                    replace(path, content)
            self._run()
        except BaseException:
            self.undo()
            raise

    def _run(self) -> None:
        for argv in self.then:
            self.machine.run(*argv)

    def undo(self) -> None:
        """Puts the old contents back."""
        for path, content in self._before.items():
            if content is None:
                path.unlink(missing_ok=True)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                replace(path, content)
        for folder in reversed(self._made):
            with contextlib.suppress(OSError):  # somebody else's file is in it by now
                folder.rmdir()
        self._run()


@dataclass
class Link:
    """A symbolic link, exchanged as a whole."""

    machine: Machine
    says: str
    place: PurePosixPath
    target: PurePosixPath
    _before: str | None = None
    _made: list[Path] = field(default_factory=list)

    def do(self) -> None:
        """Makes the link, or points it elsewhere."""
        path = self.machine.at(self.place)
        self._before = str(path.readlink()) if path.is_symlink() else None
        self._made = _make_folder(path.parent)
        _point(path, str(self.target))

    def undo(self) -> None:
        """Points it where it pointed, or removes it."""
        path = self.machine.at(self.place)
        if self._before is None:
            path.unlink(missing_ok=True)
        else:
            _point(path, self._before)
        for folder in reversed(self._made):
            with contextlib.suppress(OSError):
                folder.rmdir()


@dataclass
class Folder:
    """A folder that appears whole: made beside its place by `make`, and renamed."""

    machine: Machine
    says: str
    place: PurePosixPath
    make: Callable[[Path], None]
    _made: list[Path] = field(default_factory=list)

    def do(self) -> None:
        """Makes it."""
        path = self.machine.at(self.place)
        self._made = _make_folder(path.parent)
        fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            self.make(fresh)
            if path.exists():  # damaged, or it would not be made anew
                shutil.rmtree(path)
            fresh.rename(path)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            self._remove_made()
            raise

    def undo(self) -> None:
        """Removes it."""
        shutil.rmtree(self.machine.at(self.place), ignore_errors=True)
        self._remove_made()

    def _remove_made(self) -> None:
        for folder in reversed(self._made):
            with contextlib.suppress(OSError):
                folder.rmdir()


@dataclass
class Accounts:
    """The daemons' users and the edges' groups."""

    machine: Machine
    users: Sequence[str]
    groups: Sequence[str]
    says: str = "accounts of the daemons, one group for each edge"
    _before: set[str] = field(default_factory=set)

    def do(self) -> None:
        """Lets systemd-sysusers make those that are missing."""
        self._before = names(self.machine)
        where = () if self.machine.root == Path("/") else (f"--root={self.machine.root}",)
        self.machine.run("systemd-sysusers", *where, "-", stdin=self.machine.at(SYSUSERS).read_text())

    def undo(self) -> None:
        """Removes those that were not there before."""
        remove_accounts(self.machine, set(self.users) | set(self.groups), keep=self._before)


@dataclass
class Command:
    """A program of the machine's, and what takes its effect back."""

    machine: Machine
    says: str
    doing: Sequence[Sequence[str]]
    undoing: Sequence[Sequence[str]] = ()

    def do(self) -> None:
        """Runs it."""
        try:
            for argv in self.doing:
                self.machine.run(*argv)
        except BaseException:
            with contextlib.suppress(Exception):
                self.undo()
            raise

    def undo(self) -> None:
        """Runs what takes it back."""
        for argv in self.undoing:
            self.machine.run(*argv)


@dataclass
class RunDirectory:
    """The run directory with one folder for each edge; at the next boot tmpfiles makes it."""

    machine: Machine
    says: str = f"{RUN}: one folder for each edge, in memory"
    _there: bool = False

    def do(self) -> None:
        """Lets systemd-tmpfiles make it."""
        self._there = self.machine.at(RUN).exists()
        self.machine.run("systemd-tmpfiles", "--create", str(TMPFILES))

    def undo(self) -> None:
        """Removes it where it was not there."""
        if not self._there:
            shutil.rmtree(self.machine.at(RUN), ignore_errors=True)


def names(machine: Machine, file: str = "") -> set[str]:
    """The names of all users ("passwd") and groups ("group") of the machine, or of both."""
    found = set()
    for each in (file,) if file else ("passwd", "group"):
        path = machine.at(CONFIG.parent.parent / each)
        if path.exists():
            found |= {line.split(":")[0] for line in path.read_text().splitlines()}
    return found


def remove_accounts(machine: Machine, accounts: set[str], *, keep: set[str]) -> None:
    """Removes users and groups that are there and not among those to keep."""
    where = () if machine.root == Path("/") else ("--prefix", str(machine.root))
    # A user's own group goes with it, where login.defs says so.
    for file, program in (("passwd", "userdel"), ("group", "groupdel")):
        for name in sorted((accounts & names(machine, file)) - keep):
            machine.run(program, *where, name)


def replace(path: Path, content: bytes) -> None:
    """Writes a file for everybody to read, all at once."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        fresh.write_bytes(content)
        fresh.chmod(0o644)
        fresh.rename(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def _point(path: Path, target: str) -> None:
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    fresh.symlink_to(target)
    fresh.rename(path)


def _make_folder(folder: Path) -> list[Path]:
    """Makes a folder; those of it that were not there, the outermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()][::-1]
    for path in missing:
        path.mkdir(mode=0o755)
        path.chmod(0o755)
    return missing


def _remove_empty(folder: Path, machine: Machine) -> None:
    """Removes folders that have become empty, from the inside out, but none that every machine has."""
    for path in (folder, *folder.parents):
        if path in (machine.at(SYSUSERS.parents[1]), machine.root):
            return
        try:
            path.rmdir()
        except OSError:  # not empty, or not there
            return
