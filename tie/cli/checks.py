"""What a node needs of a machine, one function for each: looked at, never changed."""

import ctypes
import importlib.metadata
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kvxfer import seals
from kvxfer.errors import SealError
from tie.cli.settings import running_up

_SHM = "/dev/shm"  # noqa: S108 (looked at, not written)
_SHM_BYTES = 64 * 1024 * 1024
_MEMORY_BYTES = 2 * 1024**3
_RUN_BYTES = 16 * 1024**2
_COMMAND_S = 30.0


_DEVICES = Path("/dev")
_GPU_DRIVER = Path("/proc/driver/nvidia/version")


class Level(StrEnum):
    """How a check came out."""

    OK = "ok"
    NOTE = "note"  # a node runs, with less of something
    MISSING = "missing"  # a node does not run


@dataclass(frozen=True)
class Check:
    """One result.

    Attributes:
        name: what was looked at.
        level: how it came out.
        found: what was there.
        hint: what to do about it, when it is not ok.
    """

    name: str
    level: Level
    found: str
    hint: str = ""


def all_checks(run_dir: Path, host: str, port: int) -> Iterator[Check]:
    """Every check, in the order in which a person would mend them."""
    yield python()
    yield packages()
    yield numpy()
    yield executor()
    yield libpython()
    yield tritonserver()
    yield memfd()
    yield memory()
    yield shared_memory()
    yield from run_directory(run_dir)
    yield ingress(run_dir, host, port)
    yield gpu()
    yield swap()
    yield core_files()
    yield ptrace()
    yield cgroups()
    yield systemd()


def python() -> Check:
    """The interpreter's version."""
    version = sys.version_info[:2]
    found = f"{sys.version.split()[0]} ({sys.executable})"
    if (3, 11) <= version < (3, 13):
        return Check("python", Level.OK, found)
    return Check("python", Level.MISSING, found, "install Python 3.11 or 3.12")


def packages() -> Check:
    """What the extra `node` asks for."""
    wanted = importlib.metadata.requires("tie-inference") or []
    names = [match.group() for line in wanted if "extra == 'node'" in line.replace('"', "'") and (match := _name(line))]
    missing = [name for name in names if _version(name) is None]
    if missing:
        return Check("packages", Level.MISSING, f"not installed: {', '.join(missing)}", "./run setup")
    return Check("packages", Level.OK, f"{len(names)} of {len(names)}")


def _name(requirement: str) -> re.Match[str] | None:
    return re.match(r"[A-Za-z0-9._-]+", requirement)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def numpy() -> Check:
    """Below 2: Triton 2.51 corrupts newer arrays without an error."""
    version = _version("numpy")
    if version is None:
        return Check("numpy", Level.MISSING, "not installed", "./run setup")
    if int(version.split(".")[0]) >= 2:
        return Check("numpy", Level.MISSING, version, 'pip install "numpy<2": Triton 2.51 corrupts newer arrays')
    return Check("numpy", Level.OK, version)


def executor() -> Check:
    """What computes: the compiled step, or PyTorch."""
    from tie.bones.native import library

    version = _version("torch")
    beside = f", torch {version}" if version else ""
    if library.fast():
        return Check("executor", Level.OK, f"native, {library.levels()[0]}{beside}")
    if version is None:
        hint = "./run setup; with a C++ compiler, for the native step, or pip install torch"
        return Check("executor", Level.MISSING, "neither the native step nor torch is installed", hint)
    return Check("executor", Level.OK, f"torch {version}; the native step is not built for this processor")


