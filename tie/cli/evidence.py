"""What shows that a recycled runtime did not read the weights again: seen from outside, by the kernel."""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import inotify_simple
import psutil

from tie.cli.own_folder import OwnFolder

_EVENTS = inotify_simple.flags.OPEN | inotify_simple.flags.ACCESS


@contextmanager
def own_view(bundle: Path) -> Iterator[Path]:
    """The bundle in a directory that only one node knows, as hard links: what others read is not seen there.

    Beside the bundle, for links do not cross file systems; the bundle itself where that is not possible.
    """
    try:
        folder = OwnFolder(bundle.parent, f".{bundle.name}-")
    except OSError:
        yield bundle
        return
    try:
        view = folder.path / bundle.name
        try:
            shutil.copytree(bundle, view, copy_function=os.link)
        except (OSError, shutil.Error):
            view = bundle
        yield view
    finally:
        folder.remove()


class WeightWatch:
    """Counts what is done to the weight files of a bundle between its making and `count`, through this directory."""

    def __init__(self, directory: Path, names: Iterable[str]) -> None:
        """Begins to watch.

        Args:
            directory: the bundle's. It is watched, not the files: a file may be a hard link to one that others use.
            names: of the weight files in it.
        """
        self._names = set(names)
        self._inotify = inotify_simple.INotify()
        self._inotify.add_watch(directory, _EVENTS)

    def count(self) -> tuple[int, int]:
        """How often a file was opened and read from so far; ends the watch.

        Where the kernel has dropped events (inotify(7), IN_Q_OVERFLOW) that counts as both: it cannot be ruled out.
        """
        opens = reads = 0
        with self._inotify as inotify:
            for event in inotify.read(timeout=0):
                if event.mask & inotify_simple.flags.Q_OVERFLOW:
                    opens, reads = opens + 1, reads + 1
                elif event.name in self._names:
                    opens += bool(event.mask & inotify_simple.flags.OPEN)
                    reads += bool(event.mask & inotify_simple.flags.ACCESS)
        return opens, reads


def mapped_files(process: psutil.Process) -> set[str] | None:
    """The paths of everything a process has mapped; None where the kernel does not say.

    The daemons are not dumpable: only root may look into their maps.
    """
    try:
        return {mapping.path for mapping in process.memory_maps(grouped=True)}
    except (psutil.AccessDenied, psutil.NoSuchProcess, PermissionError):
        return None


def identity(process: psutil.Process) -> tuple[int, float]:
    """What names a process for ever: its number alone may be used again."""
    return process.pid, process.create_time()
