"""A client of several nodes: another one gets the request only while nobody can have read anything of it."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from edge_requests import DEADLINE_S, HELLO, ask
from http_exchanges import PACE
from tie.cloudboard.replies import reply
from tie.device import AsyncClient, Client
from tie.device.errors import EnvelopeRefusedError, NodeBusyError, NodeFailedError, TruncatedError, UnreachableError
from tie.envelope.statement import StatementError
from tie.http.exchange import Exchange
from tie.http.limits import Limits
from tie.http.server import Server
from tie.proto import app_pb2, cloudboard_pb2

NOBODY = "http://127.0.0.1:1"


@pytest.fixture
async def pair(make_edge):
    """Two nodes of one fleet."""
    first = await make_edge(standby=0)
    return first, await make_edge(standby=0, fleet=first)


async def test_a_busy_node_is_passed_over_and_asked_last_from_then_on(pair) -> None:
    first, second = pair
    await first.report(cloudboard_pb2.STATE_BUSY)
    async with AsyncClient([first.url, second.url], first.statement_key) as client:
        assert await ask(client) == "hello there "
        await first.report(cloudboard_pb2.STATE_AVAILABLE)
        assert await ask(client) == "hello there "
        assert (len(first.served), len(second.served)) == (0, 2)
        await second.report(cloudboard_pb2.STATE_BUSY)
        assert await ask(client) == "hello there "
        assert (len(first.served), len(second.served)) == (1, 2)
        await first.report(cloudboard_pb2.STATE_BUSY)
        with pytest.raises(NodeBusyError):
            await ask(client)


async def test_a_node_that_is_not_there_is_passed_over(pair) -> None:
    first, _ = pair

    def synchronous() -> str:
        with Client([NOBODY, first.url], first.statement_key) as client:
            return "".join(delta.text for delta in client.chat(HELLO, model="m"))

    assert await asyncio.to_thread(synchronous) == "hello there "
    async with AsyncClient([NOBODY, first.url], first.statement_key) as client:
        assert await ask(client) == "hello there "
    async with AsyncClient([NOBODY, "http://127.0.0.1:2"], first.statement_key) as client:
        with pytest.raises(UnreachableError):
            await ask(client)


async def test_a_node_without_its_key_service_is_passed_over(pair) -> None:
    first, second = pair
    async with AsyncClient([first.url, second.url], first.statement_key) as client:
        await client.node()
        await first.stop_kps()
        assert await ask(client) == "hello there "
        assert (len(first.served), len(second.served)) == (0, 1)
    await first.start_kps()


async def _die(run) -> None:
    await run.request()
    await run.text("one ")
    run.writer.transport.abort()


async def _busy(run) -> None:
    await run.request()
    await run.done(app_pb2.STATUS_BUSY)


@pytest.mark.parametrize(("behaviour", "error"), [(_die, NodeFailedError), (_busy, NodeBusyError)])
async def test_what_an_app_has_read_goes_nowhere_else(pair, behaviour, error) -> None:
    first, second = pair
    first.behaviour = behaviour
    async with AsyncClient([first.url, second.url], first.statement_key) as client:
        with pytest.raises(error):
            await ask(client)
    assert not second.served


async def test_a_connection_that_breaks_after_the_request_was_sent_goes_nowhere_else(pair) -> None:
    """The node may have read it: here an ingress that gives a good statement, takes requests and says nothing."""
    first, second = pair

    async def swallow(exchange: Exchange) -> None:
        del exchange
        raise ConnectionAbortedError

    async with played(first, swallow) as url, AsyncClient([url, second.url], first.statement_key) as client:
        with pytest.raises((UnreachableError, TruncatedError)) as failed:
            await ask(client)
        assert isinstance(failed.value, TruncatedError) or failed.value.sent
    assert not second.served


async def test_a_node_that_has_another_key_each_time_is_passed_over(pair) -> None:
    """It cannot have opened anything."""
    first, second = pair
    codes: list[str] = []

    async def refuse(exchange: Exchange) -> None:
        async for _ in exchange.chunks(PACE):
            pass
        await exchange.reply(reply(codes[-1]))

    async with played(first, refuse) as url, AsyncClient([url, second.url], first.statement_key) as client:
        codes.append("refused")
        with pytest.raises(EnvelopeRefusedError):
            await ask(client)
        assert not second.served
        codes.append("unknown_key")
        assert await ask(client) == "hello there "
        assert len(second.served) == 1


@contextlib.asynccontextmanager
async def played(edge, post) -> AsyncIterator[str]:
    """The address of an ingress that gives the statements of `edge`; `post` has the exchanges of requests."""

    async def handle(exchange: Exchange) -> None:
        if exchange.method != "GET":
            await post(exchange)
            return
        async with AsyncClient(edge.url, edge.statement_key) as client:
            data = await client._get(client._nodes.first, exchange.path)
        await exchange.start("application/x-protobuf")
        await exchange.write(data)
        await exchange.finish()

    stopping = asyncio.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = asyncio.create_task(Server(handle, Limits(), reply).serve(listening, stopping))
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            stopping.set()
            async with asyncio.timeout(DEADLINE_S):
                await serving


async def test_a_node_of_another_fleet_is_an_error_and_not_passed_over(make_edge) -> None:
    first, second = await make_edge(standby=0), await make_edge(standby=0)
    async with AsyncClient([first.url, second.url], second.statement_key) as client:
        with pytest.raises(StatementError):
            await ask(client)
