"""Root file systems of the three containers: what one process needs, and nothing else, the same to the bit each time.

A root has the interpreter with its standard library, the system libraries that something in it names (ELF's NEEDED, as
the loader itself resolves them), the distributions that are listed here, and those packages of ours that the process
imports. Nothing in it can be written, and there is no shell but where Triton starts its stub with one.
"""

import hashlib
import re
import shutil
import stat
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Final

from tie.cli.install import distributions, tree
from tie.cli.install.distributions import Source
from tie.cli.install.machine import PREFIX, RUN
from tie.daemon.errors import ConfigError

_LDD_S: Final = 120.0
_SYSTEM: Final = PurePosixPath("usr/lib/x86_64-linux-gnu")
# Parts of the standard library that nothing here imports: tools, tests, other programs' windows and databases.
_UNUSED: Final = frozenset(
    {
        "test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip", "pydoc_data", "venv", "curses",
        "dbm", "sqlite3", "distutils", "__pycache__", "site-packages", "dist-packages",
    }
)  # fmt: skip
_UNUSED_LIBRARIES: Final = (
    "_curses",
    "_dbm",
    "_gdbm",
    "_sqlite3",
    "_test",
    "_tkinter",
    "_xx",
    "nis",
    "ossaudiodev",
    "readline",
)
# Where systemd mounts something; what is missing it would make, and the root be another one.
_PLACES: Final = (
    "dev",
    "proc",
    "sys",
    "run/systemd/incoming",
    "tmp",
    "var/tmp",
    "etc/tie",
    "run/tie/assets",
    "var/lib/tie/assets",
)
_NOTIFY: Final = "run/systemd/notify"
_LINKS: Final = {"bin": "usr/bin", "lib": "usr/lib", "lib64": "usr/lib64"}
_RPC: Final = ("grpcio", "msgspec", "protobuf", "typing-extensions")


@dataclass(frozen=True)
class Root:
    """One root file system.

    Attributes:
        unit: the service that runs in it.
        distributions: by name; what they need is listed as well, for each asks for more than is used of it here.
        packages: ours.
        scripts: console scripts.
        programs: of the system.
        edges: folders of the run directory that the unit binds.
        files: single files that it binds.
    """

    unit: str
    distributions: tuple[str, ...]
    packages: tuple[str, ...]
    scripts: tuple[str, ...]
    edges: tuple[str, ...]
    programs: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


ROOTS: Final = {
    "app": Root(
        unit="tie-cloud-app@.service",
        distributions=(
            *_RPC, "cffi", "cryptography", "jinja2", "llguidance", "markupsafe", "tokenizers", "tritonclient",
        ),
        packages=(
            "kvxfer", "tie/app", "tie/assets", "tie/daemon", "tie/envelope", "tie/proto", "tie/store", "tie/warden",
        ),
        scripts=("tie-cloud-app",),
        edges=("runtime", "store"),
    ),
    "afm-runtime": Root(
        unit="tie-afm-runtime.service",
        distributions=(
            *_RPC, "llguidance", "numpy", "nvidia-pytriton", "prometheus-client", "pyahocorasick", "supervisor",
            "tokenizers", "tritonclient",
        ),
        packages=(
            "kvxfer", "status_probe", "tie/assets", "tie/bones", "tie/daemon", "tie/envelope", "tie/proto",
            "tie/runtime",
        ),
        scripts=("tie-afm-runtime", "tie-status-probe"),
        edges=("owner", "runtime", "engine", "probe"),
        # Triton asks sh whether it may run its Python stub, and starts it with bash; the unit tidies up with find.
        programs=("bash", "sh", "find"),
        files=("etc/passwd", "etc/group", "etc/nsswitch.conf"),
    ),
    "model-owner": Root(
        unit="tie-model-owner.service",
        distributions=(*_RPC, "gguf", "numpy", "prometheus-client", "pyyaml"),
        packages=("kvxfer", "model_owner", "tie/assets", "tie/bones", "tie/daemon", "tie/envelope", "tie/proto"),
        scripts=("tie-model-owner",),
        edges=("owner", "owner-control"),
        programs=("find",),
        files=("etc/passwd", "etc/nsswitch.conf"),
    ),
}  # fmt: skip


