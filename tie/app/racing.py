"""Doing one thing while several others may end it."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def unless(work: Coroutine[Any, Any, T], *watchers: Coroutine[Any, Any, None]) -> T:
    """The result of `work`, unless a watcher raises first; what is still running then is cancelled.

    A watcher ends by raising; when several end at once, `work` counts first and then the watchers in order.
    """
    main = asyncio.ensure_future(work)
    tasks: list[asyncio.Future[Any]] = [main, *(asyncio.ensure_future(watcher) for watcher in watchers)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done() and (task is main or task.exception() is not None):
                task.result()
                break
        return await main
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
