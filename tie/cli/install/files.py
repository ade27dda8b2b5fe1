"""Which files an installation has beside its tree: shipped name → place on the machine."""

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Final

from tie.cli.install.machine import PRESETS, SYSUSERS, TMPFILES, UNITS
from tie.cli.install.roots import ROOTS, drop_in

_UNITS: Final = frozenset({".service", ".socket", ".target", ".slice"})
GPU: Final = "50-gpu.conf"
ROOT: Final = "40-root.conf"


def shipped(
    systemd: Path, *, gpu: bool, containers: Mapping[str, PurePosixPath] | None = None
) -> dict[PurePosixPath, bytes]:
    """Place → content, of every file of `systemd/` but the configuration.

    Args:
        systemd: the shipped folder.
        gpu: with the drop-ins for a node with GPUs.
        containers: where the roots are of those whose units run in one of their own. No path with a link in it: systemd
            cannot make such a root's mounts.
    """
    found = {UNITS / path.name: path for path in systemd.iterdir() if path.suffix in _UNITS}
    found |= {PRESETS / f"50-{path.name}": path for path in systemd.glob("*.preset")}
    found[SYSUSERS] = systemd / "sysusers.d/tie.conf"
    found[TMPFILES] = systemd / "tmpfiles.d/tie.conf"
    if gpu:
        found |= {UNITS / f"{path.stem}.service.d" / GPU: path for path in (systemd / "gpu").glob("*.conf")}
    contents = {place: path.read_bytes() for place, path in found.items()}
    for name, root in (containers or {}).items():
        unit = ROOTS[name].unit
        text = drop_in(ROOTS[name], root, (systemd / unit).read_text())
        contents[UNITS / f"{unit}.d" / ROOT] = text.encode()
    return {place: contents[place] for place in sorted(contents)}


def units(systemd: Path) -> list[str]:
    """The names of all units."""
    return sorted(path.name for path in systemd.iterdir() if path.suffix in _UNITS)


def preset(systemd: Path) -> list[str]:
    """The units that a node enables."""
    lines = [line.split() for path in systemd.glob("*.preset") for line in path.read_text().splitlines()]
    return [words[1] for words in lines if words[:1] == ["enable"]]


def accounts(systemd: Path) -> tuple[list[str], list[str]]:
    """The users and the groups that sysusers makes; a user has a group of the same name."""
    lines = [line.split() for line in (systemd / "sysusers.d/tie.conf").read_text().splitlines()]
    users = [words[1] for words in lines if words[:1] == ["u"]]
    return users, [words[1] for words in lines if words[:1] == ["g"]]
