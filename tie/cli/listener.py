"""What `Accept=yes` of a systemd socket unit does (systemd.socket(5)): one process for each connection."""

import asyncio
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from tie.cli.process import Child, OnLine
from tie.daemon import ahead, socket_path
from tie.daemon.errors import TieError
from tie.daemon.socket_path import identity

_BACKLOG = 128
_HEAL_S = 1.0
# A step of the engine serves everybody at once, a process that is started ahead of need nobody yet: it stands back. One
# that a user waits for does not, or on a machine that others use as well the user would wait behind all of them. With
# systemd it is the weight of tie-app.slice that says how much these processes are worth.
_NICENESS_AHEAD = 19


class Listener:
    """A listening Unix socket that starts a program for each connection.

    The program gets the accepted connection as descriptor 3 (`LISTEN_FDS=1`, `LISTEN_PID`), serves it and ends.
    Connections over the limit are closed at once: the other side sees end-of-file, never a queue without an end.
    """

    def __init__(
        self,
        name: str,
        path: Path,
        argv: Sequence[str],
        *,
        environment: Mapping[str, str],
        limit: int,
        on_line: Callable[[str], OnLine],
        on_refused: Callable[[str], None],
    ) -> None:
        """Describes it; `start` opens the socket.

        Args:
            name: of the program, for messages.
            path: of the socket, mode 0660.
            argv: program and arguments.
            environment: of each instance.
            limit: how many instances may run at once.
            on_line: given an instance's name, where its log lines go.
            on_refused: called with this listener's name when a connection was over the limit.
        """
        self.name = name
        self._path = path
        self._argv = argv
        self._environment = environment
        self._limit = limit
        self._on_line = on_line
        self._on_refused = on_refused
        self._instances: dict[Child, asyncio.Task[None]] = {}
        self._socket: socket.socket | None = None
        self._lock = -1
        self._count = 0
        self._identity: tuple[int, int] | None = None

    @property
    def pids(self) -> set[int]:
        """Of the running instances."""
        return {child.pid for child in self._instances}

    def start(self) -> None:
        """Opens the socket and starts accepting.

        Raises:
            SocketInUseError: a live server holds the path.
            ConfigError: the path is too long for a Unix socket.
            OSError: it cannot be opened there.
        """
        lock = socket_path.claim(self._path)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        before = os.umask(0o117)
        try:
            listening.bind(str(self._path))
            listening.listen(_BACKLOG)
        except OSError:
            listening.close()
            os.close(lock)
            raise
        finally:
            os.umask(before)
        asyncio.get_running_loop().add_reader(listening, self._accept, listening)
        self._socket, self._lock, self._identity = listening, lock, identity(self._path)

    def heal(self) -> bool:
        """Opens the socket anew where its file is gone, which nobody else could; whether that was so.

        Raises:
            OSError: it cannot be opened now; the next call tries again.
            TieError: likewise.
        """
        if self._socket is not None and identity(self._path) == self._identity:
            return False
        self._close()
        self.start()
        return True

    def _close(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            os.close(self._lock)
            self._socket = None

    def _accept(self, listening: socket.socket) -> None:
        try:
            connection, _ = listening.accept()
        except OSError:
            return  # gone again, or out of descriptors: the next event tries anew
        with connection:
            if len(self._instances) >= self._limit:
                self._on_refused(self.name)
                return
            self._count += 1
            name = f"{self.name}@{self._count}"
            try:
                child = Child(
                    name,
                    self._argv,
                    environment=self._environment,
                    on_line=self._on_line(name),
                    connection=connection.fileno(),
                    niceness=_NICENESS_AHEAD if ahead.is_ahead(connection) else 0,
                )
            except OSError:
                self._on_refused(self.name)  # no process to be had
                return
        self._instances[child] = asyncio.create_task(self._forget(child))

    async def _forget(self, child: Child) -> None:
        await child.wait()
        del self._instances[child]

    async def stop(self, deadline: float) -> None:
        """Accepts nothing more; running instances get SIGTERM and `deadline` seconds, then SIGKILL."""
        if self._socket is not None and identity(self._path) == self._identity:
            self._path.unlink(missing_ok=True)
        self._close()
        tasks = list(self._instances.values())
        await asyncio.gather(*(child.stop(deadline) for child in list(self._instances)))
        await asyncio.gather(*tasks)

    def kill(self) -> None:
        """SIGKILL to every running instance."""
        for child in self._instances:
            child.kill()


async def keep_open(listeners: Sequence[Listener], say: Callable[[str, str], None]) -> NoReturn:
    """Looks after the sockets' files for ever, and tries on where one cannot be opened; cancel to end.

    Args:
        listeners: those that were started.
        say: called with a listener's name and what became of its socket.
    """
    failing: dict[str, str] = {}
    while True:
        await asyncio.sleep(_HEAL_S)
        for listener in listeners:
            try:
                healed, trouble = listener.heal(), ""
            except (OSError, TieError) as error:
                healed, trouble = False, f"the socket's file is gone and cannot be opened anew: {error}"
            if healed:
                say(listener.name, "the socket's file was gone; opened anew")
            elif trouble and failing.get(listener.name) != trouble:
                say(listener.name, trouble)
            failing[listener.name] = trouble
