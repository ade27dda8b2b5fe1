"""What is ours of what is on a machine: an installation replaces, and an uninstallation removes, nothing else."""

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Final

from tie.cli.install import distributions, files
from tie.cli.install.machine import COMMAND, PREFIX, TREES, Machine
from tie.cli.install.roots import ROOTS

# Our links, and what they lead below.
_LINKS: Final = {PREFIX: TREES, COMMAND: PREFIX}


def current(machine: Machine) -> Path | None:
    """The shipped `systemd/` folder of the installation that is there, or None where there is none."""
    if PREFIX not in links(machine):
        return None
    folder = machine.at(PurePosixPath(machine.link(PREFIX))) / distributions.SHARE / "systemd"
    return folder if folder.is_dir() else None


def tree_in_use(machine: Machine) -> PurePosixPath:
    """The folder of the tree that PREFIX names; TREES itself where there is none."""
    return PurePosixPath(machine.link(PREFIX) or TREES / "tree").parent


def links(machine: Machine) -> list[PurePosixPath]:
    """Our links that are there."""
    return [place for place, below in _LINKS.items() if PurePosixPath(machine.link(place) or "/").is_relative_to(below)]


def shipped(machine: Machine) -> dict[PurePosixPath, bytes]:
    """Place → content of every file that the installation that is there may have; empty where there is none."""
    systemd = current(machine)
    return {} if systemd is None else everything(systemd, tree_in_use(machine))


def everything(systemd: Path, folder: PurePosixPath) -> dict[PurePosixPath, bytes]:
    """Place → content of every file of `systemd/`, whatever is chosen; with roots in a tree's folder."""
    containers = {name: folder / "tree/roots" / name for name in ROOTS}
    return files.shipped(systemd, gpu=True, containers=containers)


def same(machine: Machine, contents: Mapping[PurePosixPath, bytes]) -> list[PurePosixPath]:
    """Those of these files that are there with this content."""
    found = []
    for place, content in contents.items():
        path = machine.at(place)
        if path.is_file() and not path.is_symlink() and path.read_bytes() == content:
            found.append(place)
    return found


def in_the_way(machine: Machine, wanted: Mapping[PurePosixPath, bytes]) -> list[PurePosixPath]:
    """What is somebody else's of what an installation would put there: files, and links.

    A file of ours that was changed is ours still, as long as the installation that it belongs to is there.
    """
    own = {place for place in shipped(machine) if not machine.at(place).is_symlink()} | set(same(machine, wanted))
    places = [place for place in wanted if place not in own]
    places += [place for place in _LINKS if place not in links(machine)]
    return [place for place in places if _is_there(machine, place)]


def changed(machine: Machine, wanted: Mapping[PurePosixPath, bytes]) -> list[PurePosixPath]:
    """What is at a place of ours and is not ours, or not any more: files, and links."""
    places = [place for place in wanted if place not in same(machine, wanted)]
    places += [place for place in _LINKS if place not in links(machine)]
    return [place for place in places if _is_there(machine, place)]


def _is_there(machine: Machine, place: PurePosixPath) -> bool:
    path = machine.at(place)
    return path.is_symlink() or path.exists()
