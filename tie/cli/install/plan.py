"""The steps of an installation: only those that are needed, so that a second one does nothing."""

import hashlib
import importlib.metadata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from tie.cli.install import distributions, files, model, ours, roots, tree
from tie.cli.install.machine import COMMAND, CONFIG, KEYS, PREFIX, RUN, TARGET, TREES, UNITS, Machine
from tie.cli.install.steps import Command, Folder, Link, Step, WriteFiles
from tie.cli.install.system import Accounts, Keys, RunDirectory, names
from tie.daemon.errors import ConfigError

# In each folder of TREES: the tree, and the hash that it had when it was laid out.
_TREE: Final = "tree"
_HASH: Final = "sha256"
_NODE: Final = ("tie-inference[node]",)
_TRITON: Final = "nvidia-pytriton"  # without what it asks for: only its server is used (pyproject.toml)


@dataclass(frozen=True)
class Wish:
    """What is asked for beside the node itself.

    Attributes:
        gpu: the drop-ins for GPUs; None: as they are now.
        containers: those that run in a root of their own; None: as it is now, and at first none.
        bundle: a bundle to copy onto the machine and serve.
        demo: the demo model's instead.
    """

    gpu: bool | None = None
    containers: tuple[str, ...] | None = None
    bundle: Path | None = None
    demo: bool = False


def steps(machine: Machine, wish: Wish) -> list[Step]:
    """Everything that is to be done, in order; nothing where the machine is as it should be.

    Raises:
        ConfigError: this environment cannot be installed from, or something that is not ours is in the way.
        BundleError: there is no such bundle, or another one of the same name and release is there.
    """
    systemd = distributions.shared("systemd")
    before = ours.current(machine)
    containers = wish.containers
    if containers is None:
        containers = has_containers(machine)
    if machine.root != Path("/"):
        containers = ()  # they are made of this machine's own libraries, not of an image's
    recipe = _Recipe.of_this_environment(machine, containers)
    gpu = has_gpu(machine) if wish.gpu is None else wish.gpu
    wanted_files = files.shipped(systemd, gpu=gpu, containers=places(recipe.place, containers))
    users, groups = files.accounts(systemd)
    others = ours.in_the_way(machine, wanted_files)
    if others:
        raise ConfigError(f"in the way, and not ours: {', '.join(map(str, others))}", hint="move it to another place")
    wanted: list[Step] = []
    if not is_whole(machine, recipe.place):
        wanted.append(Folder(machine, f"{recipe.place}: {recipe.says}", recipe.place, recipe.lay))
    changed = _changed(machine, wanted_files, _obsolete(machine, wanted_files))
    if changed:
        says = f"{len(changed)} files of systemd below {UNITS.parents[1]}"
        reload = [["systemctl", "daemon-reload"]] if machine.live else []
        wanted.append(WriteFiles(machine, says, changed, reload))
    if set(users) | set(groups) > names(machine) & (set(users) | set(groups)):
        wanted.append(Accounts(machine, users, groups))
    wanted += _configuration(machine, before, systemd)
    if machine.link(PREFIX) != str(recipe.place / _TREE):
        wanted.append(Link(machine, f"{PREFIX} is that tree now", PREFIX, recipe.place / _TREE))
    if machine.link(COMMAND) != str(PREFIX / "bin/tie"):
        wanted.append(Link(machine, f"{COMMAND}, the `tie` command", COMMAND, PREFIX / "bin/tie"))
    wanted += model.steps(machine, wish.bundle, demo=wish.demo)
    if machine.live and (changed or not machine.at(RUN).exists()):
        wanted.append(RunDirectory(machine))
    if before is None:
        wanted.append(_enable(machine, files.preset(systemd)))
    if machine.live and not machine.is_active(KEYS):
        wanted.append(Keys(machine))
    return wanted


