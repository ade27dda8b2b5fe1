"""What an installation does: steps that can each be taken back, so that one that fails leaves the machine as it was."""

import contextlib
import re
import secrets
import shutil
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Protocol

from tie.cli.install.machine import SYSUSERS, Machine
from tie.daemon.errors import ConfigError

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
        """Does it, or raises; whatever there is of it then, `undo` takes back."""

    def undo(self) -> None:
        """Takes back what there is of `do`: all, half of it, or nothing."""


def carry_out(steps: Iterable[Step], say: Say) -> None:
    """Does all steps; or takes back those that were begun, the last first, and raises what went wrong.

    SIGTERM and SIGHUP count as an interrupt. There is one only: while something is taken back nothing interrupts that.
    What cannot be taken back is said, and the rest is taken back nevertheless.
    """
    begun: list[Step] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def ignore() -> None:
        for number in before:
            signal.signal(number, signal.SIG_IGN)

    def interrupt(*_: object) -> None:
        ignore()
        raise KeyboardInterrupt

    try:
        try:
            for number, handler in before.items():
                if handler is not signal.SIG_IGN:
                    signal.signal(number, interrupt)
            for step in steps:
                say(step.says)
                begun.append(step)
                step.do()
        finally:
            ignore()  # an interrupt until here takes everything back as well, and there is none after it
    except BaseException:
        for step in reversed(begun):
            say(f"taking back: {step.says}")
            try:
                step.undo()
            except Exception as error:  # noqa: BLE001 (whatever it is, the rest has to be taken back)
                say(f"could not take back: {step.says}: {error}")
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
        for place, content in self.contents.items():
            path = self.machine.at(place)
            self._before[path] = path.read_bytes() if path.is_file() else None
            if content is None:
                path.unlink(missing_ok=True)
                _remove_empty(path.parent, self.machine)
            else:
                _make_folder(path.parent, self._made)
                replace(path, content)
        self._run()

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
        _remove_made(self._made)
        if self._before:
            self._run()


@dataclass
class Link:
    """A symbolic link, exchanged as a whole."""

    machine: Machine
    says: str
    place: PurePosixPath
    target: PurePosixPath
    _before: str = ""
    _begun: bool = False
    _made: list[Path] = field(default_factory=list)

    def do(self) -> None:
        """Makes the link, or points it elsewhere.

        Raises:
            ConfigError: something else is there.
        """
        path = self.machine.at(self.place)
        if path.exists() and not path.is_symlink():
            raise ConfigError(f"{path} is not a link, so it cannot lead elsewhere", hint="move it to another place")
        self._before = self.machine.link(self.place)
        _make_folder(path.parent, self._made)
        self._begun = True
        _point(path, str(self.target))

    def undo(self) -> None:
        """Points it where it pointed, or removes it."""
        path = self.machine.at(self.place)
        if self._begun and self._before:
            _point(path, self._before)
        elif self._begun:
            path.unlink(missing_ok=True)
        _remove_made(self._made)


@dataclass
class Folder:
    """A folder that appears whole: made beside its place by `make`, and renamed.

    What is there already, because it is damaged, is moved aside first, for whoever still uses it and for `undo`; it is
    removed once all steps are done (`aside`).
    """

    machine: Machine
    says: str
    place: PurePosixPath
    make: Callable[[Path], None]
    _fresh: Path | None = None
    _whole: bool = False
    _aside: Path | None = None
    _made: list[Path] = field(default_factory=list)

    def do(self) -> None:
        """Makes it."""
        path = self.machine.at(self.place)
        _make_folder(path.parent, self._made)
        self._fresh = _beside(path)
        self.make(self._fresh)
        self._whole = True
        if path.exists():
            self._aside = _beside(path)
            path.rename(self._aside)
        self._fresh.rename(path)

    def undo(self) -> None:
        """Removes it, and puts back what was there."""
        path = self.machine.at(self.place)
        if self._fresh is not None and self._fresh.exists():
            shutil.rmtree(self._fresh)
        elif self._whole:
            shutil.rmtree(path)
        self._whole = False
        if self._aside is not None and self._aside.exists():
            self._aside.rename(path)
        _remove_made(self._made)


def aside(folder: Path) -> list[Path]:
    """What `Folder` has left in a folder: what it has replaced, and what it had half made when it was killed."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(path for path in found if re.fullmatch(r"\..+\.[0-9a-f]{8}", path.name))


@dataclass
class Command:
    """A program of the machine's, and what takes its effect back, or half of it."""

    machine: Machine
    says: str
    doing: Sequence[Sequence[str]]
    undoing: Sequence[Sequence[str]] = ()

    def do(self) -> None:
        """Runs it."""
        for argv in self.doing:
            self.machine.run(*argv)

    def undo(self) -> None:
        """Runs what takes it back."""
        for argv in self.undoing:
            self.machine.run(*argv)


def replace(path: Path, content: bytes) -> None:
    """Writes a file for everybody to read, all at once."""
    fresh = _beside(path)
    try:
        fresh.write_bytes(content)
        fresh.chmod(0o644)
        fresh.rename(path)
    finally:
        fresh.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


def _point(path: Path, target: str) -> None:
    fresh = _beside(path)
    try:
        fresh.symlink_to(target)
        fresh.rename(path)
    finally:
        fresh.unlink(missing_ok=True)


def _make_folder(folder: Path, made: list[Path]) -> None:
    """Makes a folder, and notes in `made` those of its path that were not there, the outermost first."""
    for path in [path for path in (folder, *folder.parents) if not path.exists()][::-1]:
        made.append(path)
        path.mkdir(mode=0o755)
        path.chmod(0o755)


def _remove_made(made: list[Path]) -> None:
    for folder in reversed(made):
        with contextlib.suppress(OSError):  # it is not there yet, or somebody else's file is in it by now
            folder.rmdir()


def _remove_empty(folder: Path, machine: Machine) -> None:
    """Removes folders that have become empty, from the inside out, but none that every machine has."""
    for path in (folder, *folder.parents):
        if path in (machine.at(SYSUSERS.parents[1]), machine.root):
            return
        try:
            path.rmdir()
        except OSError:  # not empty, or not there
            return
