"""What a node's log says while a test waits for it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from tie.cli.local_node import LocalNode

SAVED = "app.conversation-saved"
CACHED = "app.request-cached"
DEADLINE_S = 30.0


@contextlib.asynccontextmanager
async def logged(
    node: LocalNode, event: str = SAVED, *, times: int = 1, deadline: float = DEADLINE_S
) -> AsyncIterator[None]:
    """Waits at the block's end until the node has logged `event` so many times since its beginning.

    A node files a conversation after it has answered: whoever asks earlier finds less of it.

    Raises:
        TimeoutError: it has not.
    """
    before = node.log_text().count(event)
    yield
    async with asyncio.timeout(deadline):
        while node.log_text().count(event) < before + times:
            await asyncio.sleep(0.02)
