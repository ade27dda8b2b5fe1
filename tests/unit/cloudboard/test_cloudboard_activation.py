"""A per-connection process takes descriptor 3 and nothing else."""

import os
import socket
import subprocess
import sys

import pytest

CHECK = (
    "from tie.daemon.activation import accepted_connection\n"
    "from tie.daemon.errors import ConfigError\n"
    "try:\n"
    "    connection = accepted_connection()\n"
    "except ConfigError as error:\n"
    "    print(error)\n"
    "else:\n"
    "    print(connection.fileno(), connection.get_inheritable(), connection.getblocking())\n"
)


def run(environment: str, stdin: object) -> str:
    shell = f'exec 3<&0 </dev/null; {environment} exec "$@"'
    command = ["sh", "-c", shell, "sh", sys.executable, "-c", CHECK]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("LISTEN_")}
    done = subprocess.run(command, stdin=stdin, env=clean, capture_output=True, text=True, check=True, timeout=60)  # type: ignore[call-overload]
    return str(done.stdout.strip())


def test_takes_the_connection() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert run("LISTEN_PID=$$ LISTEN_FDS=1", theirs) == "3 False False"


@pytest.mark.parametrize(
    "environment", ["", "LISTEN_PID=1 LISTEN_FDS=1", "LISTEN_PID=$$ LISTEN_FDS=2", "LISTEN_PID=$$"]
)
def test_started_otherwise(environment: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert run(environment, theirs) == "started without an accepted connection"


def test_not_a_connection() -> None:
    assert run("LISTEN_PID=$$ LISTEN_FDS=1", subprocess.DEVNULL) == "descriptor 3 is not a connected socket"
