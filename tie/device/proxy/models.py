"""Which models may be asked for: those that the user named, or those of a node, which may serve others later."""

import asyncio
import math
import time
from collections.abc import Callable
from typing import Final

from tie.daemon import log
from tie.daemon.errors import TieError

INTERVAL_S: Final = 10.0  # what is known is taken for right as long as that


class Models:
    """The ids of the models, as they were last learned.

    Args:
        names: those known at the beginning.
        learn: how to learn them anew, called in a thread; None where they are the user's choice. While it raises a
            `TieError`, those that were known stay.
        interval_s: after how many seconds that is due without an occasion.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        learn: Callable[[], tuple[str, ...]] | None = None,
        *,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._names = names
        self._learn = learn
        self._interval_s = interval_s
        self._learned = time.monotonic()

    def doubt(self) -> None:
        """Something said that what is known is right no more: it is learned anew before it is used again."""
        self._learned = -math.inf

    async def names(self) -> tuple[str, ...]:
        """All of them."""
        if self._learn is not None and time.monotonic() - self._learned >= self._interval_s:
            self._learned = time.monotonic()
            try:
                self._names = await asyncio.to_thread(self._learn)
            except TieError as error:  # the node is away, or just being given another bundle
                log.failure("proxy.models-unknown", error)
        return self._names

    async def known(self, name: str) -> tuple[bool, tuple[str, ...]]:
        """Whether one may be asked for, and all of those that may."""
        if name not in await self.names():
            self.doubt()
        names = await self.names()
        return name in names, names
