"""Where a node is and how it is configured, as the command line sees it."""

import fcntl
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tie.daemon import config as node_config
from tie.daemon.config import NodeConfig
from tie.daemon.errors import ConfigError

UP_LOCK = "up.lock"  # in the run directory; held by `tie up`, holds its process number
_INSTALLED = Path("/etc/tie/node.toml")


def default_run_dir() -> Path:
    """The run directory when none is named: $TIE_RUN_DIR, else /run/tie for root, else a folder of the user's own."""
    named = os.environ.get("TIE_RUN_DIR")
    if named:
        return Path(named)
    if os.geteuid() == 0:
        return Path("/run/tie")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "tie" if runtime else Path(f"/tmp/tie-{os.geteuid()}")  # noqa: S108 (checked when made)


def cache_dir() -> Path:
    """Where the demo model's bundle is kept: $TIE_CACHE_DIR, else the user's cache folder."""
    named = os.environ.get("TIE_CACHE_DIR")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tie"


def node_toml(run_dir: Path) -> Path:
    """The configuration that `tie up` writes for its daemons."""
    return run_dir / "node.toml"


def load_running(run_dir: Path) -> NodeConfig:
    """The configuration of the node that runs in `run_dir`: what `tie up` wrote there, or the installed node's.

    Raises:
        ConfigError: there is none, or it is not ours to look at.
    """
    try:
        written = node_toml(run_dir).exists()
    except OSError as error:  # not ours to look into, or no path at all
        hint = "name another run directory with --run-dir, or ask as the user whose node it is"
        raise ConfigError(f"cannot look for a node in {run_dir}: {error.strerror}", hint=hint) from error
    if written:
        return node_config.load(node_toml(run_dir))
    if _INSTALLED.exists():
        config = node_config.load(_INSTALLED)
        if Path(config.run_dir) == run_dir:
            return config
    raise ConfigError(
        f"no node runs in {run_dir}", hint="start one with `tie up`, or name its run directory with --run-dir"
    )


def running_up(run_dir: Path) -> int | None:
    """The process number of the `tie up` that holds `run_dir`, or None."""
    try:
        lock = os.open(run_dir / UP_LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.pread(lock, 32, 0).decode(errors="replace").strip()
        return int(text) if text.isdigit() else 0
    finally:
        os.close(lock)
    return None


def effective(
    base: Path | None, overrides: Sequence[str], *, run_dir_unless_named: Path | None = None, **values: Any
) -> NodeConfig:
    """A configuration file with overrides on top.

    Args:
        base: node.toml, or None for the defaults.
        overrides: "table.key=value" with a TOML value; a value that is no TOML stands for itself as a string.
        run_dir_unless_named: the run directory where none of the others names one; else that of an installed node.
        values: overrides by dotted name with `__` for the dot; None is no override.

    Raises:
        ConfigError: a name or a value is wrong, or one is given by both.
    """
    named = {name.replace("__", ".") for name, value in values.items() if value is not None}
    fallback = NodeConfig().run_dir if run_dir_unless_named is None else str(run_dir_unless_named)
    tree = _tree(node_config.load(base, run_dir=fallback) if base else NodeConfig(run_dir=fallback))
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(
                f"--set {override}: needs key=value", hint="for example controller.recycle_interval_s=600"
            )
        if name.strip() in named:
            raise ConfigError(f"{name.strip()} is given twice: by --set and by an option of its own", hint="give one")
        _put(tree, name.strip(), _toml_value(text.strip()))
    return _checked(tree, values)


def replace(config: NodeConfig, **values: Any) -> NodeConfig:
    """The same configuration with a few values changed, named as in `effective`.

    Raises:
        ConfigError: a name or a value is wrong.
    """
    return _checked(_tree(config), values)


def _tree(config: NodeConfig) -> dict[str, Any]:
    tree: dict[str, Any] = msgspec.to_builtins(config)
    return tree


def _checked(tree: dict[str, Any], values: dict[str, Any]) -> NodeConfig:
    for name, value in values.items():
        if value is not None:
            _put(tree, name.replace("__", "."), value)
    try:
        config = msgspec.convert(tree, NodeConfig, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"configuration: {error}", hint="docs/configuration.md lists every key") from None
    if problem := node_config.contradiction(config):
        raise ConfigError(f"configuration: {problem}", hint="docs/configuration.md says what goes together")
    return config


def _put(tree: dict[str, Any], name: str, value: Any) -> None:
    *tables, key = name.split(".")
    at: Any = tree
    for table in tables:
        at = at.get(table) if isinstance(at, dict) else None
    if not isinstance(at, dict) or key not in at or isinstance(at[key], dict):
        raise ConfigError(f"there is no configuration key {name!r}", hint="docs/configuration.md lists every key")
    at[key] = value


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
