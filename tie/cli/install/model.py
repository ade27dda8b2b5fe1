"""The model that an installation puts on a machine: a copy of a bundle, or the demo's, and the link that names it."""

import shutil
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Final

from tie.assets import active
from tie.assets.bundle import Bundle, open_bundle
from tie.assets.manifest import MANIFEST_FILE, Manifest
from tie.cli.install.machine import ASSETS, Machine
from tie.cli.install.steps import Folder, Link, Step
from tie.daemon.errors import BundleError

ACTIVE: Final = ASSETS / active.LINK  # what the configuration names as it comes


def steps(machine: Machine, bundle: Path | None, *, demo: bool) -> list[Step]:
    """What brings a model onto the machine and makes it the one that the node serves; nothing where it is.

    Args:
        machine: where.
        bundle: to be copied; None: none.
        demo: the demo model instead.

    Raises:
        BundleError: there is no such bundle, or another one of the same name and release is there.
    """
    if bundle is None and not demo:
        return []
    name = "demo"
    wanted = None
    if bundle is not None:
        wanted = open_bundle(bundle)
        name = f"{wanted.manifest.model}-{wanted.manifest.release}"
    place = ASSETS / name
    there = _manifest(machine.at(place))
    found: list[Step] = []
    if there is None:
        found.append(Folder(machine, f"{place}: the model", place, _copied(wanted) if wanted else _demo))
    elif wanted is not None and there != wanted.manifest:
        # Whoever began with the one would take the other for it: the processes of a node compare releases.
        raise BundleError(
            f"{place} is another bundle of the same name and release", hint="make this one with a release of its own"
        )
    if machine.link(ACTIVE) not in (name, str(place)):  # the one is ours, the other `tie assets activate`'s
        found.append(Link(machine, f"{ACTIVE}: the model that the node serves", ACTIVE, PurePosixPath(name)))
    return found


def _manifest(directory: Path) -> Manifest | None:
    """Of the bundle that is there; None where there is none, or none that can be used."""
    try:
        return open_bundle(directory).manifest
    except BundleError:
        return None


def _copied(bundle: Bundle) -> Callable[[Path], None]:
    def make(directory: Path) -> None:
        directory.mkdir()
        for name in (MANIFEST_FILE, *bundle.manifest.files):
            shutil.copyfile(bundle.directory / name, directory / name)
        copy = open_bundle(directory)
        copy.verify()  # the copy: nobody has written into this one meanwhile
        if copy.manifest != bundle.manifest:
            raise BundleError(f"{bundle.directory}: it has been changed meanwhile", hint="try again")
        _open_to_all(directory)

    return make


def _demo(directory: Path) -> None:
    from tie.cli.assets import demo_bundle  # NumPy and the readers, for those who want it

    demo_bundle(directory)
    _open_to_all(directory)


def _open_to_all(directory: Path) -> None:
    """Weights are no secret, and each daemon is a user of its own."""
    directory.chmod(0o755)
    for path in directory.iterdir():
        path.chmod(0o644)
