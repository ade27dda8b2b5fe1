"""What the launcher tells the container's programs, and the shared memory that it is responsible for."""

from pathlib import Path
from typing import Final

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


def regions(prefix: str) -> list[Path]:
    """Shared memory regions whose names begin with `prefix`."""
    return [path for path in _SHM.iterdir() if path.name.startswith(prefix)]


def remove_regions(prefix: str) -> None:
    """Takes their names away; who has mapped one keeps it."""
    for region in regions(prefix):
        region.unlink(missing_ok=True)
