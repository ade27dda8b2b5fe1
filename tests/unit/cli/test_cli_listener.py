"""`Accept=yes` under `tie up`: one process for each connection, the connection as descriptor 3."""

import asyncio
import os
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tie.cli import listener as listener_module
from tie.cli.listener import Listener, keep_open
from tie.daemon import ahead
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


async def test_what_is_started_ahead_of_need_stands_back_and_nothing_else() -> None:
    async with asyncio.timeout(DEADLINE), listening() as (_, path):
        mine = os.getpriority(os.PRIO_PROCESS, 0)
        for before, niceness in ((False, mine), (True, min(19, mine + 19))):
            reader, writer = await ahead.connect(path, ahead=before)
            pid = int(await reader.readline())
            assert os.getpriority(os.PRIO_PROCESS, pid) == niceness
            writer.close()


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


async def test_a_socket_that_cannot_be_opened_anew_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "_HEAL_S", 0.01)
    said: asyncio.Queue[str] = asyncio.Queue()
    tries: asyncio.Queue[None] = asyncio.Queue()
    async with asyncio.timeout(DEADLINE), listening() as (listener, path):
        heal = listener.heal
        monkeypatch.setattr(listener, "heal", lambda: (tries.put_nowait(None), heal())[1])
        keeping = asyncio.create_task(keep_open([listener], lambda _, text: said.put_nowait(text)))
        shutil.rmtree(path.parent)
        path.parent.touch()  # in the way of the folder
        assert "cannot be opened anew" in await said.get()
        for _ in range(tries.qsize() + 3):
            await tries.get()
        assert said.empty()  # the same trouble is said once
        path.parent.unlink()
        assert "opened anew" in await said.get()
        reader, writer = await asyncio.open_unix_connection(path)
        assert int(await reader.readline())
        writer.close()
        keeping.cancel()


async def test_a_socket_that_cannot_be_opened_anew_holds_nothing_and_stops() -> None:
    async with asyncio.timeout(DEADLINE), listening() as (listener, path):
        shutil.rmtree(path.parent)
        path.parent.touch()
        open_before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(3):
            with pytest.raises(OSError, match=r"exists|Not a directory"):
                listener.heal()
        assert len(list(Path("/proc/self/fd").iterdir())) == open_before - 2  # the socket and its lock
        await listener.stop(0.2)