@dataclass(frozen=True)
class _Recipe:
    """How this environment's tree is made; its name follows from what goes into it."""

    place: PurePosixPath
    says: str
    lay: Callable[[Path], None]

    @classmethod
    def of_this_environment(cls, machine: Machine, containers: tuple[str, ...]) -> "_Recipe":
        chosen = distributions.closure(_NODE)
        distributions.check_lock(chosen, distributions.shared("requirements.lock"))
        try:
            chosen.append(importlib.metadata.distribution(_TRITON))
        except importlib.metadata.PackageNotFoundError:
            hint = f"pip install --no-deps {_TRITON}==0.7.0, or ./run setup"
            raise ConfigError("the Triton server is not installed here", hint=hint) from None
        parts = [list(distributions.sources(item)) for item in chosen]
        sources = [source for part in parts for source in part]
        project = next(item for item in chosen if distributions.canonical(item.name) == distributions.PROJECT)
        named = hashlib.sha256(f"{PREFIX} {machine.python}".encode())
        for name in containers:
            named.update(
                f"\0{name} {roots.ROOTS[name]} {roots.fingerprint(roots.ROOTS[name], machine.python)}".encode()
            )
        for source in sorted(sources, key=lambda source: source.path):
            content = source.sha256 or hashlib.sha256(distributions.read(source)).hexdigest()
            named.update(f"\0{source.path} {content}".encode())
        place = TREES / f"{project.version}-{named.hexdigest()[:12]}"

        def lay(directory: Path) -> None:
            scripts = distributions.scripts(project)
            inside = directory / _TREE
            records = dict(distributions.record(part) for part in parts)
            tree.build(inside, sources, scripts, records=records, prefix=PREFIX, python=machine.python)
            tree.compile_bytecode(inside, PREFIX)
            for name in containers:
                roots.build(roots.ROOTS[name], inside / "roots" / name, machine.python)
            (directory / _HASH).write_text(tree.settle(inside) + "\n")
            directory.chmod(0o755)

        says = f"{len(chosen)} packages, checked against their hashes, and their bytecode"
        return cls(place, says + (f"; roots for {', '.join(containers)}" if containers else ""), lay)


def is_whole(machine: Machine, place: PurePosixPath) -> bool:
    """Whether the folder of a tree, below TREES, is there and its tree is what was laid out."""
    noted, directory = machine.at(place / _HASH), machine.at(place / _TREE)
    return noted.is_file() and directory.is_dir() and noted.read_text().strip() == tree.digest(directory)


def has_gpu(machine: Machine) -> bool:
    """Whether the drop-ins for GPUs are there."""
    return any(machine.at(UNITS).glob(f"*.d/{files.GPU}"))


def has_containers(machine: Machine) -> tuple[str, ...]:
    """The containers that run in roots of their own."""
    units = machine.at(UNITS)
    return tuple(name for name, root in roots.ROOTS.items() if (units / f"{root.unit}.d" / files.ROOT).exists())


def places(folder: PurePosixPath, containers: Iterable[str]) -> dict[str, PurePosixPath]:
    """Where the roots of containers are in a tree's folder."""
    return {name: folder / _TREE / "roots" / name for name in containers}


def _obsolete(machine: Machine, wanted: dict[PurePosixPath, bytes]) -> set[PurePosixPath]:
    """Files of the installation that is there which the new one has no more."""
    return {place for place in set(ours.shipped(machine)) - set(wanted) if machine.at(place).is_file()}


def _changed(
    machine: Machine, wanted: dict[PurePosixPath, bytes], obsolete: set[PurePosixPath]
) -> dict[PurePosixPath, bytes | None]:
    changed: dict[PurePosixPath, bytes | None] = dict.fromkeys(obsolete)
    for place, content in wanted.items():
        path = machine.at(place)
        if not path.is_file() or path.read_bytes() != content:
            changed[place] = content
    return changed


def _configuration(machine: Machine, before: Path | None, systemd: Path) -> list[Step]:
    """node.toml, unless an operator has edited it."""
    content = (systemd / "node.toml").read_bytes()
    path = machine.at(CONFIG)
    if path.exists() or path.is_symlink():
        edited = before is None or path.read_bytes() != (before / "node.toml").read_bytes()
        if edited or path.read_bytes() == content:
            return []
    return [WriteFiles(machine, f"{CONFIG}, which is yours to edit", {CONFIG: content})]


def _enable(machine: Machine, units: list[str]) -> Step:
    where = [] if machine.root == Path("/") else [f"--root={machine.root}"]
    return Command(
        machine,
        f"{TARGET} starts with the machine",
        [["systemctl", *where, "--no-reload", "preset", *units]],
        [["systemctl", *where, "--no-reload", "disable", *units]],
    )