def build(root: Root, directory: Path, python: Path) -> str:
    """Lays a root file system out in `directory`, which must not exist; returns its hash.

    Raises:
        ConfigError: this environment or this machine lacks something that it needs.
        OSError: it cannot be written.
    """
    sources = _sources(root, python)
    try:
        _environment(root, sources, directory / PREFIX.relative_to("/"), python)
        for inside, file in _of_the_machine(root, sources, python).items():
            _copy(file, directory / inside)
        for place in places(root):
            if place in root.files or place == _NOTIFY:
                _empty(directory / place)
            else:
                (directory / place).mkdir(parents=True, exist_ok=True)
        for name, target in _LINKS.items():
            (directory / name).symlink_to(target)
        tree.compile_bytecode(directory, PurePosixPath("/"), directory / "usr/lib" / python.name)
        return tree.settle(directory)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def fingerprint(root: Root, python: Path) -> str:
    """What of the machine's own packages goes into a root, as a hash: another one after an update of any of them.

    Raises:
        ConfigError: as `build`.
    """
    total = hashlib.sha256()
    for inside, file in sorted(_of_the_machine(root, _sources(root, python), python).items()):
        with file.open("rb") as stream:
            total.update(f"{inside} {hashlib.file_digest(stream, 'sha256').hexdigest()}\0".encode())
    return total.hexdigest()


def places(root: Root) -> list[str]:
    """Where systemd mounts something in a root, relative to it."""
    edges = [f"{RUN}/{edge}".lstrip("/") for edge in root.edges]
    return [*_PLACES, *edges, _NOTIFY, *root.files]


