"""A node that cannot serve says so before it has read anything, and serves again as soon as it can."""

import asyncio

import pytest

from edge_requests import HELLO, SOON_S, ask, echo, post, session, silent
from tie.device import AsyncClient
from tie.device.errors import NodeBusyError
from tie.proto import cloudboard_pb2


async def test_busy_before_any_of_the_body_is_read(edge, client) -> None:
    await ask(client)
    served = len(edge.served)
    await edge.report(cloudboard_pb2.STATE_BUSY)
    with pytest.raises(NodeBusyError):
        await ask(client)
    # The reply comes while the request has not been sent: nothing of it can have been read.
    async with edge.connection() as (reader, writer):
        writer.write(b"POST /v1/requests HTTP/1.1\r\nhost: node\r\ncontent-length: 100000\r\n\r\n")
        async with asyncio.timeout(10):
            head = await reader.readuntil(b"\r\n\r\n")
    assert b"503" in head.split(b"\r\n")[0]
    assert b"retry-after: 1" in head
    assert len(edge.served) == served
    await edge.report(cloudboard_pb2.STATE_AVAILABLE)
    assert await ask(client) == "hello there "


async def test_no_pair_stands_by_while_busy(edge, client) -> None:
    await edge.until(lambda: len(edge.runs) == 1)
    await edge.report(cloudboard_pb2.STATE_BUSY)
    await edge.until(lambda: all(process.poll() is not None for process in edge.jobhelpers))


async def test_a_request_in_flight_finishes_when_the_node_turns_busy(edge, client) -> None:
    release = edge.hold()
    answer = await client.chat(HELLO, model="m")
    pieces = aiter(answer)
    assert (await anext(pieces)).text == "one "
    await edge.report(cloudboard_pb2.STATE_BUSY)
    assert edge.acks[-1].in_flight == 1
    release.set()
    assert (await anext(pieces)).text == "two"
    assert (await answer.result()).text == "one two"
    await edge.until(lambda: edge.acks[-1].in_flight == 0)


async def test_a_broken_attach_stream_withdraws_the_node(edge, client) -> None:
    await edge.until(lambda: len(edge.runs) == 1)
    edge.withdraw()
    await edge.until(lambda: all(process.poll() is not None for process in edge.jobhelpers), SOON_S)
    with pytest.raises(NodeBusyError):
        await ask(client)
    await edge.attach()
    await edge.report(cloudboard_pb2.STATE_AVAILABLE)
    await edge.until(lambda: len(edge.runs) == 2)  # who hears of it fills the pool
    assert await ask(client) == "hello there "


async def test_more_at_once_than_allowed(make_edge) -> None:
    edge = await make_edge(max_in_flight=1)
    edge.behaviour = silent
    async with AsyncClient(edge.url, edge.statement_key) as client:
        answer = await client.chat(HELLO, model="m")
        with pytest.raises(NodeBusyError):
            await ask(client)
        await answer.close()
        edge.behaviour = echo
        await edge.metric("tie_cloudboard_in_flight 0.0")
        assert await ask(client) == "hello there "


async def test_a_new_key_is_fetched_once(edge, client) -> None:
    first = await client.node()
    await ask(client)
    await edge.stop_kps()
    await edge.start_kps()
    assert await ask(client) == "hello there "
    assert (await client.node()).public.key_id != first.public.key_id


async def test_without_a_key_service_nothing_is_accepted(edge, client) -> None:
    await client.node()
    body = (await session(client)).body
    await edge.stop_kps()
    with pytest.raises(NodeBusyError):
        await ask(client)
    reply = await post(edge, body)
    assert (reply.status_code, reply.json()["error"]) == (503, "unavailable")
    assert not edge.served
    await edge.start_kps()
    assert await ask(client) == "hello there "