def libpython() -> Check:
    """The shared library that Triton's Python stub embeds."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    library = f"libpython{version}.so.1.0"
    try:
        ctypes.CDLL(library)
    except OSError:
        return Check("libpython", Level.MISSING, f"no {library}", f"apt-get install libpython{version}")
    return Check("libpython", Level.OK, library)


def tritonserver() -> Check:
    """The server's binary: there, and its libraries as well."""
    specification = importlib.util.find_spec("pytriton")
    folders = specification.submodule_search_locations if specification else None
    binary = Path(folders[0]) / "tritonserver" / "bin" / "tritonserver" if folders else None
    if binary is None or not binary.is_file():
        return Check("tritonserver", Level.MISSING, "no binary", "pip install --no-deps nvidia-pytriton==0.7.0")
    try:
        run = subprocess.run([str(binary), "--help"], capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("tritonserver", Level.MISSING, f"does not run: {type(error).__name__}", "needs Linux on x86_64")
    missing = re.findall(r"error while loading shared libraries: (\S+):", run.stderr)
    if missing:
        return Check("tritonserver", Level.MISSING, f"lacks {missing[0]}", f"install the package with {missing[0]}")
    return Check("tritonserver", Level.OK, str(binary))


def memfd() -> Check:
    """Sealed memfds: how weights and caches are handed over."""
    try:
        descriptor = seals.create("tie-doctor", 4096)
    except OSError as error:
        return Check("memfd", Level.MISSING, f"memfd_create: {error.strerror}", "needs Linux 5.1 or newer")
    try:
        seals.add(descriptor, seals.READ_ONLY_FOR_OTHERS)
    except SealError:
        return Check("memfd", Level.MISSING, "no F_SEAL_FUTURE_WRITE", "needs Linux 5.1 or newer")
    finally:
        os.close(descriptor)
    return Check("memfd", Level.OK, f"seals work (Linux {os.uname().release})")


def memory() -> Check:
    """Free memory."""
    match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    available = int(match.group(1)) * 1024 if match else 0
    found = f"{available / 1e9:.1f} GB available"
    if available < _MEMORY_BYTES:
        return Check("memory", Level.NOTE, found, "the demo node takes about 2 GB")
    return Check("memory", Level.OK, found)


def shared_memory() -> Check:
    """Shared memory, through which Triton and its Python stub talk."""
    try:
        total = shutil.disk_usage(_SHM).total
    except OSError:
        return Check(_SHM, Level.MISSING, "not there", f"mount a tmpfs on {_SHM}")
    found = f"{total / 1e6:,.0f} MB"
    if total < _SHM_BYTES:
        return Check(_SHM, Level.MISSING, found, "give the container more: --shm-size=256m")
    return Check(_SHM, Level.OK, found)


def run_directory(run_dir: Path) -> Iterator[Check]:
    """Where sockets and keys are: writable, short enough, and gone after a reboot."""
    existing = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    name = "run directory"
    if not os.access(existing, os.W_OK):
        yield Check(name, Level.MISSING, f"{run_dir}: no write access", "name another one: --run-dir or TIE_RUN_DIR")
    elif len(os.fsencode(run_dir)) > 107 - len("/owner-control/control.sock"):
        yield Check(name, Level.MISSING, f"{run_dir} is too long for Unix sockets", "name a shorter one with --run-dir")
    else:
        kind = filesystem(existing)
        volatile = kind in ("tmpfs", "ramfs")
        hint = "" if volatile else "keys outlive a reboot there: use a folder on a tmpfs, for example under /run"
        yield Check(name, Level.OK if volatile else Level.NOTE, f"{run_dir} on {kind}", hint)
        free = shutil.disk_usage(existing).free
        little = "" if free >= _RUN_BYTES else "daemons cannot start on a full disk: make room there"
        yield Check(f"room in {name}", Level.MISSING if little else Level.OK, f"{free / 1e6:.0f} MB free", little)


def filesystem(path: Path) -> str:
    """The kind of file system that a path is on."""
    best, kind = "", "?"
    real = f"{path.resolve()}/"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, mounted_kind, *_ = line.split()
        if real.startswith(mount.rstrip("/") + "/") and len(mount) >= len(best):
            best, kind = mount, mounted_kind
    return kind


def ingress(run_dir: Path, host: str, port: int) -> Check:
    """The one TCP port."""
    where = f"{host}:{port}"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if running_up(run_dir) is not None or (run_dir / "cloudboard" / "node.sock").exists():
                return Check("ingress port", Level.OK, f"{where} is in use (a node runs in {run_dir})")
            return Check("ingress port", Level.MISSING, f"{where}: {error.strerror}", "choose another with --port")
    return Check("ingress port", Level.OK, f"{where} is free")


def gpu() -> Check:
    """NVIDIA devices, their driver, and what computes on them."""
    devices = sorted(_DEVICES.glob("nvidia[0-9]*"))
    driver = _GPU_DRIVER
    if not devices:
        return Check("gpu", Level.NOTE, "none: models run on the CPU", "an NVIDIA GPU with its driver")
    if not driver.exists():
        return Check("gpu", Level.NOTE, f"{len(devices)} devices without a driver", "install the NVIDIA driver")
    version = re.search(r"\d+\.\d+(\.\d+)?", driver.read_text())
    found = f"{len(devices)} with driver {version.group() if version else '?'}"
    packages = {name: _version(name) for name in ("torch", "flashinfer-python")}
    if missing := " and ".join(name for name, have in packages.items() if have is None):
        hint = "pip install 'tie-inference[cuda]', and runtime.executor = \"cuda\" in node.toml"
        return Check("gpu", Level.NOTE, f"{found}; models run on the CPU without {missing}", hint)
    return Check("gpu", Level.OK, ", ".join([found, *(f"{name} {have}" for name, have in packages.items())]))


def swap() -> Check:
    """Swapped-out memory is plaintext on a disk."""
    areas = Path("/proc/swaps").read_text().splitlines()[1:]
    if areas:
        hint = "swapoff -a, so that no prompt reaches a disk (the units forbid swap for the node)"
        return Check("swap", Level.NOTE, f"{len(areas)} swap areas are on", hint)
    return Check("swap", Level.OK, "off")


def core_files() -> Check:
    """A piped core pattern ignores the limit on core files."""
    pattern = Path("/proc/sys/kernel/core_pattern").read_text().strip()
    if pattern.startswith("|"):
        hint = "sysctl kernel.core_pattern=core (the node's processes are not dumpable; Triton's binary is)"
        return Check("core files", Level.NOTE, "piped to a program", hint)
    return Check("core files", Level.OK, f"pattern {pattern!r}, limit 0 in every process")


def ptrace() -> Check:
    """Whether processes of one user may read one another's memory."""
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if not scope.exists():
        return Check("ptrace", Level.NOTE, "no Yama", "a kernel with Yama, or one user per daemon (the units do that)")
    value = scope.read_text().strip()
    if value == "0":
        return Check("ptrace", Level.NOTE, "scope 0", "sysctl kernel.yama.ptrace_scope=1")
    return Check("ptrace", Level.OK, f"scope {value}")


def cgroups() -> Check:
    """Version 2 is what the units' memory limits need."""
    if Path("/sys/fs/cgroup/cgroup.controllers").exists():
        return Check("cgroups", Level.OK, "version 2")
    return Check(
        "cgroups", Level.NOTE, "not version 2", "the units' memory limits do not hold without; `tie up` has none"
    )


def systemd() -> Check:
    """The service manager that a real node runs under."""
    if Path("/run/systemd/system").is_dir():
        return Check("systemd", Level.OK, "runs this machine")
    return Check("systemd", Level.NOTE, "does not run here", "`tie up` needs none; a production node does")
