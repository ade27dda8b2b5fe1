"""Socket paths: their directories, the claim that keeps a second live server off one, and where they lead.

A second server would silently steal a live path, and the first would unlink the new socket when it stops. No gRPC is
needed here.
"""

import fcntl
import os
from pathlib import Path

from tie.daemon.errors import ConfigError, TieError

_MAX_PATH = 107  # sockaddr_un


class SocketInUseError(TieError):
    """Another live server holds this socket path."""


def prepare_directory(path: Path) -> None:
    """Makes the directory of a socket: mode 2750 where we make it, untouched where tmpfiles did.

    Raises:
        ConfigError: the path is too long for a Unix socket.
    """
    if len(os.fsencode(path)) > _MAX_PATH:
        raise ConfigError(f"socket path over {_MAX_PATH} bytes: {path}", hint="choose a shorter run_dir")
    if not path.parent.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.parent.chmod(0o2750)


def claim(path: Path) -> int:
    """Takes the lock beside a socket path for the life of the process and removes a dead socket.

    Returns:
        The lock's descriptor; closing it (or dying) gives the path up.

    Raises:
        SocketInUseError: a live server holds it.
    """
    prepare_directory(path)
    lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise SocketInUseError(f"another server is live on {path}") from None
    if path.is_socket():
        path.unlink()
    return lock


def identity(path: Path) -> tuple[int, int] | None:
    """What a path leads to; None when nothing is there. A server whose path leads elsewhere serves nobody new."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
