"""The steps of an uninstallation. They cannot be taken back, but each can be repeated, and so can the whole."""

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tie.cli.install import distributions, files, plan
from tie.cli.install.exchange import stop
from tie.cli.install.machine import ASSETS, COMMAND, CONFIG, KEYS, PREFIX, RUN, STATE, TARGET, TREES, Machine
from tie.cli.install.roots import ROOTS
from tie.cli.install.steps import WriteFiles
from tie.cli.install.system import forget_failures, names, remove_accounts


@dataclass(frozen=True)
class Removal:
    """One thing that goes."""

    says: str
    do: Callable[[], None]


def steps(machine: Machine, *, purge: bool) -> list[Removal]:
    """What has to go, the node's processes first; nothing where nothing is installed."""
    systemd = plan.current(machine) or distributions.shared("systemd")
    units = files.units(systemd)
    users, groups = files.accounts(systemd)
    found: list[Removal] = []
    if any(machine.is_active(unit) for unit in units if "@" not in unit and not unit.endswith(".slice")):
        found.append(Removal("the node stops", lambda: _stop(machine, units)))
    where = [] if machine.root == Path("/") else [f"--root={machine.root}"]
    there = [
        place
        for place in files.shipped(systemd, gpu=True, containers=plan.places(TREES, ROOTS))
        if machine.at(place).exists()
    ]
    if there:
        enabled = files.preset(systemd)
        disable = ["systemctl", *where, "--no-reload", "disable", *enabled]
        found.append(Removal(f"{TARGET} does not start with the machine", lambda: _run(machine, disable)))
        gone = WriteFiles(machine, "", dict.fromkeys(there))
        found.append(Removal(f"{len(there)} files of systemd", gone.do))
        if machine.live:
            found.append(Removal("systemd reads its units again", lambda: _forget(machine, units)))
    accounts = (set(users) | set(groups)) & names(machine)
    if accounts:
        found.append(Removal(f"{len(accounts)} accounts", lambda: remove_accounts(machine, accounts, keep=set())))
    doomed = [RUN, COMMAND, PREFIX, TREES] + ([CONFIG, STATE] if purge or not _edited(machine, systemd) else [])
    if not purge and STATE in doomed:
        doomed.remove(STATE)
    for place in doomed:
        path = machine.at(place)
        if path.is_symlink() or path.exists():
            found.append(Removal(str(place), _remover(path)))
    return found


def old_trees(machine: Machine, *, keep: PurePosixPath) -> list[Removal]:
    """Trees of versions that are neither in use nor the one to keep, which was in use before."""
    used = {keep.name, plan.tree_in_use(machine).name}
    folders = machine.at(TREES).iterdir() if machine.at(TREES).is_dir() else ()
    return [
        Removal(str(TREES / folder.name), _remover(folder)) for folder in sorted(folders) if folder.name not in used
    ]


def kept(machine: Machine, *, purge: bool) -> list[PurePosixPath]:
    """What stays, because it is an operator's."""
    return [] if purge else [place for place in (CONFIG, ASSETS) if machine.at(place).exists()]


def _edited(machine: Machine, systemd: Path) -> bool:
    path = machine.at(CONFIG)
    return path.is_file() and path.read_bytes() != (systemd / "node.toml").read_bytes()


def _stop(machine: Machine, units: list[str]) -> None:
    stop(machine, units)
    machine.run("systemctl", "stop", KEYS)


def _forget(machine: Machine, units: list[str]) -> None:
    machine.run("systemctl", "daemon-reload")
    forget_failures(machine, units)


def _run(machine: Machine, argv: list[str]) -> None:
    machine.run(*argv)


def _remover(path: Path) -> Callable[[], None]:
    def remove() -> None:
        if path.is_symlink() or path.is_file():
            path.unlink()
        else:
            shutil.rmtree(path)
        with contextlib.suppress(OSError):  # the folder is shared with others, or not empty
            if path.parent.name == "tie":
                path.parent.rmdir()

    return remove
