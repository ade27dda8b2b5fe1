"""The user's side: seals a request to a node, opens its answer. Needs the base installation only."""

from tie.device.async_client import AsyncClient
from tie.device.client import Client

__all__ = ["AsyncClient", "Client"]
