"""Pieces that are handed on together: at once without a time, all within it with one, an error after them."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tie.device.proxy.gathering import Gatherer

DEADLINE_S = 20.0
LONG_S = 60.0  # longer than any test may take: only the source's end cuts it short


class Source:
    """Pieces that come when a test says so: `allowed` of them, then nothing until more are allowed."""

    def __init__(self, *pieces: str, error: Exception | None = None) -> None:
        self.steps = asyncio.Semaphore(0)
        self.waiting = asyncio.Event()  # for a step that has not been allowed yet
        self.ended = asyncio.Event()
        self._pieces = pieces
        self._error = error

    async def read(self) -> AsyncIterator[str]:
        for piece in self._pieces:
            if self.steps.locked():
                self.waiting.set()
            await self.steps.acquire()
            self.waiting.clear()
            yield piece
        self.ended.set()
        if self._error is not None:
            raise self._error

    def allow(self, count: int) -> None:
        for _ in range(count):
            self.steps.release()


async def test_without_a_time_nothing_waits_for_what_may_come() -> None:
    source = Source("a", "b", "c")
    async with asyncio.timeout(DEADLINE_S), Gatherer(source.read(), 0.0) as lists:
        for piece in ("a", "b"):
            await source.waiting.wait()
            source.allow(1)
            assert await anext(lists) == [piece]
        source.allow(1)
        assert [pieces async for pieces in lists] == [["c"]]


async def test_without_a_time_what_is_there_goes_together() -> None:
    source = Source("a", "b", "c", "d")
    source.allow(3)
    async with asyncio.timeout(DEADLINE_S), Gatherer(source.read(), 0.0) as lists:
        await source.waiting.wait()
        assert await anext(lists) == ["a", "b", "c"]


async def test_with_a_time_the_pieces_of_a_source_that_ends_within_it_are_one_list() -> None:
    source = Source("a", "b", "c")
    async with asyncio.timeout(DEADLINE_S), Gatherer(source.read(), LONG_S) as lists:
        first = asyncio.ensure_future(anext(lists))
        for _ in range(3):
            await source.waiting.wait()
            assert not first.done()
            source.waiting.clear()
            source.allow(1)
        assert await first == ["a", "b", "c"]
        assert [pieces async for pieces in lists] == []


async def test_a_time_that_is_over_ends_a_list() -> None:
    source = Source("a", "b")
    source.allow(1)
    async with asyncio.timeout(DEADLINE_S), Gatherer(source.read(), 0.001) as lists:
        assert await anext(lists) == ["a"]  # the source stays blocked
        source.allow(1)
        assert [pieces async for pieces in lists] == [["b"]]


@pytest.mark.parametrize("seconds", [0.0, LONG_S])
async def test_an_error_comes_after_the_pieces_before_it(seconds: float) -> None:
    source = Source("a", "b", error=ValueError("broken off"))
    source.allow(2)
    async with asyncio.timeout(DEADLINE_S), Gatherer(source.read(), seconds) as lists:
        await source.ended.wait()
        assert await anext(lists) == ["a", "b"]
        with pytest.raises(ValueError, match="broken off"):
            await anext(lists)


async def test_leaving_early_ends_the_reading() -> None:
    source = Source("a", "b")
    source.allow(1)
    ended = asyncio.Event()

    async def read() -> AsyncIterator[str]:
        try:
            async for piece in source.read():
                yield piece
        finally:
            ended.set()

    async with asyncio.timeout(DEADLINE_S):
        async with Gatherer(read(), 0.0) as lists:
            assert await anext(lists) == ["a"]
        assert ended.is_set()
