"""Several requests on one HTTP/2 connection do not harm one another."""

import asyncio

import httpx

from tie.device import AsyncClient
from tie.device.session import Session
from tie.proto import cloudboard_pb2, request_pb2


async def test_one_refused_upload_leaves_the_other_streams_alone(edge) -> None:
    release = edge.hold()

    async def slow_upload():
        # Still coming while the reply is already out.
        for _ in range(20):
            yield bytes(50_000)
            await asyncio.sleep(0.01)

    async with (
        AsyncClient(edge.url, edge.statement_key) as client,
        httpx.AsyncClient(base_url=edge.url, http1=False, http2=True, timeout=30) as http,
    ):
        request = request_pb2.InferenceRequest(model="m", prompt="hello")
        session = Session(await client.node(), request)
        async with http.stream("POST", "/v1/requests", content=session.body) as response:
            assert response.status_code == 200
            pieces = response.aiter_raw()
            texts = []
            while not texts:
                texts += [delta.text for delta in session.feed(await anext(pieces))]
            await edge.report(cloudboard_pb2.STATE_BUSY)
            reply = await http.post("/v1/requests", content=slow_upload())
            assert (reply.status_code, reply.json()["error"]) == (503, "busy")
            release.set()
            async for data in pieces:
                texts += [delta.text for delta in session.feed(data)]
        assert texts == ["one ", "two"]
        assert session.end().text == "one two"
