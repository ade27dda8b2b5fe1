"""A daemon that has lost a socket's file ends, so that another makes it anew."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tie.daemon.service import Lifetime


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[list[Path]]:
    """Two sockets."""
    with ExitStack() as stack:
        paths = [tmp_path / "a.sock", tmp_path / "b.sock"]
        for path in paths:
            stack.enter_context(socket.socket(socket.AF_UNIX)).bind(str(path))
        yield paths


@pytest.mark.parametrize("loss", ["removed", "replaced"])
async def test_a_lost_socket_ends_the_daemon(paths: list[Path], loss: str) -> None:
    lifetime = Lifetime("test")
    lifetime.ready(*paths)
    await asyncio.sleep(0.05)
    assert not lifetime.stopping.is_set()
    paths[1].rename(paths[1].with_suffix(".old"))  # so that the new file is another
    if loss == "replaced":
        paths[1].touch()
    async with asyncio.timeout(10):
        await lifetime.stopping.wait()


async def test_sockets_that_stay_change_nothing(paths: list[Path]) -> None:
    lifetime = Lifetime("test")
    lifetime.ready(*paths)
    await asyncio.sleep(1.2)
    assert not lifetime.stopping.is_set()
    lifetime.stop()
    await asyncio.sleep(0)
