"""One thing done, several that may end it."""

import asyncio

import pytest

from tie.app.racing import unless


async def ends(value: str) -> str:
    await asyncio.sleep(0)
    return value


async def fails(text: str) -> None:
    await asyncio.sleep(0)
    raise ValueError(text)


async def waits(log: list[str], name: str, begun: asyncio.Barrier | None = None) -> None:
    try:
        if begun is not None:
            await begun.wait()
        await asyncio.sleep(3600)
    finally:
        log.append(name)


async def test_the_work_s_result_counts_and_the_watchers_are_cancelled():
    log: list[str] = []
    assert await unless(ends("done"), waits(log, "a"), waits(log, "b")) == "done"
    assert sorted(log) == ["a", "b"]


async def test_a_watcher_that_raises_ends_the_work():
    log: list[str] = []
    with pytest.raises(ValueError, match="first"):
        await unless(waits(log, "work"), fails("first"), fails("second"))
    assert log == ["work"]


async def test_work_that_ends_at_the_same_moment_counts():
    assert await unless(ends("done"), fails("late")) == "done"


async def test_cancelling_the_whole_cancels_its_parts():
    log: list[str] = []
    begun = asyncio.Barrier(3)
    task = asyncio.create_task(unless(waits(log, "work", begun), waits(log, "watcher", begun)))
    await asyncio.wait_for(begun.wait(), 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(log) == ["watcher", "work"]
