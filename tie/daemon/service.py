"""How every daemon runs: options, configuration, hardening, signals, readiness, exit codes.

A daemon is an async function of its configuration and a `Lifetime`. It calls `lifetime.ready()` when it serves and
returns when `lifetime.stopping` is set.
"""

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NoReturn

from tie import __version__
from tie.daemon import config as node_config
from tie.daemon import log
from tie.daemon.errors import TieError, UserError
from tie.daemon.hardening import protect_process
from tie.daemon.notify import notify, watchdog_interval
from tie.daemon.socket_path import identity

_LOOK_S = 1.0  # between two looks at the sockets' files

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_CONFIG = 78  # sysexits.h EX_CONFIG


class Lifetime:
    """A daemon's beginning and end, as seen from inside.

    Attributes:
        stopping: set when the daemon has been asked to end.
    """

    def __init__(self, name: str) -> None:
        self.stopping = asyncio.Event()
        self._name = name
        self._guard: asyncio.Task[None] | None = None

    def ready(self, *sockets: Path) -> None:
        """Says that the daemon serves: to systemd and to the log.

        Args:
            sockets: what it serves on. When one loses its file, nobody new can reach the daemon: then it asks itself to
                end, and whatever supervises it starts another, with sockets of its own.
        """
        notify("READY=1")
        log.event("daemon.ready", daemon=self._name)
        if sockets:
            self._guard = asyncio.create_task(self._watch({path: identity(path) for path in sockets}))

    async def _watch(self, sockets: dict[Path, tuple[int, int] | None]) -> None:
        while not self.stopping.is_set():
            for path, ours in sockets.items():
                if identity(path) != ours:
                    log.event("socket.lost", daemon=self._name, socket=str(path))
                    self.stop()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self.stopping.wait()

    def stop(self) -> None:
        """Asks the daemon to end."""
        if not self.stopping.is_set():
            notify("STOPPING=1")
            self.stopping.set()


Daemon = Callable[[node_config.NodeConfig, Lifetime], Awaitable[None]]


def options(name: str, description: str) -> argparse.ArgumentParser:
    """The options that every program of a node has: `--config` and `--version`."""
    parser = argparse.ArgumentParser(prog=name, description=description)
    parser.add_argument(
        "--config", type=Path, default=Path("/etc/tie/node.toml"), help="node.toml (default: %(default)s)"
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    return parser


def refuse(name: str, error: Exception) -> NoReturn:
    """Ends a program that cannot go on: says why, and exits with the code for it.

    What an operator can mend comes with a hint. Of everything else type and place are logged, and the text is said only
    where it is ours: another's, or a traceback, may quote data.
    """
    mendable = isinstance(error, UserError)
    if not mendable:
        log.failure("daemon.failed", error, daemon=name)
    if isinstance(error, TieError):
        sys.stderr.write(f"{name}: {error}\n")
    if isinstance(error, UserError) and error.hint:
        sys.stderr.write(f"{name}: {error.hint}\n")
    sys.exit(EXIT_CONFIG if mendable else EXIT_FAILURE)


def run(name: str, description: str, daemon: Daemon) -> NoReturn:
    """Runs `daemon` as a process of its own until SIGTERM or SIGINT, then exits with its code."""
    arguments = options(name, description).parse_args()
    protect_process()
    try:
        config = node_config.load(arguments.config)
        asyncio.run(_supervise(name, config, daemon))
    except Exception as error:  # noqa: BLE001 (the last line of defence)
        refuse(name, error)
    sys.exit(EXIT_OK)


async def _supervise(name: str, config: node_config.NodeConfig, daemon: Daemon) -> None:
    lifetime = Lifetime(name)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_on_loop_error)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lifetime.stop)
    watchdog = asyncio.create_task(_watchdog())
    try:
        await daemon(config, lifetime)
    finally:
        watchdog.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watchdog


async def _watchdog() -> None:
    # From the event loop itself: a blocked loop stays silent, which is what the watchdog is there to notice.
    interval = watchdog_interval()
    while interval is not None:
        notify("WATCHDOG=1")
        await asyncio.sleep(interval)


def _on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    del loop
    error = context.get("exception")
    if isinstance(error, BaseException):
        log.failure("daemon.task-failed", error)
