"""Whoever accepts a connection can tell whether somebody waits for what it starts."""

import asyncio
import socket
from pathlib import Path

import pytest

from tie.daemon import ahead

DEADLINE_S = 20.0


@pytest.mark.parametrize("early", [False, True])
async def test_the_accepting_side_knows_before_a_byte_has_come(tmp_path: Path, early: bool) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen()
        async with asyncio.timeout(DEADLINE_S):
            several = [await ahead.connect(tmp_path / "s", ahead=early) for _ in range(3)]
            for _, writer in several:
                accepted, _ = listening.accept()
                with accepted:
                    assert ahead.is_ahead(accepted) is early
                writer.transport.abort()


async def test_a_connection_that_fails_leaves_nothing(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(FileNotFoundError):
        await ahead.connect(tmp_path / "nothing", ahead=True)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_other_sockets_are_not_meant() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not ahead.is_ahead(ours)
    with socket.socket(socket.AF_UNIX) as lonely:
        assert not ahead.is_ahead(lonely)
