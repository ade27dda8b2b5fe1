"""Listens on this machine, serves until asked to stop, and stops in order."""

import asyncio
import socket
from typing import Final

from tie.device.async_client import AsyncClient
from tie.device.proxy.handler import Handler, Settings, replies
from tie.http.limits import Limits
from tie.http.server import Server

# Tools keep their connections for a while; nobody here is far away.
LIMITS: Final = Limits(all_streams=512, idle_s=300.0, linger_s=5.0)


async def serve(client: AsyncClient, settings: Settings, listening: socket.socket, stopping: asyncio.Event) -> None:
    """Serves the API on `listening` until `stopping` is set.

    Answers under way then have a few seconds to end; after that their connections are closed.
    """
    async with client:
        await Server(Handler(client, settings), LIMITS, replies).serve(listening, stopping)
