"""Steps that systemd's own tools do: accounts, the run directory, keys."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tie.cli.install.machine import CONFIG, KEYS, RUN, SYSUSERS, TMPFILES, Machine


@dataclass
class Accounts:
    """The daemons' users and the edges' groups."""

    machine: Machine
    users: Sequence[str]
    groups: Sequence[str]
    says: str = "accounts of the daemons, one group for each edge"
    _before: set[str] | None = None

    def do(self) -> None:
        """Lets systemd-sysusers make those that are missing."""
        self._before = names(self.machine)
        where = () if self.machine.root == Path("/") else (f"--root={self.machine.root}",)
        self.machine.run("systemd-sysusers", *where, "-", stdin=self.machine.at(SYSUSERS).read_text())

    def undo(self) -> None:
        """Removes those that were not there before."""
        if self._before is not None:
            remove_accounts(self.machine, set(self.users) | set(self.groups), keep=self._before)


@dataclass
class RunDirectory:
    """The run directory with one folder for each edge; at the next boot tmpfiles makes it."""

    machine: Machine
    says: str = f"{RUN}: one folder for each edge, in memory"
    _new: bool = False

    def do(self) -> None:
        """Lets systemd-tmpfiles make it."""
        self._new = not self.machine.at(RUN).exists()
        self.machine.run("systemd-tmpfiles", "--create", str(TMPFILES))

    def undo(self) -> None:
        """Removes it where it was not there."""
        if self._new and self.machine.at(RUN).exists():
            shutil.rmtree(self.machine.at(RUN))


@dataclass
class Keys:
    """The node's keys, which a unit makes at each boot."""

    machine: Machine
    says: str = "the node's keys, in memory"

    def do(self) -> None:
        """Starts the unit."""
        self.machine.run("systemctl", "start", KEYS)

    def undo(self) -> None:
        """Stops it: the keys go with the run directory."""
        self.machine.run("systemctl", "stop", KEYS)
        forget_failures(self.machine, [KEYS])


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


def forget_failures(machine: Machine, units: Sequence[str]) -> None:
    """Lets systemd forget which of these units have failed; else it would list them when they are long gone."""
    failed = _listed(machine, "--failed", units)
    if failed:
        machine.run("systemctl", "reset-failed", *failed)


def collect(machine: Machine, units: Sequence[str]) -> None:
    """Lets systemd look again at units that it still lists: it may have missed that a cgroup became empty.

    Asked for a unit, it looks whether anything is left of it.
    """
    there = _listed(machine, "--all", units)
    if there:
        machine.run("systemctl", "show", "--property=ActiveState", *there)


def _listed(machine: Machine, which: str, units: Sequence[str]) -> list[str]:
    patterns = [unit.replace("@", "@*") for unit in units]
    listed = machine.run("systemctl", "list-units", which, "--plain", "--no-legend", *patterns)
    return [line.split()[0] for line in listed.splitlines() if line.strip()]
