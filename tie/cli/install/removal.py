"""The steps of an uninstallation. They cannot be taken back, but each can be repeated, and so can the whole."""

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tie.cli import settings
from tie.cli.install import distributions, files, ours
from tie.cli.install.exchange import stop
from tie.cli.install.machine import ASSETS, CONFIG, KEYS, RUN, STATE, TARGET, TREES, Machine
from tie.cli.install.steps import WriteFiles, aside
from tie.cli.install.system import collect, forget_failures, names, remove_accounts


@dataclass(frozen=True)
class Removal:
    """One thing that goes."""

    says: str
    do: Callable[[], None]


def steps(machine: Machine, *, purge: bool) -> list[Removal]:
    """What has to go, the node's processes first and its environment last; nothing where nothing is installed."""
    systemd = _systemd(machine)
    units = files.units(systemd)
    users, groups = files.accounts(systemd)
    there, doomed = _doomed(machine, systemd, purge=purge)
    found: list[Removal] = []
    if there or set(doomed) - {CONFIG, STATE}:  # those two outlive an installation
        if any(machine.is_active(unit) for unit in units if "@" not in unit and not unit.endswith(".slice")):
            found.append(Removal("stop the node", lambda: _stop(machine, units)))
        if there:
            found += _files(machine, units, files.preset(systemd), there)
        accounts = (set(users) | set(groups)) & names(machine)
        if accounts:
            found.append(
                Removal(f"remove {len(accounts)} accounts", lambda: remove_accounts(machine, accounts, keep=set()))
            )
    return found + [Removal(f"remove {place}", _remover(machine.at(place))) for place in doomed]


def spent(machine: Machine, *, before: PurePosixPath, after: PurePosixPath) -> list[Removal]:
    """What nobody needs once an installation is done.

    Versions but the one in use and the last before it, and what was moved aside to make place for what mends it.

    Args:
        machine: where.
        before: the folder of the tree that was in use.
        after: of the one that is.
    """
    folders = machine.at(TREES).iterdir() if machine.at(TREES).is_dir() else ()
    gone = [TREES / folder.name for folder in sorted(folders) if folder.name not in (before.name, after.name)]
    gone += [ASSETS / path.name for path in aside(machine.at(ASSETS))]
    return [Removal(f"no longer needed: {place}", _remover(machine.at(place))) for place in gone]


def kept(machine: Machine, *, purge: bool) -> list[PurePosixPath]:
    """What an uninstallation does not take, because it is an operator's or somebody else's."""
    systemd = _systemd(machine)
    there, doomed = _doomed(machine, systemd, purge=purge)
    places = [*ours.changed(machine, _shipped(machine, systemd)), *_present(machine, CONFIG, ASSETS, RUN)]
    return [place for place in places if place not in there and not {place, *place.parents} & set(doomed)]


def _doomed(machine: Machine, systemd: Path, *, purge: bool) -> tuple[list[PurePosixPath], list[PurePosixPath]]:
    """The files of systemd that go, and everything else that does; none where nothing is installed."""
    shipped = _shipped(machine, systemd)
    there = ours.same(machine, shipped)
    own = _present(machine, *ours.links(machine)[::-1], TREES)
    doomed = _present(machine, CONFIG, STATE) if purge else []
    if there or own:
        if purge:
            there = [place for place in shipped if machine.at(place).is_file()]
        elif not _edited(machine, systemd):
            doomed += _present(machine, CONFIG)
        doomed += own if _is_somebodys(machine) else [*_present(machine, RUN), *own]
    return there, doomed


def _is_somebodys(machine: Machine) -> bool:
    """Whether the run directory is that of a `tie up`: it may run, and it was not installed."""
    directory = machine.at(RUN)
    config = settings.node_toml(directory)  # an installed node's is a link to the one below /etc
    return (directory / settings.UP_LOCK).exists() or (config.exists() and not config.is_symlink())


def _present(machine: Machine, *places: PurePosixPath) -> list[PurePosixPath]:
    return [place for place in places if machine.at(place).is_symlink() or machine.at(place).exists()]


def _systemd(machine: Machine) -> Path:
    return ours.current(machine) or distributions.shared("systemd")


def _shipped(machine: Machine, systemd: Path) -> dict[PurePosixPath, bytes]:
    return ours.everything(systemd, ours.tree_in_use(machine))


def _files(machine: Machine, units: list[str], enabled: list[str], there: list[PurePosixPath]) -> list[Removal]:
    where = [] if machine.root == Path("/") else [f"--root={machine.root}"]
    disable = ["systemctl", *where, "--no-reload", "disable", *enabled]
    gone = WriteFiles(machine, "", dict.fromkeys(there))
    found = [
        Removal(f"let {TARGET} not start with the machine", lambda: _run(machine, disable)),
        Removal(f"remove {len(there)} files of systemd", gone.do),
    ]
    if machine.live:
        found.append(Removal("let systemd read its units again", lambda: _forget(machine, units)))
    return found


def _edited(machine: Machine, systemd: Path) -> bool:
    path = machine.at(CONFIG)
    return path.is_file() and path.read_bytes() != (systemd / "node.toml").read_bytes()


def _stop(machine: Machine, units: list[str]) -> None:
    stop(machine, units)
    machine.run("systemctl", "stop", KEYS)


def _forget(machine: Machine, units: list[str]) -> None:
    machine.run("systemctl", "daemon-reload")
    forget_failures(machine, units)
    collect(machine, units)


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