def _empty(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")


def _sources(root: Root, python: Path) -> list[Source]:
    """The files of the environment that it gets."""
    chosen = []
    for name in root.distributions:
        try:
            chosen.append(metadata.distribution(name))
        except metadata.PackageNotFoundError:
            raise ConfigError(f"{name} is not installed here", hint="./run setup") from None
    distributions.check_lock(chosen, distributions.shared("requirements.lock"))
    sources = [source for item in chosen for source in distributions.sources(item)]
    sources = [item for item in sources if _wanted(item.path, python)]
    project = metadata.distribution(distributions.PROJECT)
    return sources + [source for source in distributions.sources(project) if _belongs(root, source.path)]


def _environment(root: Root, sources: list[Source], directory: Path, python: Path) -> None:
    project = metadata.distribution(distributions.PROJECT)
    scripts = {name: entry for name, entry in distributions.scripts(project).items() if name in root.scripts}
    tree.build(directory, sources, scripts, records={}, prefix=PREFIX, python=python)
    tree.compile_bytecode(directory, PREFIX)


def _wanted(path: PurePosixPath, python: Path) -> bool:
    """Of Triton's packages only what is used: the stub for this Python, and the messages of its protocol."""
    if "python_backend_stubs" in path.parts:
        return python.name.removeprefix("python") in path.parts
    if path.parts[:2] == ("site-packages", "tritonclient"):
        return path.stem.removesuffix("_grpc").endswith("_pb2")
    return True


def _belongs(root: Root, path: PurePosixPath) -> bool:
    inside = PurePosixPath(*path.parts[1:])
    if inside.parent == PurePosixPath("tie") or path.parent.suffix == ".dist-info":
        return True  # the package itself, and its version
    return any(inside.is_relative_to(package) for package in root.packages)


def _of_the_machine(root: Root, sources: list[Source], python: Path) -> dict[PurePosixPath, Path]:
    """Place in a root → file of the machine's: programs, standard library, and the libraries that anything names."""
    programs = [python, *(Path("/usr/bin") / name for name in root.programs)]
    found = {PurePosixPath(file.relative_to("/")): file for file in (*programs, *_standard_library(python))}
    return found | _libraries([*found.values(), *(source.file for source in sources)], sources)


def _standard_library(python: Path) -> Iterator[Path]:
    source = Path("/usr/lib") / python.name
    for file in source.rglob("*"):
        inside = file.relative_to(source)
        if (
            file.is_symlink()
            or not file.is_file()
            or _UNUSED & set(inside.parts)
            or inside.parts[0].startswith("config-")
        ):
            continue
        if inside.parts[0] == "lib-dynload" and file.name.startswith(_UNUSED_LIBRARIES):
            continue
        if file.suffix in (".py", ".so"):
            yield file


def _libraries(files: Iterable[Path], own: Iterable[Source]) -> dict[PurePosixPath, Path]:
    """Every library that one of these files names, and those that these name, but the environment's own.

    Raises:
        ConfigError: the loader does not find one.
    """
    extra = Path("/") / _SYSTEM / "libgcc_s.so.1"  # opened by the C library when a thread is cancelled
    todo = [*(path for path in files if _is_elf(path)), extra]
    done = subprocess.run(
        ["ldd", *map(str, todo)], capture_output=True, text=True, timeout=_LDD_S, check=False, env={"LC_ALL": "C"}
    )
    needed = {*re.findall(r"(?m)^\s+(\S+) => (/\S+) \(", done.stdout), (extra.name, str(extra))}
    needed |= {(Path(path).name, path) for path in re.findall(r"(?m)^\s+(/lib\S*/ld-linux\S+) \(", done.stdout)}
    ours = {source.file.resolve() for source in own}
    # Libraries that a wheel brings find each other where the one that names them all is loaded first.
    lacking = set(re.findall(r"(?m)^\s*(\S+) => not found", done.stdout)) - {file.name for file in ours}
    lacking |= set(re.findall(r"version `(\S+)' not found", done.stdout + done.stderr))
    if lacking:
        names = ", ".join(sorted(lacking))
        raise ConfigError(f"this machine lacks {names}", hint=f"apt-get install {names.partition('.so')[0]}")
    found = {}
    for name, path in needed:
        if Path(path).resolve() not in ours:
            folder = PurePosixPath("usr/lib64") if name.startswith("ld-linux") else _SYSTEM
            found[folder / name] = Path(path)
    return found


def _is_elf(path: Path) -> bool:
    if not path.is_file():  # who reads it says so
        return False
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _copy(source: Path, destination: Path) -> None:
    if not source.exists():
        raise ConfigError(f"this machine lacks {source}")
    destination.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, destination)
    destination.chmod(0o755 if source.stat().st_mode & stat.S_IXUSR else 0o644)


def drop_in(root: Root, directory: PurePosixPath, unit: str) -> str:
    """A drop-in that lets a unit run in its own root instead of a view of the machine's /usr.

    Args:
        root: of that unit.
        directory: where the root is on the machine.
        unit: the text of the unit.
    """
    bound = " ".join(re.findall(r"(?m)^BindReadOnlyPaths=(.*)$", unit)).split()
    kept = [path for path in bound if path.lstrip("-") not in ("/usr", "/etc/ld.so.cache", str(PREFIX))]
    # An empty list of either kind empties both (systemd.exec(5)).
    writable = re.findall(r"(?m)^BindPaths=.*$", unit)
    lines = [f"RootDirectory={directory}", "BindReadOnlyPaths=", f"BindReadOnlyPaths={' '.join(kept)}", *writable]
    if "\nNoExecPaths=" in unit:  # there is nothing to run
        lines += ["NoExecPaths=", "ExecPaths="]
    return f"# {root.unit}: a root of its own.\n[Service]\n" + "\n".join(lines) + "\n"
