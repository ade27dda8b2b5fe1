"""A daemon that has lost a socket's file ends, so that another makes it anew."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tie.daemon import service
from tie.daemon.service import Lifetime
from tie.daemon.socket_path import identity

DEADLINE_S = 10.0


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[list[Path]]:
    """Two sockets."""
    with ExitStack() as stack:
        paths = [tmp_path / "a.sock", tmp_path / "b.sock"]
        for path in paths:
            stack.enter_context(socket.socket(socket.AF_UNIX)).bind(str(path))
        yield paths


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[Path]:
    """Every look at a socket's file, as it is made; the looks follow one another at once."""
    looks: asyncio.Queue[Path] = asyncio.Queue()

    def noted(path: Path) -> tuple[int, int] | None:
        looks.put_nowait(path)
        return identity(path)

    monkeypatch.setattr(service, "identity", noted)
    monkeypatch.setattr(service, "_LOOK_S", 0.001)
    return looks


async def until_looked(looks: asyncio.Queue[Path], paths: list[Path], times: int) -> None:
    """Waits for the look with which the daemon begins, and for as many after it."""
    async with asyncio.timeout(DEADLINE_S):
        assert [await looks.get() for _ in range((1 + times) * len(paths))] == paths * (1 + times)


@pytest.mark.parametrize("loss", ["removed", "replaced"])
async def test_a_lost_socket_ends_the_daemon(paths: list[Path], looks: asyncio.Queue[Path], loss: str) -> None:
    lifetime = Lifetime("test")
    lifetime.ready(*paths)
    await until_looked(looks, paths, 1)
    assert not lifetime.stopping.is_set()
    paths[1].rename(paths[1].with_suffix(".old"))  # so that the new file is another
    if loss == "replaced":
        paths[1].touch()
    async with asyncio.timeout(DEADLINE_S):
        await lifetime.stopping.wait()


async def test_sockets_that_stay_change_nothing(paths: list[Path], looks: asyncio.Queue[Path]) -> None:
    lifetime = Lifetime("test")
    lifetime.ready(*paths)
    await until_looked(looks, paths, 3)
    assert not lifetime.stopping.is_set()
    lifetime.stop()
    await asyncio.sleep(0)
