"""What a node's log says while a test waits for it."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

from tie.cli.local_node import LocalNode

SAVED = "app.conversation-saved"
CACHED = "app.request-cached"
DEADLINE_S = 30.0


def apps(node: LocalNode, event: str) -> set[int]:
    """The processes of requests that have logged `event`."""
    return {json.loads(line)["pid"] for line in node.log_text().splitlines() if f'"{event}"' in line}


@contextlib.asynccontextmanager
async def logged(
    node: LocalNode, event: str = SAVED, *, times: int = 1, deadline: float = DEADLINE_S
) -> AsyncIterator[None]:
    """Waits at the block's end until so many of the requests answered in it have logged `event`.

    A node files a conversation after it has answered: whoever asks earlier finds less of it. Requests answered before
    the block may still be filing theirs: they have said "app.done", which an app does before its answer ends.

    Raises:
        TimeoutError: they have not.
    """
    before = apps(node, "app.done")
    yield
    async with asyncio.timeout(deadline):
        while len(apps(node, event) - before) < times:
            await asyncio.sleep(0.02)
