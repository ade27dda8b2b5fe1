"""What this process has open."""

from pathlib import Path


def open_descriptors() -> int:
    """How many file descriptors this process has."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
