"""Keeps the container's processes together: they live together and die together.

Three small programs run under supervisord (`python -P -m tie.runtime.container NAME`):

- `guard` starts tie-status-probe and takes the container down when the probe ends, however it ends, or hangs;
- `serve` starts tritonserver, ends when it ends, and stops it well;
- `watch` is supervisord's event listener and takes the container down when one of the others ends.

The others watch the watcher in turn, and the kernel kills every process of the container when its parent ends
(PR_SET_PDEATHSIG), so there is none whose death leaves the others running. A container that goes down is made anew from
outside.

There are two ways down. After a recycle, or when somebody asks, the container *stops*: requests in flight may finish.
After a death it is *killed*, at once: what it still computed would be cut off later anyway, and the sooner its users
hear of it the better.
"""

import array
import contextlib
import fcntl
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

from tie.daemon import config as node_config
from tie.daemon import log
from tie.daemon.hardening import die_with_parent
from tie.runtime import environment

_WATCHER_SOCKET: Final = "watcher.sock"
_WATCHER_S: Final = 10.0  # until the watcher listens
_BEATS_SOCKET: Final = "beats.sock"
_PROBE_SILENCE_S: Final = 30.0  # a probe that says nothing for so long hangs
_PROBE_STOP_S: Final = 5.0
_SUPERVISOR_STOP_S: Final = 40.0
_DRAIN_S: Final = 20.0  # requests in flight when the container is stopped without a recycle
_FLUSH_S: Final = 0.2  # from a request's last event to its client
_LAST_WORD_S: Final = 0.2  # for supervisord to pass on what one of its programs has written


def main() -> NoReturn:
    """Runs the program named on the command line."""
    program = {"guard": guard, "serve": serve, "watch": watch}[sys.argv[1]]
    die_with_parent(signal.SIGKILL)
    if os.getppid() != _supervisor():
        sys.exit(1)  # it ended before the kernel knew our wish
    sys.exit(program())


def guard() -> int:
    """Runs tie-status-probe; ends the container when it or the watcher ends.

    A probe that exits with 0 has drained the engine, or was asked to end: the container stops. Any other end is its
    death.
    """
    stop = _stop_requests()
    watcher = _connect_to_watcher()
    beats = _listen_for_beats()
    probe = _start([sys.executable, "-P", "-m", "status_probe.main", "--config", os.environ[environment.CONFIG]])
    ended = os.pidfd_open(probe.pid)
    awaited: list[int | socket.socket] = [ended, watcher, stop, beats]
    while True:
        readable, _, _ = select.select(awaited, [], [], _PROBE_SILENCE_S)
        if readable != [beats]:
            break
        beats.recv(4096)
    if stop not in readable:
        if not readable:
            _kill_container("probe-hung")
        if ended not in readable:
            _kill_container("watcher-died")
        elif probe.wait() != 0:
            _kill_container("probe-died")
        _stop_container("probe-ended")
        if not select.select([stop], [], [], _SUPERVISOR_STOP_S)[0]:
            _kill_container("supervisor-hung")
    return _end(probe, _PROBE_STOP_S)


def serve() -> int:
    """Runs tritonserver. When told to stop: drains the engine, then kills it.

    Triton's own exit takes seconds after its last request, and for ever while some client holds an idle stream.
    """
    from tie.runtime.triton_server import command

    stop = _stop_requests()
    # Group-readable sockets, no more.
    os.umask(0o117)
    server = _start(command(node_config.load(Path(os.environ[environment.CONFIG])), _directory()))
    ended = os.pidfd_open(server.pid)
    watcher = _connect_to_watcher()  # the guard may die with it
    readable, _, _ = select.select([ended, stop.fileno(), watcher.fileno()], [], [])
    if readable == [watcher.fileno()]:
        _kill_container("watcher-died")
    if ended not in readable:
        _drain(ended)
        server.kill()
    code = server.wait()
    # They have no names any more, unless it ended before its model was loaded.
    environment.remove_regions(os.environ[environment.SHM_PREFIX])
    return code if code >= 0 else 128 - code


def watch() -> NoReturn:
    """The event listener: any program's end ends the container."""
    from supervisor import childutils

    path = _directory() / _WATCHER_SOCKET
    path.unlink(missing_ok=True)
    os.umask(0o177)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.fspath(path))
    # Nobody accepts: the others' pending connections break when this process ends, and that is all they are for.
    listener.listen(2)
    headers, _ = childutils.listener.wait()
    _kill_container(headers["eventname"].lower().replace("_", "-"))


