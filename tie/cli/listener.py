"""What `Accept=yes` of a systemd socket unit does (systemd.socket(5)): one process for each connection."""

import asyncio
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tie.cli.process import Child, OnLine
from tie.daemon import socket_path
from tie.daemon.socket_guard import identity

_BACKLOG = 128
# A step of the engine serves everybody at once, a process of a request one: it stands back, from its start on. With
# systemd it is the weight of tie-app.slice that says so.
_NICENESS = 10


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
        """
        self._lock = socket_path.claim(self._path)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        before = os.umask(0o117)
        try:
            listening.bind(str(self._path))
        finally:
            os.umask(before)
        listening.listen(_BACKLOG)
        asyncio.get_running_loop().add_reader(listening, self._accept, listening)
        self._socket = listening
        self._identity = identity(self._path)

    def heal(self) -> bool:
        """Opens the socket anew where its file is gone, which nobody else could; whether that was so."""
        if self._socket is None or identity(self._path) == self._identity:
            return False
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        os.close(self._lock)
        self.start()
        return True

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
                    niceness=_NICENESS,
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
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None
            self._path.unlink(missing_ok=True)
            os.close(self._lock)
        tasks = list(self._instances.values())
        await asyncio.gather(*(child.stop(deadline) for child in list(self._instances)))
        await asyncio.gather(*tasks)

    def kill(self) -> None:
        """SIGKILL to every running instance."""
        for child in self._instances:
            child.kill()
