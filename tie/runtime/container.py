"""Keeps the container's processes together: they live together and die together.

Three small programs run under supervisord (`python -m tie.runtime.container NAME`):

- `guard` starts tie-status-probe and takes the container down when the probe ends, however it ends;
- `watch` is supervisord's event listener and takes the container down when any program ends (the guard included);
- `triton` becomes tritonserver.

The guard watches the watcher in turn, and the kernel kills all of them when supervisord ends (PR_SET_PDEATHSIG), so
there is no process whose death leaves the others running. A container that goes down is made anew from outside.
"""

import glob
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Final, NoReturn

from supervisor import childutils

from tie.daemon import config as node_config
from tie.daemon import log
from tie.daemon.hardening import die_with_parent

CONFIG_VARIABLE: Final = "TIE_CONFIG"
DIRECTORY_VARIABLE: Final = "TIE_ENGINE_DIR"
SHM_VARIABLE: Final = "TIE_SHM_PREFIX"
SUPERVISOR_VARIABLE: Final = "TIE_SUPERVISORD_PID"
_WATCHER_SOCKET: Final = "watcher.sock"
_WATCHER_S: Final = 10.0  # until the watcher listens
_PROBE_STOP_S: Final = 5.0
_SUPERVISOR_STOP_S: Final = 30.0
_CLOSED_PROTOCOLS: Final = (
    "metadata", "model-config", "model-repository", "shared-memory", "statistics", "trace", "logging",
)  # fmt: skip


def main() -> NoReturn:
    """Runs the program named on the command line."""
    program = {"guard": guard, "watch": watch, "triton": triton}[sys.argv[1]]
    die_with_parent(signal.SIGKILL)
    if os.getppid() != _supervisor():
        sys.exit(1)  # it ended before the kernel knew our wish
    sys.exit(program())


def guard() -> int:
    """Runs tie-status-probe; ends the container when it or the watcher ends; cleans up when told to stop."""
    stopped, stopper = socket.socketpair()
    stopper.setblocking(False)
    signal.set_wakeup_fd(stopper.fileno())
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)
    watcher = _connect_to_watcher()
    probe = subprocess.Popen(
        [sys.executable, "-m", "status_probe.main", "--config", os.environ[CONFIG_VARIABLE]],
        # The probe must not outlive its guard; this process has one thread only.
        preexec_fn=lambda: die_with_parent(signal.SIGKILL),  # noqa: PLW1509
    )
    ended = os.pidfd_open(probe.pid)
    readable, _, _ = select.select([ended, watcher.fileno(), stopped.fileno()], [], [])
    if stopped.fileno() not in readable:
        reason = "probe-ended" if ended in readable else "watcher-ended"
        log.event("container.down", reason=reason)
        _end_container()
        # supervisord stops Triton and then this process: only then may Triton's memory be cleared.
        if not select.select([stopped], [], [], _SUPERVISOR_STOP_S)[0]:
            os.kill(_supervisor(), signal.SIGKILL)
    probe.terminate()
    try:
        code = probe.wait(_PROBE_STOP_S)
    except subprocess.TimeoutExpired:
        probe.kill()
        code = probe.wait()
    remove_regions(os.environ[SHM_VARIABLE])
    return 0 if code == 0 else 1


def watch() -> int:
    """The event listener: any critical program's end ends the container."""
    path = Path(os.environ[DIRECTORY_VARIABLE], _WATCHER_SOCKET)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.fspath(path))
    # Nobody accepts: the guard's pending connection breaks when this process ends, and that is all it is for.
    listener.listen(1)
    while True:
        headers, _ = childutils.listener.wait()
        log.event("container.down", reason=headers["eventname"].lower().replace("_", "-"))
        _end_container()
        childutils.listener.ok()


def triton() -> NoReturn:
    """Becomes tritonserver: gRPC on a Unix socket, inference and health only."""
    from tie.runtime.model_repository import find_installation

    config = node_config.load(Path(os.environ[CONFIG_VARIABLE]))
    directory = Path(os.environ[DIRECTORY_VARIABLE], "triton")
    server = find_installation().server
    # gRPC appends the port to the path.
    address, _, port = os.fspath(config.sockets.triton).rpartition(":")
    # Protocols that need a header whose value nobody knows: closed.
    token = secrets.token_hex(32)
    os.execv(  # noqa: S606
        server,
        [
            os.fspath(server),
            f"--model-repository={directory / 'models'}",
            f"--backend-directory={directory / 'backends'}",
            "--model-control-mode=none",
            f"--grpc-address=unix:{address}",
            f"--grpc-port={port}",
            f"--grpc-restricted-protocol={','.join(_CLOSED_PROTOCOLS)}:closed={token}",
            "--allow-http=false",
            "--allow-metrics=false",
            "--log-info=false",
            "--log-verbose=0",
            "--exit-timeout-secs=3",
            f"--backend-config=python,shm-region-prefix-name={os.environ[SHM_VARIABLE]}",
            f"--backend-config=python,stub-timeout-seconds={int(config.probe.start_deadline_s) + 30}",
        ],
    )


def remove_regions(prefix: str) -> None:
    """Unlinks shared memory that a killed Triton left behind."""
    for region in glob.glob(f"/dev/shm/{glob.escape(prefix)}*"):  # noqa: PTH207, S108 (the kernel's own path)
        Path(region).unlink(missing_ok=True)


def _supervisor() -> int:
    return int(os.environ[SUPERVISOR_VARIABLE])


def _end_container() -> None:
    os.kill(_supervisor(), signal.SIGTERM)


def _connect_to_watcher() -> socket.socket:
    path = os.path.join(os.environ[DIRECTORY_VARIABLE], _WATCHER_SOCKET)  # noqa: PTH118
    deadline = time.monotonic() + _WATCHER_S
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
        except OSError:
            connection.close()
            if time.monotonic() > deadline:
                _end_container()
                raise
            time.sleep(0.05)
        else:
            return connection


if __name__ == "__main__":
    main()
