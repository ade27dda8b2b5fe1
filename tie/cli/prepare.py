"""What `tie up` does before it starts anything: run directory, bundle, checks, configuration, keys."""

import compileall
import contextlib
import errno
import fcntl
import os
import shutil
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

import tie
from tie.cli import settings
from tie.cli.console import Console
from tie.cli.leavings import clear
from tie.daemon import config as node_config
from tie.daemon.config import NodeConfig
from tie.daemon.errors import ConfigError, TieError
from tie.daemon.sockets import Sockets


@contextmanager
def prepared(directory: Path) -> Iterator[None]:
    """Makes the run directory and holds it for this process; takes away at the end what nobody may use after that.

    Raises:
        ConfigError: it cannot be made, belongs to somebody else, or another node runs in it.
    """
    made = _missing(directory)
    held = False
    try:
        directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        _check_owner(directory)
        killed = (directory / settings.UP_LOCK).exists()  # else the last one took it away, or runs
        keys = killed or not Sockets(directory).binding_key.parent.exists()
        lock = os.open(directory / settings.UP_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        hint = "name another one with --run-dir"
        raise ConfigError(f"cannot use {directory}: {error.strerror}", hint=hint) from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            made = []  # another `tie up`, started at the same moment, has it by now
            owner = os.pread(lock, 32, 0).decode(errors="replace").strip() or "?"
            raise ConfigError(
                f"a node already runs in {directory} (`tie up`, process {owner})",
                hint="stop it, or give this one its own --run-dir and --port",
            ) from None
        if not os.fstat(lock).st_nlink:
            raise ConfigError(f"another node has just stopped in {directory}", hint="try again")
        held = True
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
        yield
    except TieError:
        if held:
            _clear(directory, keys=keys)
            held = False
        for folder in made:  # by us: what was refused leaves no empty folder
            with contextlib.suppress(OSError):  # not empty: it got further than that, or somebody uses it
                folder.rmdir()
        raise
    finally:
        if held:
            _clear(directory, keys=keys)
        os.close(lock)


def _clear(directory: Path, *, keys: bool) -> None:
    """Leaves nothing that could be used, the lock last: whoever comes finds it held, or all of it gone."""
    for place in clear(directory, keys=keys):
        click.echo(f"tie: {place} could not be removed", err=True)
    (directory / settings.UP_LOCK).unlink(missing_ok=True)


def _check_owner(directory: Path) -> None:
    status = directory.stat()
    if status.st_uid != os.geteuid() or status.st_mode & stat.S_IWOTH:
        raise ConfigError(f"{directory} belongs to somebody else or is open to all", hint="choose another --run-dir")


def _missing(directory: Path) -> list[Path]:
    """The directories that have to be made for this one to be, the innermost first."""
    return [folder for folder in (directory, *directory.parents) if not folder.exists()]


def with_bundle(config: NodeConfig, console: Console) -> NodeConfig:
    """The configuration with an absolute bundle: the configured one, or the demo model's.

    Raises:
        BundleError: there is no such bundle.
    """
    from tie.assets import active  # needs the node's packages, which `tie up --help` does not

    bundle = Path(config.model.bundle) if config.model.bundle else None
    if bundle is None:
        from tie.cli.assets import demo_bundle

        bundle = settings.cache_dir() / "demo-bundle"
        if not bundle.exists():
            console.say(f"making the demo model's bundle in {bundle} …")
            demo_bundle(bundle)
    bundle = bundle.absolute()
    # All parts look through this link, which `tie assets activate` can point elsewhere.
    link = Path(config.run_dir) / "assets" / active.LINK
    manifest = active.point(link, bundle).manifest
    console.say(f"model {manifest.model} ({manifest.release}) from {bundle}")
    return settings.replace(config, model__bundle=str(link))


def check(config: NodeConfig) -> None:
    """What would otherwise show as a daemon that keeps failing.

    Raises:
        ConfigError: a socket path is too long, or the ingress's port is taken.
    """
    longest = config.sockets.owner_control
    if len(os.fsencode(longest)) > 107:
        raise ConfigError(f"{config.run_dir} is too long for Unix sockets", hint="choose a shorter --run-dir")
    family = socket.AF_INET6 if ":" in config.cloudboard.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.cloudboard.host, config.cloudboard.port))
        except OSError as error:
            where = f"{config.cloudboard.host}:{config.cloudboard.port}"
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(f"{where} is in use", hint="choose another port with --port") from None
            raise ConfigError(f"cannot listen on {where}: {error.strerror}") from error


def write_configuration(config: NodeConfig) -> None:
    """node.toml and the node's keys, in the run directory."""
    from tie.cloudboard.keys import create_node_keys

    path = settings.node_toml(Path(config.run_dir))
    path.write_bytes(node_config.dump(config))
    path.chmod(0o640)
    create_node_keys(config)


def compile_packages() -> None:
    """Compiles this project to bytecode where that is missing or old, as pip does when it installs.

    In a checkout nobody else would: the processes of requests may write no file, and each would compile what it imports
    anew, at a quarter of the cost of its start.
    """
    root = Path(tie.__file__).parent
    for package in (root, root.parent / "kvxfer"):
        compileall.compile_dir(package, quiet=2)  # what may not be written stays as it is


def program(name: str) -> str:
    """Where a console script of this installation is.

    Raises:
        ConfigError: it is not installed.
    """
    beside = Path(sys.executable).parent / name
    path = str(beside) if beside.exists() else shutil.which(name)
    if path is None:
        raise ConfigError(f"{name} is not installed", hint="install the project with its extra `node`: ./run setup")
    return path
