"""What is asked of an edge, and apps that answer too little."""

import httpx

from tie.device import AsyncClient
from tie.device.session import Session
from tie.proto import request_pb2

HELLO = [{"role": "user", "content": "hello there"}]
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


async def silent(run) -> None:
    """An app that takes its request and does not answer."""
    await run.request()
    run.aborted = (await run.next()) is not None


async def consume(run) -> None:
    """An app that answers nothing, well."""
    if await run.request() is not None:
        await run.done()
