"""What is asked of an edge, played apps that answer, and a proxy before it."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import httpx

from tie.device import AsyncClient
from tie.device.proxy.handler import Settings
from tie.device.proxy.models import Models
from tie.device.proxy.service import serve
from tie.device.session import Session
from tie.proto import request_pb2

HELLO = [{"role": "user", "content": "hello there"}]
DEADLINE_S = 60.0
SOON_S = 5.0  # the design promises 2; a loaded test machine may stop for a moment


async def ask(client: AsyncClient) -> str:
    """The answer to a short question."""
    return (await (await client.chat(HELLO, model="m")).result()).text


async def session(client: AsyncClient, text: str = "hello there") -> Session:
    """A sealed request that has not been sent."""
    request = request_pb2.InferenceRequest(model="m")
    request.messages.add(role="user").parts.add(text=text)
    return Session(await client.node(), request)


async def post(edge, content) -> httpx.Response:
    """Sends a body as it is."""
    async with httpx.AsyncClient(base_url=edge.url, http1=False, http2=True, timeout=30) as http:
        return await http.post("/v1/requests", content=content)


@contextlib.asynccontextmanager
async def proxied(client: AsyncClient, *, models: Models | None = None, **settings) -> AsyncIterator[str]:
    """The address of a proxy that asks with `client`; the keyword arguments are what its user chose."""
    stopping = asyncio.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        chosen = Settings(models=models or Models(("m",)), **settings)
        serving = asyncio.create_task(serve(client, chosen, listening, stopping))
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            stopping.set()
            async with asyncio.timeout(DEADLINE_S):
                await serving


async def echo(run) -> None:
    """An app that answers with the text of the request's first message, word by word."""
    request = await run.request()
    if request is None:
        return
    for word in request.messages[0].parts[0].text.split():
        await run.text(word + " ")
    await run.done()


async def silent(run) -> None:
    """An app that takes its request and does not answer."""
    await run.request()
    run.aborted = (await run.next()) is not None


async def consume(run) -> None:
    """An app that answers nothing, well."""
    if await run.request() is not None:
        await run.done()
