"""A node of its own for a demonstration or a test: `tie up` in a temporary run directory, on a free port.

It ends with the process that made it, however that one ends.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from tie.cli import control, settings
from tie.cli.console import parse, printable, readable
from tie.cli.own_folder import OwnFolder
from tie.daemon.config import NodeConfig
from tie.daemon.errors import PeerDiedError, PeerError, PeerTimeoutError
from tie.proto import control_pb2

_STOP_S = 40.0
_LAST_MOMENT_S = 2.0  # for the kernel to end those that end with their parent
_POLL_S = 0.1


class LocalNode:
    """Starts `tie up` and knows its processes. `stop` must be called.

    Attributes:
        run_dir: its run directory, short enough for sockets.
        port: of its ingress.
        process: `tie up`.
    """

    def __init__(
        self,
        *,
        bundle: Path | None = None,
        overrides: Sequence[str] = (),
        prepare: Callable[[Path], None] = lambda _: None,
    ) -> None:
        """Starts it.

        Args:
            bundle: of the model; the demo model's unless given.
            overrides: as for `tie up --set`.
            prepare: called with the run directory before anything is in it.
        """
        # A folder directly under /tmp: paths of Unix sockets are short.
        # What `prepare` mounted there keeps the folder busy, and is for its owner to take away.
        self._folder = OwnFolder(Path("/tmp"), "tie-demo-")  # noqa: S108 (mkdtemp)
        self.run_dir = self._folder.path / "run"
        self._log = self._folder.path / "log"
        prepare(self.run_dir)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        command = [sys.executable, "-P", "-m", "tie.cli.main", "up", "--json-logs", "--parent", str(os.getpid())]
        command += ["--run-dir", str(self.run_dir), "--port", str(self.port)]
        command += ["--bundle", str(bundle)] if bundle else []
        command += [part for override in overrides for part in ("--set", override)]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(self._folder.lock,),  # it needs the folder until its own end
            )
        self._seen: set[psutil.Process] = set()
        self._kept: str | None = None

    @property
    def config(self) -> NodeConfig:
        """As `tie up` wrote it."""
        return settings.load_running(self.run_dir)

    @property
    def url(self) -> str:
        """Of the ingress."""
        return f"http://127.0.0.1:{self.port}"

    def processes(self) -> list[psutil.Process]:
        """Every process of the node that runs now, `tie up` included."""
        try:
            top = psutil.Process(self.process.pid)
            found = [top, *top.children(recursive=True)]
        except psutil.NoSuchProcess:
            found = []
        self._seen.update(found)
        return found

    def find(self, name: str) -> list[psutil.Process]:
        """The node's processes whose program has this name."""
        return [process for process in self.processes() if _program(process) == name]

    def log_lines(self) -> list[str]:
        """What `tie up` and its daemons said so far, for a person."""
        lines = self.log_text().splitlines()
        return [readable(record) if (record := parse(line)) else printable(line) for line in lines]

    def log_text(self) -> str:
        """The same as it was written; after `stop` what it was then."""
        return self._log.read_text(errors="replace") if self._kept is None else self._kept

    async def status(self) -> control_pb2.NodeStatus:
        """The controller's view of the node. Raises as `control.connected`."""
        async with control.connected(self.run_dir) as connection:
            reply: control_pb2.NodeStatus = await connection.node.GetStatus(
                control_pb2.GetStatusRequest(), timeout=control.CALL_S
            )
            return reply

    async def wait_for(self, state: "control_pb2.State.ValueType", timeout: float) -> control_pb2.NodeStatus:
        """Waits until the node is in `state`.

        Raises:
            PeerDiedError: `tie up` ended.
            PeerTimeoutError: it did not get there within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        reasons = "nothing answered"
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise PeerDiedError(f"`tie up` ended with exit code {self.process.returncode}")
            if settings.node_toml(self.run_dir).exists():
                try:
                    status = await self.status()
                except PeerError:
                    status = control_pb2.NodeStatus()
                if status.state == state:
                    self.processes()
                    return status
                reasons = ", ".join(status.reasons) or reasons
            await asyncio.sleep(_POLL_S)
        raise PeerTimeoutError(f"the node did not get ready within {timeout:.0f} s ({reasons})")

    def stop(self) -> list[str]:
        """Ends the node as Ctrl-C does; returns what outlived it (and ends that too)."""
        while True:
            try:
                self.processes()
                self.process.send_signal(signal.SIGINT)
                self.process.wait(_STOP_S)
                break
            except KeyboardInterrupt:  # asked again: at once, but not without it
                continue
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                break
        left = self.leftovers()
        for process in left:
            process.kill()
        self._kept = self.log_text()
        self._folder.remove()
        return [_program(process) or str(process.pid) for process in left]

    def leftovers(self) -> list[psutil.Process]:
        """Processes of this node that still run although `tie up` has ended.

        One that the kernel ends with its parent (PR_SET_PDEATHSIG) is gone a moment after it: that much it gets.
        """
        mine = str(self.run_dir)
        found = {process for process in self._seen if process.is_running() and process.pid != self.process.pid}
        for process in psutil.process_iter():
            try:
                if process.pid != os.getpid() and any(mine in argument for argument in process.cmdline()):
                    found.add(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        _, alive = psutil.wait_procs([process for process in found if _runs(process)], timeout=_LAST_MOMENT_S)
        return [process for process in alive if _runs(process)]


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _program(process: psutil.Process) -> str:
    """The name of a program; of the console script or the module when it is Python that runs one."""
    try:
        arguments = process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""
    names = [Path(argument).name for argument in arguments[:4] if argument != "-P"]
    if len(names) > 1 and names[0].startswith("python"):
        return names[2] if names[1] == "-m" and len(names) > 2 else names[1]
    return names[0] if names else ""
