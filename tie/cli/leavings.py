"""What a `tie up` that has stopped takes away from its run directory: all that could still be used, or be in the way.

Private keys, sockets and their locks, and the files that the runtime made for Triton. What tells of the node stays: its
node.toml, and what the daemons remember for the next one (`events.json` of the controller, gpuhealthd's history).
"""

import contextlib
import shutil
from pathlib import Path

from tie.daemon.sockets import Sockets


def clear(directory: Path, *, keys: bool) -> list[Path]:
    """Takes it away; nobody may run in `directory`.

    Args:
        directory: the run directory. Nothing in it is touched but what a node makes there.
        keys: whether the keys are this node's own, and not somebody's who put them there.

    Returns:
        What should have gone and could not be removed.
    """
    sockets = Sockets(directory)
    edges = {path.parent for path in _sockets(sockets)}
    going = [path for edge in edges if edge.is_dir() for path in edge.iterdir() if _is_spent(path)]
    going += [sockets.engine.parent, *([sockets.binding_key.parent] if keys else [])]
    for path in going:
        _remove(path)
    for edge in edges:
        with contextlib.suppress(OSError):  # something is remembered in it, or it is not there
            edge.rmdir()
    return [path for path in going if path.exists()]


def _sockets(sockets: Sockets) -> tuple[Path, ...]:
    return (
        sockets.node,
        sockets.jobhelper,
        sockets.kps,
        sockets.app,
        sockets.triton,
        sockets.engine,
        sockets.probe,
        sockets.owner,
        sockets.owner_control,
        sockets.gpuhealth,
        sockets.store,
        sockets.store_control,
        sockets.control,
    )


def _is_spent(path: Path) -> bool:
    return path.is_socket() or path.suffix == ".lock"


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # whoever asked is told what is still there
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
