"""`Accept=yes` under `tie up`: one process for each connection, the connection as descriptor 3."""

import asyncio
import os
import socket
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tie.cli.listener import Listener
from tie.daemon.socket_path import SocketInUseError

DEADLINE = 20.0
# Says who it is and whether it was activated as systemd would, then waits for the other side to say goodbye.
PROGRAM = """
import os
from tie.daemon.activation import accepted_connection
connection = accepted_connection()
connection.setblocking(True)
connection.sendall(f"{os.getpid()}\\n".encode())
connection.recv(1)
"""


@asynccontextmanager
async def listening(
    limit: int = 64, refused: Callable[[str], None] = lambda _: None
) -> AsyncIterator[tuple[Listener, Path]]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        path = Path(folder) / "edge" / "app.sock"
        listener = Listener(
            "app",
            path,
            [sys.executable, "-c", PROGRAM],
            environment=dict(os.environ),
            limit=limit,
            on_line=lambda _: lambda _: None,
            on_refused=refused,
        )
        listener.start()
        try:
            yield listener, path
        finally:
            await listener.stop(0.2)


async def test_every_connection_gets_its_own_process() -> None:
    async with asyncio.timeout(DEADLINE), listening() as (listener, path):
        streams = [await asyncio.open_unix_connection(path) for _ in range(3)]
        pids = [int(await reader.readline()) for reader, _ in streams]
        assert len(set(pids)) == 3
        assert listener.pids == set(pids)
        for _, writer in streams:
            writer.close()
        while listener.pids:
            await asyncio.sleep(0.01)


async def test_a_connection_over_the_limit_is_closed_at_once() -> None:
    refused: list[str] = []
    async with asyncio.timeout(DEADLINE), listening(1, refused.append) as (_, path):
        reader, first = await asyncio.open_unix_connection(path)
        await reader.readline()
        other, second = await asyncio.open_unix_connection(path)
        assert await other.read() == b""
        assert refused == ["app"]
        first.close()
        second.close()


async def test_stop_ends_instances_and_frees_the_path() -> None:
    async with asyncio.timeout(DEADLINE), listening() as (listener, path):
        reader, writer = await asyncio.open_unix_connection(path)
        pid = int(await reader.readline())
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        await listener.stop(5.0)
        assert not Path(f"/proc/{pid}").exists()
        assert not path.exists()
        writer.close()


async def test_a_live_path_is_not_taken_over() -> None:
    async with asyncio.timeout(DEADLINE), listening() as (_, path):
        second = Listener(
            "app", path, ["/bin/true"], environment={}, limit=1, on_line=lambda _: print, on_refused=print
        )
        with pytest.raises(SocketInUseError):
            second.start()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


async def test_a_socket_whose_file_is_gone_is_opened_anew() -> None:
    async with asyncio.timeout(DEADLINE), listening() as (listener, path):
        assert not listener.heal()
        path.unlink()
        assert listener.heal()
        reader, writer = await asyncio.open_unix_connection(path)
        assert int(await reader.readline())
        writer.close()
        assert not listener.heal()
