"""Child processes of `tie up`: started by fork and exec, in a session of their own, dead when we are dead.

The standard library's subprocess cannot tell a child its own pid before exec, which socket activation needs
(`LISTEN_PID`, sd_listen_fds(3)), and asyncio's child watcher of Python 3.11 starts a thread for each child. `tie up`
has one thread on purpose: only then is it safe to run Python between fork and exec.
"""

import asyncio
import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tie.daemon.hardening import die_with_parent

_LISTEN_FD = 3  # sd_listen_fds(3): passed descriptors start here
_EXIT_NO_EXEC = 127
_LINE_LIMIT = 16 * 1024  # of one log line; what is longer is cut into several
_READ = 64 * 1024

OnLine = Callable[[str], None]


class Child:
    """One running process.

    Attributes:
        name: for messages.
        pid: also its process group and session.
        started: on the monotonic clock.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        environment: Mapping[str, str],
        on_line: OnLine,
        connection: int | None = None,
        niceness: int = 0,
    ) -> None:
        """Starts it; needs a running event loop.

        Args:
            name: for messages.
            argv: program and arguments, no shell.
            environment: the whole environment.
            on_line: called with every line that it writes to its standard output or error, without the line's end.
            connection: a descriptor that the program gets as number 3, announced as systemd does.
            niceness: how far it stands back where the processor is wanted by many (setpriority(2)).
        """
        self.name = name
        self.started = time.monotonic()
        loop = asyncio.get_running_loop()
        self._exit: asyncio.Future[int] = loop.create_future()
        output, write_end = os.pipe()
        try:
            self.pid = _spawn(argv, dict(environment), write_end, connection, niceness)
        except BaseException:
            os.close(output)
            raise
        finally:
            os.close(write_end)
        _Lines(output, on_line)
        self._pidfd = os.pidfd_open(self.pid)
        loop.add_reader(self._pidfd, self._on_exit)

    def _on_exit(self) -> None:
        # While it is a zombie its number belongs to nobody else: what is left of its group can be ended safely.
        kill_group(self.pid)
        result = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        if result is None:
            return
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._exit.set_result(result.si_status if result.si_code == os.CLD_EXITED else -result.si_status)

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return not self._exit.done()

    async def wait(self) -> int:
        """Its exit code once it has ended; minus the signal's number when one killed it."""
        return await asyncio.shield(self._exit)

    def send(self, number: int) -> None:
        """Sends a signal to the process itself, not to its children; nothing once it has ended."""
        if self.running:
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """SIGKILL to the process and to all of its process group."""
        self.send(signal.SIGKILL)
        kill_group(self.pid)

    async def stop(self, deadline: float) -> bool:
        """SIGTERM, then SIGKILL to the whole group after `deadline` seconds; whether it ended by itself in time."""
        self.send(signal.SIGTERM)
        try:
            async with asyncio.timeout(deadline):
                await self.wait()
        except TimeoutError:
            self.kill()
            await self.wait()
            return False
        return True


def _spawn(argv: Sequence[str], environment: dict[str, str], output: int, connection: int | None, niceness: int) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()  # a Ctrl-C in the terminal reaches `tie up` alone, which then stops everything in order
        die_with_parent(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(_EXIT_NO_EXEC)  # it died before the request reached the kernel
        if niceness:
            _stand_back(niceness)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # an ignored signal would stay ignored across exec
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        keep = _LISTEN_FD
        if connection is not None:
            os.dup2(connection, _LISTEN_FD)
            environment |= {"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid()), "LISTEN_FDNAMES": "connection"}
            keep += 1
        os.closerange(keep, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        os.execve(argv[0], list(argv), environment)  # noqa: S606 (no shell is the point)
    except OSError as error:
        os.write(2, f"cannot start {argv[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(_EXIT_NO_EXEC)


def _stand_back(niceness: int) -> None:
    """Takes a smaller share of the processor, for this process and its session."""
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.nice(niceness)
    # Where the kernel shares the processor out by session, niceness counts within one only (sched(7), autogroup).
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(niceness))


class _Lines:
    """Reads a pipe to its end and calls back for every line. Log output: unreadable bytes are replaced."""

    def __init__(self, descriptor: int, on_line: OnLine) -> None:
        self._descriptor = descriptor
        self._on_line = on_line
        self._rest = b""
        os.set_blocking(descriptor, False)
        asyncio.get_running_loop().add_reader(descriptor, self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._descriptor, _READ)
        except BlockingIOError:
            return
        if not data:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if self._rest and (not data or len(self._rest) > _LINE_LIMIT):
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._on_line(line.decode(errors="replace"))


def kill_group(group: int) -> None:
    """SIGKILL to a process group, if there still is one."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def kill_orphans(known: set[int]) -> int:
    """Ends every child of this process that it did not start itself; returns how many were still running.

    What a cgroup does for systemd: with `adopt_orphans`, whatever a dead service leaves behind becomes our child. Their
    own children come to us in turn, so this is called again at every SIGCHLD.
    """
    killed = 0
    for pid in _children() - known:
        try:
            if os.waitpid(pid, os.WNOHANG)[0] == 0:
                os.kill(pid, signal.SIGKILL)
                killed += 1
        except (ChildProcessError, ProcessLookupError):
            continue
    return killed


def _children() -> set[int]:
    tasks = Path("/proc/self/task")
    return {int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()}
