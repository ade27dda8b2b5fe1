"""States of a node, and waiting for what a peer sees."""

import asyncio
from collections.abc import Callable

from tie.proto import control_pb2

AVAILABLE = control_pb2.STATE_AVAILABLE
ERROR = control_pb2.STATE_ERROR
MAINTENANCE = control_pb2.STATE_MAINTENANCE


async def eventually(condition: Callable[[], bool], timeout: float = 30.0) -> None:
    """Waits for what a peer sees."""
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.02)


def states(status: control_pb2.NodeStatus) -> list[str]:
    """The states that a node has come to, oldest first."""
    return [control_pb2.State.Name(event.to).removeprefix("STATE_").lower() for event in status.events]
