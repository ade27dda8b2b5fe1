"""What the quality tests share: the tree's own files, and tools that may be missing at home but not in CI."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("tie", "controllerd", "status_probe", "gpuhealthd", "model_owner", "kvxfer")


@pytest.fixture(scope="session")
def tool() -> Callable[[str], str]:
    """Finds a program beside this interpreter or on PATH; without it the test is skipped, or fails where CI=true."""

    def find(name: str) -> str:
        beside = Path(sys.executable).with_name(name)
        found = str(beside) if beside.exists() else shutil.which(name)
        if found is None:
            if os.environ.get("CI") == "true":
                pytest.fail(f"{name} is not installed, and CI must have every tool")
            pytest.skip(f"{name} is not installed")
        return found

    return find


@pytest.fixture(scope="session")
def root() -> Path:
    """The top of the tree."""
    return ROOT


@pytest.fixture(scope="session")
def modules() -> list[Path]:
    """Every module of ours that was written by hand."""
    found = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return [path for path in found if "_pb2" not in path.name]


@pytest.fixture(scope="session")
def shipped(tool) -> list[Path]:
    """Every text file of the tree: what git tracks or would."""
    listed = subprocess.run(
        [tool("git"), "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


@pytest.fixture(scope="session")
def units() -> list[Path]:
    """Every unit file."""
    return sorted(
        path for path in (ROOT / "systemd").iterdir() if path.suffix in (".service", ".socket", ".target", ".slice")
    )