def _start(command: Sequence[str]) -> "subprocess.Popen[bytes]":
    """Starts a child that does not outlive this process and leaves no core."""

    def before_exec() -> None:
        die_with_parent(signal.SIGKILL)
        # exec makes a process dumpable again. A limit of one byte keeps cores from files and from pipes alike; 0 would
        # be ignored for pipes (kernel, fs/coredump.c).
        with contextlib.suppress(ValueError, OSError):  # it is 0 already and may not be raised, or a filter forbids it
            resource.setrlimit(resource.RLIMIT_CORE, (1, 1))

    return subprocess.Popen(command, preexec_fn=before_exec)  # noqa: PLW1509 (one thread only)


def _stop_requests() -> socket.socket:
    """A socket that becomes readable when supervisord asks this process to stop."""
    receiving, sending = socket.socketpair()
    sending.setblocking(False)
    signal.set_wakeup_fd(sending.detach())
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)
    return receiving


def _listen_for_beats() -> socket.socket:
    """Where the probe says from its event loop that it is well: systemd's watchdog protocol (sd_notify(3))."""
    path = _directory() / _BEATS_SOCKET
    path.unlink(missing_ok=True)
    beats = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    beats.bind(os.fspath(path))
    path.chmod(0o600)
    os.environ["NOTIFY_SOCKET"] = os.fspath(path)
    os.environ["WATCHDOG_USEC"] = str(int(_PROBE_SILENCE_S * 1_000_000))
    return beats


def _end(child: "subprocess.Popen[bytes]", patience: float) -> int:
    child.terminate()
    try:
        return child.wait(patience)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()


def _drain(server_ended: int) -> None:
    """Lets requests in flight finish, and their last events leave; at once when there is no engine."""
    from kvxfer.channel import Channel
    from kvxfer.errors import KvxferError
    from tie.proto import engine_pb2

    request = engine_pb2.EngineRequest(drain=engine_pb2.DrainRequest(deadline_ms=int(_DRAIN_S * 1000)))
    reply = engine_pb2.EngineReply()
    deadline = time.monotonic() + _DRAIN_S + 1.0
    # A drain may be asked for again; each time it is answered with what is left.
    with contextlib.suppress(KvxferError), Channel.connect(_directory() / "engine.sock", timeout=1.0) as channel:
        while time.monotonic() < deadline:
            channel.send(request.SerializeToString(), timeout=1.0)
            reply.ParseFromString(channel.receive(timeout=1.0)[0])
            if reply.status.running + reply.status.waiting == 0:
                break
            if select.select([server_ended], [], [], 0.05)[0]:
                return
        time.sleep(_FLUSH_S)  # the last of them may have ended a moment ago


def _directory() -> Path:
    return Path(os.environ[environment.DIRECTORY])


def _supervisor() -> int:
    return int(os.environ[environment.SUPERVISOR])


def _stop_container(reason: str) -> None:
    os.kill(_supervisor(), signal.SIGTERM)
    # After the signal: supervisord looks at signals once a second, or when one of its programs writes something.
    log.event("container.down", reason=reason)


def _kill_container(reason: str) -> NoReturn:
    """Ends supervisord, and with it every process of the container, this one included."""
    log.event("container.down", reason=reason)
    # What we write goes through supervisord: it gets a moment to pass that on.
    unread, deadline = array.array("i", [1]), time.monotonic() + _LAST_WORD_S
    while unread[0] and time.monotonic() < deadline:
        time.sleep(0.01)
        with contextlib.suppress(OSError):  # no pipe
            fcntl.ioctl(sys.stderr.fileno(), termios.FIONREAD, unread)
    os.kill(_supervisor(), signal.SIGKILL)
    sys.exit(1)


def _connect_to_watcher() -> socket.socket:
    path = os.fspath(_directory() / _WATCHER_SOCKET)
    deadline = time.monotonic() + _WATCHER_S
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
        except OSError:
            connection.close()
            if time.monotonic() > deadline:
                _kill_container("no-watcher")
            time.sleep(0.05)
        else:
            return connection


if __name__ == "__main__":
    main()
