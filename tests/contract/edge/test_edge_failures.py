"""Whatever dies, lies or stops on the way: a clear error, soon, and the next request is served."""

import asyncio
import time

import pytest

from edge_requests import HELLO, SOON_S, ask, consume, session, silent
from tie.daemon.config import AppConfig
from tie.daemon.errors import PeerTimeoutError
from tie.device import AsyncClient
from tie.device.errors import (
    EnvelopeRefusedError,
    NodeFailedError,
    RequestRefusedError,
    TruncatedError,
    UnreachableError,
)
from tie.envelope.frames import frame
from tie.envelope.sealing import PrivateKey
from tie.envelope.statement import NodeKey, StatementError
from tie.proto import app_pb2


async def test_the_app_dies_in_mid_stream(edge, client) -> None:
    async def die(run) -> None:
        await run.request()
        await run.text("one ")
        run.writer.transport.abort()

    edge.behaviour = die
    answer = await client.chat(HELLO, model="m")
    begun = time.monotonic()
    with pytest.raises(NodeFailedError, match="process that served the request ended") as failed:
        await answer.result()
    assert time.monotonic() - begun < SOON_S
    assert failed.value.status == "STATUS_APP_DIED"


async def test_the_app_dies_while_the_request_comes_in(edge, client) -> None:
    async def die(run) -> None:
        await run.next()
        run.writer.transport.abort()

    edge.behaviour = die
    with pytest.raises(NodeFailedError, match="process that served the request ended"):
        await (await client.chat([{"role": "user", "content": "x" * 3_000_000}], model="m")).result()


async def test_the_jobhelper_dies_in_mid_stream(edge, client) -> None:
    async def linger(run) -> None:
        await run.request()
        await run.text("one ")
        await run.next()

    edge.behaviour = linger
    answer = await client.chat(HELLO, model="m")
    assert (await anext(aiter(answer))).text == "one "
    begun = time.monotonic()
    for process in edge.jobhelpers:
        process.kill()
    with pytest.raises(TruncatedError):
        await answer.result()
    assert time.monotonic() - begun < SOON_S
    edge.behaviour = consume
    await ask(client)


async def test_a_pair_that_dies_standing_by_is_replaced(edge, client) -> None:
    await edge.until(lambda: len(edge.runs) == 1)
    edge.jobhelpers[0].kill()
    await edge.until(lambda: len(edge.runs) == 2)
    edge.runs[1].writer.transport.abort()
    await edge.until(lambda: len(edge.runs) == 3)
    assert await ask(client) == "hello there "


async def test_a_pair_that_dies_as_its_request_comes_costs_nothing(edge, client) -> None:
    await client.node()
    await _settled(edge)
    edge.jobhelpers[0].kill()  # and at once, before CloudBoard can have seen it:
    assert await ask(client) == "hello there "


async def test_an_app_that_dies_as_its_request_comes_costs_nothing(edge, client) -> None:
    await client.node()
    await _settled(edge)
    edge.runs[0].writer.transport.abort()
    assert await ask(client) == "hello there "


async def _settled(edge) -> None:
    """Waits until the pair that stands by is CloudBoard's to give."""
    await edge.metric("tie_cloudboard_standby 1.0")


async def test_the_device_goes_away_and_the_app_is_told(edge, client) -> None:
    told = asyncio.Event()

    async def watch(run) -> None:
        await run.request()
        await run.text("one ")
        message = await run.next()
        assert message is None or message.HasField("abort")
        told.set()

    edge.behaviour = watch
    answer = await client.chat(HELLO, model="m")
    assert (await anext(aiter(answer))).text == "one "
    await answer.close()
    async with asyncio.timeout(SOON_S):
        await told.wait()


async def test_a_frame_of_a_size_that_is_no_bucket_is_not_relayed(edge, client) -> None:
    async def leak(run) -> None:
        await run.request()
        await run.text("one ")
        payload = app_pb2.AppOut(delta=app_pb2.Delta(text="secret length")).SerializeToString()
        run.writer.write(frame(payload))
        await run.done()

    edge.behaviour = leak
    answer = await client.chat(HELLO, model="m")
    pieces = aiter(answer)
    assert (await anext(pieces)).text == "one "
    with pytest.raises(RequestRefusedError) as refused:
        await anext(pieces)
    assert refused.value.status == "STATUS_PROTOCOL_ERROR"


async def test_an_app_that_says_nothing(make_edge) -> None:
    edge = await make_edge(app=AppConfig(time_limit_s=600.0))
    edge.behaviour = silent
    async with AsyncClient(edge.url, edge.statement_key, silence_s=1.0) as client:
        with pytest.raises(PeerTimeoutError):
            await ask(client)


async def test_the_request_deadline(make_edge) -> None:
    edge = await make_edge(request_deadline_s=1.5)
    edge.behaviour = silent
    async with AsyncClient(edge.url, edge.statement_key) as client:
        with pytest.raises(TruncatedError):  # accepted already
            await ask(client)


async def test_a_request_that_stops_coming(make_edge) -> None:
    edge = await make_edge(app=AppConfig(idle_timeout_s=0.5))
    async with AsyncClient(edge.url, edge.statement_key) as client:
        body = (await session(client)).body
        async with edge.connection() as (reader, writer):
            writer.write(b"POST /v1/requests HTTP/1.1\r\nhost: node\r\ncontent-length: %d\r\n\r\n" % len(body))
            writer.write(body[:-5])
            async with asyncio.timeout(10):
                head = await reader.readuntil(b"\r\n\r\n")
        assert b"408" in head.split(b"\r\n")[0]
        assert await ask(client) == "hello there "


async def test_another_fleets_node_is_not_believed(edge, tmp_path) -> None:
    (tmp_path / "statement.pub").write_bytes(bytes(range(32)))
    async with AsyncClient(edge.url, tmp_path / "statement.pub") as client:
        with pytest.raises(StatementError, match="not signed"):
            await ask(client)


async def test_nobody_there(edge) -> None:
    async with AsyncClient("http://127.0.0.1:1", edge.statement_key) as client:
        with pytest.raises(UnreachableError):
            await ask(client)


async def test_an_envelope_refused_twice_is_an_error(edge, client, monkeypatch) -> None:
    known = await client.node()
    wrong = NodeKey(known.node_id, PrivateKey.generate().public, known.not_after)

    async def key(node) -> NodeKey:
        return wrong

    monkeypatch.setattr(client, "_key", key)
    with pytest.raises(EnvelopeRefusedError) as refused:
        await ask(client)
    assert refused.value.code == "unknown_key"
