"""Asks a node as its users do: with the device's real client, over the whole sealed path."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tie.cli import asking
from tie.cli.bench_load import Call, Heard, Usage
from tie.device.async_client import AsyncClient


class NodeTarget:
    """A node's ingress, and behind it job helpers, apps and the runtime."""

    def __init__(self, client: AsyncClient, model: str) -> None:
        self._client = client
        self._model = model

    async def ask(self, call: Call, heard: Heard) -> Usage:
        """See `bench_load.Target`. A piece is a delta: whatever text came within one tick of the app's clock."""
        answer = await self._client.chat(
            call.prompt.messages,
            model=self._model,
            max_tokens=call.max_tokens,
            temperature=call.temperature,
            seed=call.seed,
            ignore_eos=call.ignore_eos,
        )
        async with answer:
            async for delta in answer:
                if delta.text:
                    heard(time.monotonic(), 0)
            result = await answer.result()
        return Usage(result.prompt_tokens, result.completion_tokens)


@asynccontextmanager
async def node(whom: asking.Target) -> AsyncIterator[NodeTarget]:
    """The node that answers there.

    Raises:
        TieError: there is none, or it is not to be trusted.
    """
    async with AsyncClient(whom.url, whom.statement_key) as client:
        await client.node()
        yield NodeTarget(client, whom.model)
