"""Temporary folders that do not stay when their process was killed: the next one of the kind takes them away.

A lock in the folder says whether it is in use: the kernel gives it up with the last process that holds it. Neither age
nor a process number would say so.
"""

import fcntl
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Final

_LOCK: Final = ".tie-in-use"
_MOUNTS: Final = Path("/proc/self/mountinfo")


class OwnFolder:
    """A temporary folder of this process's own.

    Attributes:
        path: of the folder, mode 0700.
        lock: a descriptor, -1 once the folder is removed. A process that inherits it keeps the folder in use as well.
    """

    def __init__(self, parent: Path, prefix: str) -> None:
        """Makes it, and removes what others of this name have left behind.

        Raises:
            OSError: it cannot be made there.
        """
        for left in parent.iterdir():
            if left.name.startswith(prefix):
                _remove_if_left(left)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            self.lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            if _taken(self.lock):
                return
            os.close(self.lock)  # somebody who clears away took it for a rest, and it is gone, or will be

    def remove(self) -> None:
        """Removes it with all that is in it; what cannot be removed, since something is mounted there, stays.

        A second time does nothing: the descriptor's number may be somebody else's by then.
        """
        lock, self.lock = self.lock, -1
        if lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(lock)


def _taken(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.fstat(lock).st_nlink > 0


def _remove_if_left(folder: Path) -> None:
    """Removes a folder of ours that nobody holds. Never one without our lock in it, nor what is mounted in one."""
    try:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or _has_mounts(folder):
            return
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        if _taken(lock):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _has_mounts(folder: Path) -> bool:
    """Whether anything is mounted on or below it (proc_pid_mountinfo(5): blanks and the like are octal there)."""
    inside = os.fsencode(folder.resolve())
    for line in _MOUNTS.read_bytes().splitlines():
        point = re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), line.split()[4])
        if point == inside or point.startswith(inside + b"/"):
            return True
    return False
