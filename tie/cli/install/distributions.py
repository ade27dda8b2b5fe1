"""What a node's environment is made of: the distributions that it needs, and their files as they were published.

The source is the environment that runs this, which pip made and whose wheels it checked against the lock file. Every
file is checked again, against the hash in its distribution's RECORD (PyPA, "Recording installed projects"), so that
what reaches a node is what was published, or nothing. Nothing is downloaded and nothing is compiled by a C compiler.
"""

import base64
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.metadata import Distribution
from pathlib import Path, PurePosixPath
from typing import Final

from packaging.requirements import Requirement

import tie
from tie.daemon.errors import ConfigError

PROJECT: Final = "tie-inference"
SHARE: Final = PurePosixPath("share/tie")
_PACKAGES: Final = ("tie", "controllerd", "status_probe", "gpuhealthd", "model_owner", "kvxfer")
# What a checkout carries of the packages; everything else in it (caches, editors' files) stays there.
_SOURCES: Final = frozenset({".py", ".pyi", ".typed", ".proto", ".json", ".jinja", ".conf", ".pbtxt", ".so"})
# Of a checkout, below share/tie, as a wheel carries it (pyproject.toml, `data-files`).
_SHARED: Final = ("systemd", "requirements.lock", "docs/units.md", "docs/install.md")
_SITE: Final = PurePosixPath("site-packages")


@dataclass(frozen=True)
class Source:
    """One file of the environment.

    Attributes:
        path: below the environment; libraries begin with `site-packages/`, which stands for that folder.
        file: where it is now.
        sha256: hex, of what it must contain, or empty where nobody says (a checkout's files).
    """

    path: PurePosixPath
    file: Path
    sha256: str


def closure(requirements: Iterable[str]) -> list[Distribution]:
    """The installed distributions that the named ones need, themselves included, sorted by name.

    Args:
        requirements: such as "tie-inference[node]" or "grpcio".

    Raises:
        ConfigError: one is not installed.
    """
    found: dict[str, Distribution] = {}
    extras: dict[str, set[str]] = {}
    todo = [Requirement(requirement) for requirement in requirements]
    while todo:
        wanted = todo.pop()
        name = canonical(wanted.name)
        if name in found and wanted.extras <= extras[name]:
            continue
        try:
            found[name] = metadata.distribution(wanted.name)
        except metadata.PackageNotFoundError:
            raise ConfigError(
                f"{wanted.name} is not installed here, and a node needs it",
                hint="./run setup, or pip install 'tie-inference[node]'",
            ) from None
        extras.setdefault(name, set()).update(wanted.extras)
        chosen = extras[name] or {""}
        for line in found[name].requires or ():
            needed = Requirement(line)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in chosen):
                todo.append(needed)
    return [found[name] for name in sorted(found)]


