"""Pieces that come within a short time of one another, handed on together: fewer writes, for those who pay for each."""

import asyncio
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Gatherer(Generic[T]):
    """Reads `source` ahead.

    async with Gatherer(answer, 0.1) as gathered:
        async for pieces in gathered: ...

    Args:
        source: whose errors come out of the iteration, after what came before them.
        seconds: from the first piece of a list to its end; zero takes what is there.
    """

    def __init__(self, source: AsyncIterator[T], seconds: float) -> None:
        self._source = source
        self._seconds = seconds
        self._pieces: list[T] = []
        self._changed = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None

    async def __aenter__(self) -> AsyncIterator[list[T]]:
        self._reading = asyncio.create_task(self._read())
        self._reading.add_done_callback(lambda _: self._changed.set())
        return self._lists(self._reading)

    async def __aexit__(self, *_: object) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
            if not self._reading.cancelled():
                self._reading.exception()  # whoever left early does not want to know

    async def _read(self) -> None:
        async for piece in self._source:
            self._pieces.append(piece)
            self._changed.set()

    async def _lists(self, reading: "asyncio.Task[None]") -> AsyncIterator[list[T]]:
        while True:
            if not self._pieces:
                await self._changed.wait()
            if self._pieces and self._seconds and not reading.done():
                await asyncio.wait([reading], timeout=self._seconds)
            self._changed.clear()
            pieces, self._pieces = self._pieces, []
            if pieces:
                yield pieces
            elif reading.done():
                reading.result()
                return
            if reading.done():
                self._changed.set()
