"""Clients that are slow, silent, greedy or gone: the node serves the others meanwhile."""

import asyncio
import contextlib
import resource
import sys

import httpx
import pytest

from edge_requests import ask
from tie.daemon.config import AppConfig
from tie.device import AsyncClient
from tie.device.errors import NodeBusyError
from tie.device.session import Session
from tie.proto import cloudboard_pb2, request_pb2

UPLOAD = b"POST /v1/requests HTTP/1.1\r\nhost: node\r\ncontent-length: 100000\r\n\r\n"


async def test_uploads_that_never_end_hold_no_places(make_edge) -> None:
    edge = await make_edge(max_in_flight=1)
    async with AsyncClient(edge.url, edge.statement_key) as client, contextlib.AsyncExitStack() as stack:
        for _ in range(50):
            _, writer = await stack.enter_async_context(edge.connection())
            writer.write(UPLOAD + b"\0")
        await edge.metric("tie_cloudboard_connections 50.0")
        await edge.metric("tie_cloudboard_in_flight 0.0")
        assert await ask(client) == "hello there "


async def test_uploads_have_their_memory_and_no_more(make_edge) -> None:
    edge = await make_edge(upload_bytes=32 * 1024 * 1024, app=AppConfig(max_request_bytes=24 * 1024 * 1024))
    async with AsyncClient(edge.url, edge.statement_key) as client, contextlib.AsyncExitStack() as stack:
        request = request_pb2.InferenceRequest(model="m", prompt="x" * 12_000_000)
        body = Session(await client.node(), request).body
        for _ in range(3):  # of the node's 32 MiB each takes 12 and stops there
            _, writer = await stack.enter_async_context(edge.connection())
            writer.write(b"POST /v1/requests HTTP/1.1\r\nhost: node\r\ncontent-length: %d\r\n\r\n" % len(body))
            writer.write(body[:12_000_000])
        await edge.metric('tie_cloudboard_requests_total{code="busy"} 1.0')
        with pytest.raises(NodeBusyError):
            await client.send(request)
        assert await ask(client) == "hello there "
    await edge.metric("tie_cloudboard_upload_bytes 0.0")


async def test_an_upload_under_way_when_the_node_turns_busy_is_not_opened(edge, client) -> None:
    await edge.until(lambda: len(edge.runs) == 1)
    body = Session(await client.node(), request_pb2.InferenceRequest(model="m", prompt="hello")).body
    async with edge.connection() as (reader, writer):
        writer.write(b"POST /v1/requests HTTP/1.1\r\nhost: node\r\ncontent-length: %d\r\n\r\n" % len(body))
        writer.write(body[:-5])
        await edge.metric(f"tie_cloudboard_upload_bytes {(len(body) - 5) * 9 // 8}.0")
        await edge.report(cloudboard_pb2.STATE_BUSY)
        assert edge.acks[-1].in_flight == 0
        writer.write(body[-5:])
        async with asyncio.timeout(30):
            head = await reader.readuntil(b"\r\n\r\n")
        assert b" 503 " in head.split(b"\r\n")[0]
    assert not edge.served
    await edge.report(cloudboard_pb2.STATE_AVAILABLE)
    assert await ask(client) == "hello there "


async def test_malformed_http_is_answered_as_documented(edge) -> None:
    async with edge.connection() as (reader, writer):
        writer.write(b"nonsense\r\n\r\n")
        async with asyncio.timeout(30):
            data = await reader.read()
    assert data.startswith(b"HTTP/1.1 400 ")
    assert b"content-type: application/json" in data
    assert b'{"error":"bad_request","message":"' in data


@pytest.mark.parametrize("close", ["stream", "connection", "half"])
async def test_whoever_goes_away_stops_the_app(edge, client, close: str) -> None:
    told = asyncio.Event()

    async def watch(run) -> None:
        await run.request()
        await run.text("one ")
        message = await run.next()
        assert message is None or message.HasField("abort")
        told.set()

    edge.behaviour = watch
    body = Session(await client.node(), request_pb2.InferenceRequest(model="m", prompt="hello")).body
    if close == "stream":
        # A client that resets its stream and keeps its connection: the connection goes on.
        async with (
            httpx.AsyncClient(base_url=edge.url, http1=False, http2=True, timeout=30) as http,
            http.stream("POST", "/v1/requests", content=body) as response,
        ):
            assert response.status_code == 200
            await anext(response.aiter_raw())
            connection = response.extensions["network_stream"]
            (h2_state,) = [one._connection._h2_state for one in http._transport._pool.connections]
            h2_state.reset_stream(response.extensions["stream_id"], 8)
            await connection.write(h2_state.data_to_send())
            async with asyncio.timeout(30):
                await told.wait()
        return
    async with edge.connection() as (reader, writer):
        writer.write(b"POST /v1/requests HTTP/1.1\r\nhost: node\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        async with asyncio.timeout(30):
            await reader.readuntil(b"\r\n\r\n")
            if close == "half":
                writer.write_eof()
                await told.wait()
    async with asyncio.timeout(30):
        await told.wait()


async def test_a_client_that_stops_reading_holds_up_nobody(edge, client) -> None:
    stopped = asyncio.Event()

    async def pour(run) -> None:
        request = await run.request()
        if request.prompt != "pour":
            await run.text("hello there ")
            await run.done()
            return
        try:
            while True:
                await run.text("x" * 10_000)
        finally:
            stopped.set()

    edge.behaviour = pour
    body = Session(await client.node(), request_pb2.InferenceRequest(model="m", prompt="pour")).body
    async with edge.connection() as (reader, writer):
        writer.write(b"POST /v1/requests HTTP/1.1\r\nhost: node\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        async with asyncio.timeout(30):
            await reader.readuntil(b"\r\n\r\n")
        reader._transport.pause_reading()
        assert await ask(client) == "hello there "
    async with asyncio.timeout(30):
        await stopped.wait()


HOLD = """
import resource, socket, sys
port, count = int(sys.argv[1]), int(sys.argv[2])
beginnings = (b"", b"GET / HT", b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n\\0\\0\\0\\4\\0\\0\\0\\0\\0")
held = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
for number, one in enumerate(held):
    one.sendall(beginnings[number % 3])
print("held", flush=True)
sys.stdin.read()
"""


async def test_ten_thousand_idle_connections(edge, client) -> None:
    """Silent ones, half a request's head, HTTP/2 without a request; or as many as the limit on open files allows."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    count = min(10_000, files - 1000)
    holder = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", HOLD, str(edge.config.cloudboard.port), str(count)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(60):
            assert await holder.stdout.readline() == b"held\n"
        await edge.metric(f"tie_cloudboard_connections {count}.0")
        assert await ask(client) == "hello there "
    finally:
        holder.stdin.close()
        async with asyncio.timeout(60):
            await holder.wait()
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    await edge.metric("tie_cloudboard_connections 0.0")