def canonical(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def check_lock(distributions: Iterable[Distribution], lock: Path) -> None:
    """Refuses versions other than the lock file's.

    Raises:
        ConfigError: it names them.
    """
    pinned = dict(re.findall(r"(?m)^([A-Za-z0-9._-]+)==(\S+)", lock.read_text()))
    wanted = {canonical(name): version for name, version in pinned.items()}
    wrong = [
        f"{item.name} {item.version} (locked: {wanted.get(canonical(item.name), 'not at all')})"
        for item in distributions
        if canonical(item.name) != PROJECT and wanted.get(canonical(item.name)) != item.version
    ]
    if wrong:
        raise ConfigError(
            f"this environment is not what requirements.lock says: {', '.join(wrong)}",
            hint="pip install --no-deps --require-hashes -r requirements.lock, or ./run setup",
        )


def sources(distribution: Distribution) -> Iterator[Source]:
    """The files of one distribution that a node gets: no bytecode, no scripts but those of this project.

    Raises:
        ConfigError: its RECORD is missing.
    """
    if is_editable(distribution):
        yield from _checkout(distribution)
        return
    if distribution.files is None:
        raise ConfigError(f"{distribution.name} was not installed by pip: it has no RECORD")
    for file in distribution.files:
        path = PurePosixPath(file)
        if file.suffix == ".pyc" or path.name in ("INSTALLER", "REQUESTED", "direct_url.json", "RECORD"):
            continue  # how it came here, which says nothing of what it is
        if path.parts[0] == "..":
            path = PurePosixPath(*(part for part in path.parts if part != ".."))
            if not path.is_relative_to(SHARE):
                continue  # scripts and manual pages
        else:
            path = _SITE / path
        digest = file.hash.value if file.hash and file.hash.mode == "sha256" else ""
        yield Source(path, Path(str(file.locate())), _hex(digest))


def is_editable(distribution: Distribution) -> bool:
    """Whether it stands for a checkout instead of containing files."""
    text = distribution.read_text("direct_url.json")
    return bool(text and json.loads(text).get("dir_info", {}).get("editable"))


def shared(name: str) -> Path:
    """Where a file that the project ships beside its packages is: in a checkout, or in an installed environment.

    Raises:
        ConfigError: in neither.
    """
    checkout = Path(tie.__file__).parents[1] / name
    installed = Path(sys.prefix) / SHARE / name
    for path in (installed, checkout):
        if path.exists():
            return path
    raise ConfigError(f"this installation lacks {name}", hint="install the project's wheel, or use a checkout")


def _checkout(distribution: Distribution) -> Iterator[Source]:
    root = Path(tie.__file__).parents[1]
    for package in _PACKAGES:
        for file in (root / package).rglob("*"):
            if file.is_file() and file.suffix in _SOURCES and "__pycache__" not in file.parts:
                yield Source(_SITE / file.relative_to(root).as_posix(), file, "")
    for name in _SHARED:
        for file in [root / name] if (root / name).is_file() else (root / name).rglob("*"):
            if file.is_file():
                yield Source(SHARE / file.relative_to(root).as_posix(), file, "")
    for metadata_file in distribution.files or ():
        if metadata_file.parts[0].endswith(".dist-info") and metadata_file.name in ("METADATA", "entry_points.txt"):
            yield Source(_SITE / PurePosixPath(metadata_file), Path(str(metadata_file.locate())), "")


def read(source: Source) -> bytes:
    """A file's content, checked.

    Raises:
        ConfigError: it is missing, or not what was published.
    """
    try:
        content = source.file.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {source.file}: {error.strerror}") from error
    if source.sha256 and hashlib.sha256(content).hexdigest() != source.sha256:
        raise ConfigError(
            f"{source.file} has been changed since pip installed it", hint="make the environment anew: delete .venv"
        )
    return content


def record(sources: Iterable[Source]) -> tuple[PurePosixPath, bytes]:
    """A distribution's RECORD for a tree that has just these files, so that it can be installed from in its turn.

    Not the one that pip wrote: that lists scripts, which name the environment that they were made in.
    """
    lines = []
    place = PurePosixPath()
    for source in sorted(sources, key=lambda source: source.path):
        if source.path.name == "METADATA" and source.path.parent.suffix == ".dist-info":
            place = source.path.with_name("RECORD")
        content = read(source)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        inside = source.path.parts[0] == _SITE.name
        path = PurePosixPath(*source.path.parts[1:]) if inside else PurePosixPath("../../..") / source.path
        lines.append(f'"{path}",sha256={digest},{len(content)}\n')
    return place, "".join(lines).encode()


def scripts(distribution: Distribution) -> dict[str, str]:
    """Console scripts of a distribution: name → "module:function"."""
    return {item.name: item.value for item in distribution.entry_points if item.group == "console_scripts"}


def _hex(digest: str) -> str:
    """RECORD's hashes are base64 without its padding (PEP 376)."""
    return base64.urlsafe_b64decode(digest + "=" * (-len(digest) % 4)).hex() if digest else ""
