"""What the launcher tells the container's programs, and the shared memory that it is responsible for."""

import hashlib
import os
import re
from pathlib import Path
from typing import Final

from tie.daemon.config import RuntimeConfig

CONFIG: Final = "TIE_CONFIG"  # path of node.toml
INSTANCE: Final = "TIE_INSTANCE_ID"  # random per start
DIRECTORY: Final = "TIE_ENGINE_DIR"  # the container's private directory
SHM_PREFIX: Final = "TIE_SHM_PREFIX"  # of Triton's regions in /dev/shm
SUPERVISOR: Final = "TIE_SUPERVISORD_PID"
SITE: Final = "TIE_SITE_DIRECTORIES"  # where the packages are
PYTHON: Final = "TIE_PYTHON"
LOG_FILE: Final = "TIE_LOG_FILE"
LOG_LEVEL: Final = "TIE_LOG_LEVEL"

_SHM: Final = Path("/dev/shm")  # noqa: S108 (the kernel's own name)


# Of a region: whose run directory, which supervisord made it, which instance.
_REGION = re.compile(r"tie-[0-9a-f]{8}-(?P<pid>[0-9]{1,9})-[0-9a-f]{8}")


def thread_count(runtime: RuntimeConfig) -> int:
    """Threads of a rank on a CPU."""
    return runtime.threads or max(1, len(os.sched_getaffinity(0)) // runtime.ranks)


def shm_family(run_dir: str) -> str:
    """What the names of all regions of one run directory begin with."""
    return f"tie-{hashlib.sha256(os.fsencode(run_dir)).hexdigest()[:8]}-"


def shm_prefix(run_dir: str, pid: int, instance_id: str) -> str:
    """What the names of one runtime's regions begin with; `pid` is its supervisord's."""
    return f"{shm_family(run_dir)}{pid}-{instance_id[:8]}"


def remove_regions(prefix: str) -> None:
    """Takes the names of regions away; who has mapped one keeps it."""
    for path in _SHM.iterdir():
        if path.name.startswith(prefix):
            path.unlink(missing_ok=True)


def remove_stale_regions() -> None:
    """Removes what runtimes of any run directory left that were killed while they started.

    Only of this user, and only where the supervisord that made a region is no more: its number is in the name.
    """
    for path in _SHM.iterdir():
        made_by = _REGION.match(path.name)
        if made_by is None or Path(f"/proc/{made_by['pid']}").exists():
            continue
        try:
            ours = path.lstat().st_uid == os.geteuid()
        except FileNotFoundError:
            continue
        if ours:
            path.unlink(missing_ok=True)
