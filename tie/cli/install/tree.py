"""An environment as a tree of files that depends on nothing but its content: the same files, the same hash.

Owner, mode and time of every file are fixed and bytecode carries its source's hash instead of its time, as reproducible
builds need it (reproducible-builds.org, PEP 552). The hash is the tree's name, and what `tie doctor` checks.
"""

import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Final

from tie.cli.install import distributions
from tie.cli.install.distributions import Source
from tie.daemon.errors import ConfigError

EPOCH: Final = 315532800  # 1980-01-01, the oldest time that every archive format can hold
_COMPILE_S: Final = 300.0
_SITE: Final = "site-packages"


def library(python: Path) -> PurePosixPath:
    """Where libraries lie in an environment of that interpreter, named as `python3.11`."""
    return PurePosixPath("lib") / python.name / _SITE


def build(
    directory: Path,
    sources: Iterable[Source],
    scripts: dict[str, str],
    *,
    records: Mapping[PurePosixPath, bytes],
    prefix: PurePosixPath,
    python: Path,
) -> None:
    """Lays an environment out in `directory`, which must not exist.

    Args:
        directory: where; it disappears again when something fails.
        sources: its files.
        scripts: console scripts: name → "module:function".
        records: RECORD of each distribution.
        prefix: where the tree will be looked at, which scripts and bytecode name.
        python: the interpreter that runs it, as the machine sees it.

    Raises:
        ConfigError: a file is not what it should be.
        OSError: it cannot be written.
    """
    directory.mkdir(parents=True)
    try:
        for path, content in records.items():
            _write(directory / _inside(path, python), content)
        for source in sources:
            inside = _inside(source.path, python)
            _write(directory / inside, distributions.read(source))
            if source.file.stat().st_mode & stat.S_IXUSR:
                (directory / inside).chmod(0o755)
        version = python.name.removeprefix("python")
        _write(
            directory / "pyvenv.cfg",
            f"home = {python.parent}\ninclude-system-site-packages = false\nversion = {version}\n".encode(),
        )
        (directory / "bin").mkdir(exist_ok=True)
        (directory / "bin/python").symlink_to(python)
        for name, entry in scripts.items():
            module, function = entry.split(":")
            # -P: a folder that somebody happens to be in is no place to import from.
            text = f"#!{prefix}/bin/python -P\nfrom {module} import {function}\n\n{function}()\n"
            _write(directory / "bin" / name, text.encode())
            (directory / "bin" / name).chmod(0o755)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def compile_bytecode(directory: Path, prefix: PurePosixPath, libraries: Path | None = None) -> None:
    """Compiles every module: a process of a request may write no file, and would compile what it imports each time.

    Bytecode is "unchecked": nothing in a node's read-only tree changes, so that a start need not look at every source.
    It is of this interpreter's version, which is the node's, too.

    Args:
        directory: the tree.
        prefix: where it will be looked at.
        libraries: the modules' folder, where that is not `lib`.

    Raises:
        ConfigError: a module does not compile.
    """
    where = libraries or directory / "lib"
    command = [
        sys.executable, "-P", "-m", "compileall", "-q", "-j", str(len(os.sched_getaffinity(0))),
        "--invalidation-mode", "unchecked-hash", "-s", str(directory), "-p", str(prefix), str(where),
    ]  # fmt: skip
    # Strings' hashes decide the order in which sets are written.
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_S, check=False, env=environment)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"the compiler does not run: {type(error).__name__}") from error
    if done.returncode != 0:
        raise ConfigError(f"a module does not compile: {(done.stdout + done.stderr).strip()[-500:]}")


def settle(directory: Path) -> str:
    """Gives every file its fixed mode and time, and returns the tree's hash."""
    for path in _walk(directory):
        if not path.is_symlink():
            executable = path.is_dir() or path.stat().st_mode & stat.S_IXUSR
            path.chmod(0o755 if executable else 0o644)
        os.utime(path, (EPOCH, EPOCH), follow_symlinks=False)
    directory.chmod(0o755)
    os.utime(directory, (EPOCH, EPOCH))
    return digest(directory)


def digest(directory: Path) -> str:
    """SHA-256 over paths, kinds, modes and contents, in hex."""
    total = hashlib.sha256()
    for path in _walk(directory):
        name = path.relative_to(directory).as_posix()
        if path.is_symlink():
            line = f"link {name} {path.readlink()}"
        elif path.is_dir():
            line = f"directory {name} {stat.S_IMODE(path.stat().st_mode):o}"
        else:
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            line = f"file {name} {stat.S_IMODE(path.stat().st_mode):o} {content}"
        total.update(line.encode() + b"\0")
    return total.hexdigest()


def size(directory: Path) -> int:
    """Bytes of all files."""
    return sum(path.lstat().st_size for path in _walk(directory) if path.is_file() and not path.is_symlink())


def archive(directory: Path, destination: Path) -> str:
    """Writes a tree as an uncompressed tar file, owned by root, and returns the file's SHA-256."""
    with tarfile.open(destination, "w", format=tarfile.GNU_FORMAT) as tar:
        for path in _walk(directory):
            info = tar.gettarinfo(path, path.relative_to(directory).as_posix())
            if info.islnk():  # whether two names share a file is no content
                info.type, info.linkname, info.size = tarfile.REGTYPE, "", path.stat().st_size
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            info.mtime = EPOCH
            if info.isreg():
                with path.open("rb") as file:
                    tar.addfile(info, file)
            else:
                tar.addfile(info)
    with destination.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _walk(directory: Path) -> Iterator[Path]:
    """Everything below, sorted, parents first."""
    for entry in sorted(directory.iterdir()):
        yield entry
        if entry.is_dir() and not entry.is_symlink():
            yield from _walk(entry)


def _inside(path: PurePosixPath, python: Path) -> PurePosixPath:
    return library(python).joinpath(*path.parts[1:]) if path.parts[0] == _SITE else path


def _write(path: Path, content: bytes) -> None:
    if ".." in path.parts:
        raise ConfigError(f"{path} does not belong into an environment")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
