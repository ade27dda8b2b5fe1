"""The daemons of a node under `tie up`: started, restarted, told to stop; what systemd does with the units.

`Restart=always` with a growing pause, `Type=notify` readiness and `WatchdogSec=` (sd_notify(3)), process groups ended
as a whole.
"""

import asyncio
import contextlib
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tie.cli.process import Child, OnLine
from tie.daemon.errors import TieError
from tie.daemon.service import EXIT_CONFIG

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_LONG_ENOUGH_S = 10.0  # a run of this length was no crash loop
_DATAGRAM = 4096
_WATCHDOG_S = 30.0  # a daemon that has said once that it is well, and then nothing for so long, hangs


class ServiceConfigError(TieError):
    """A daemon refused its configuration: starting it again cannot help."""


@dataclass(frozen=True)
class Report:
    """Where a service's news go.

    Attributes:
        line: a line that the process wrote.
        ready: it serves (`READY=1`).
        status: it described itself (`STATUS=…`).
        ended: it ended with an exit code and starts again after a pause of so many seconds.
    """

    line: Callable[[str], None]
    ready: Callable[[], None]
    status: Callable[[str], None]
    ended: Callable[[int, float], None]


@dataclass
class Service:
    """One daemon.

    Attributes:
        name: of the daemon.
        argv: program and arguments.
        stop_s: how long it may take to end after SIGTERM.
        child: the running process, if any.
        starts: how often it was started.
        last_lines: the last lines of its output.
    """

    name: str
    argv: list[str]
    stop_s: float
    child: Child | None = None
    starts: int = 0
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=20))

    async def run(self, environment: Mapping[str, str], directory: Path, report: Report) -> None:
        """Keeps it running until cancelled; then its process has ended as well.

        Raises:
            ServiceConfigError: it says that its configuration is wrong.
        """
        with _NotifySocket(directory / f"{self.name}.notify", report) as notifications:
            pause = _FIRST_PAUSE_S
            while True:
                self.child = Child(
                    self.name,
                    self.argv,
                    environment={
                        **environment,
                        "NOTIFY_SOCKET": str(notifications.path),
                        "WATCHDOG_USEC": str(int(_WATCHDOG_S * 1_000_000)),
                    },
                    on_line=self._tee(report.line),
                )
                self.starts += 1
                try:
                    code = await self._ended(self.child, notifications)
                except asyncio.CancelledError:
                    await self.child.stop(self.stop_s)
                    raise
                if code == EXIT_CONFIG:
                    raise ServiceConfigError(f"{self.name} refuses its configuration")
                if time.monotonic() - self.child.started >= _LONG_ENOUGH_S:
                    pause = _FIRST_PAUSE_S
                report.ended(code, pause)
                await asyncio.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE_S)

    async def _ended(self, child: Child, notifications: "_NotifySocket") -> int:
        """The exit code; a child that hangs is killed."""
        notifications.begin()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_WATCHDOG_S / 6):
                    return await child.wait()
            if notifications.silence_s() > _WATCHDOG_S:
                child.kill()

    def _tee(self, on_line: OnLine) -> OnLine:
        def both(line: str) -> None:
            self.last_lines.append(line)
            on_line(line)

        return both


class _NotifySocket:
    """The receiving end of sd_notify(3)."""

    def __init__(self, path: Path, report: Report) -> None:
        self.path = path
        self._last_beat: float | None = None  # on the monotonic clock
        self._report = report
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)

    def begin(self) -> None:
        """A new child: its beats count from its first one."""
        self._last_beat = None

    def silence_s(self) -> float:
        """Seconds since the last beat; 0 for a child that has not begun to beat."""
        return 0.0 if self._last_beat is None else time.monotonic() - self._last_beat

    def __enter__(self) -> "_NotifySocket":
        self.path.unlink(missing_ok=True)
        self._socket.bind(str(self.path))
        self.path.chmod(0o600)
        asyncio.get_running_loop().add_reader(self._socket, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        self.path.unlink(missing_ok=True)

    def _receive(self) -> None:
        try:
            datagram = self._socket.recv(_DATAGRAM)
        except BlockingIOError:
            return
        for assignment in datagram.decode(errors="replace").splitlines():
            name, _, value = assignment.partition("=")
            if (name, value) == ("READY", "1"):
                self._report.ready()
            elif (name, value) == ("WATCHDOG", "1"):
                self._last_beat = time.monotonic()
            elif name == "STATUS":
                self._report.status(value)


async def stop_in_order(stages: list[list[asyncio.Task[None]]]) -> None:
    """Cancels the tasks of one stage at a time and waits for them: each ends its process within its own deadline."""
    for stage in stages:
        for task in stage:
            task.cancel()
        await asyncio.gather(*stage, return_exceptions=True)


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    return signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
