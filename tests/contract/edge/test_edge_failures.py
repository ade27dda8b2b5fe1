"""Whatever dies, lies or stops on the way: a clear error, soon, and the next request is served."""

import asyncio
import time

import httpx
import pytest

from tie.daemon.config import AppConfig
from tie.daemon.errors import PeerTimeoutError
from tie.device import AsyncClient
from tie.device.errors import (
    EnvelopeRefusedError,
    NodeBusyError,
    NodeFailedError,
    RequestRefusedError,
    TruncatedError,
    UnreachableError,
)
from tie.device.session import Session
from tie.envelope.frames import FrameSplitter, frame
from tie.envelope.sealing import PrivateKey
from tie.envelope.statement import NodeKey, StatementError
from tie.proto import app_pb2, cloudboard_pb2, envelope_pb2, request_pb2

HELLO = [{"role": "user", "content": "hello there"}]
SOON_S = 5.0  # the design promises 2; a loaded test machine may stop for a moment


@pytest.fixture
async def client(edge):
    async with AsyncClient(edge.url, edge.statement_key) as client:
        yield client


async def ask(client: AsyncClient) -> str:
    return (await (await client.chat(HELLO, model="m")).result()).text


async def session(client: AsyncClient, text: str = "hello there") -> Session:
    request = request_pb2.InferenceRequest(model="m")
    request.messages.add(role="user").parts.add(text=text)
    return Session(await client.node(), request)


async def post(edge, content) -> httpx.Response:
    async with httpx.AsyncClient(base_url=edge.url, http1=False, http2=True, timeout=30) as http:
        return await http.post("/v1/requests", content=content)


def split(body: bytes) -> list[envelope_pb2.SealedIn]:
    return [envelope_pb2.SealedIn.FromString(payload) for payload in FrameSplitter(1 << 20).feed(body)]


def joined(messages: list[envelope_pb2.SealedIn]) -> bytes:
    return b"".join(frame(message.SerializeToString()) for message in messages)


# The request is bad.


async def test_a_replayed_envelope_is_not_opened_again(edge, client) -> None:
    body = (await session(client)).body
    assert (await post(edge, body)).status_code == 200
    replayed = await post(edge, body)
    assert (replayed.status_code, replayed.json()["error"]) == (409, "replayed")
    assert len(edge.served) == 1
    assert await ask(client) == "hello there "


async def test_an_envelope_for_another_key(edge, client) -> None:
    known = await client.node()
    other = NodeKey(known.node_id, PrivateKey.generate().public, known.not_after)
    reply = await post(edge, Session(other, request_pb2.InferenceRequest(model="m")).body)
    assert (reply.status_code, reply.json()["error"]) == (409, "unknown_key")
    # The key id of the right key, the envelope of another.
    messages = split(Session(other, request_pb2.InferenceRequest(model="m")).body)
    messages[0].header.key_id = known.public.key_id
    reply = await post(edge, joined(messages))
    assert (reply.status_code, reply.json()["error"]) == (400, "refused")
    assert not edge.served


async def test_an_envelope_for_a_key_that_is_no_more(edge, client) -> None:
    body = (await session(client)).body
    await edge.stop_kps()
    await edge.start_kps()
    reply = await post(edge, body)
    assert (reply.status_code, reply.json()["error"]) == (409, "unknown_key")
    assert not edge.served


async def test_an_envelope_for_another_node(edge, client) -> None:
    known = await client.node()
    other = NodeKey("node-1", known.public, known.not_after)
    body = Session(other, request_pb2.InferenceRequest(model="m")).body
    reply = await post(edge, body)
    assert (reply.status_code, reply.json()["error"]) == (404, "unknown_node")
    # With the name of this one on it: the envelope was sealed to the other's name, and does not open.
    messages = split(body)
    messages[0].header.node_id = known.node_id
    reply = await post(edge, joined(messages))
    assert (reply.status_code, reply.json()["error"]) == (400, "refused")
    assert not edge.served


@pytest.mark.parametrize("change", ["model", "ciphertext", "last chunk", "order", "repeat", "missing", "early end"])
async def test_a_changed_request_reaches_no_app_in_plaintext(edge, client, change: str) -> None:
    messages = split((await session(client, "x" * 200_000)).body)
    match change:
        case "model":
            messages[0].header.model = "another"
        case "ciphertext":
            messages[1].segment.ciphertext = messages[1].segment.ciphertext[:-1] + b"x"
        case "last chunk":  # all that comes before it is in order
            messages[-1].segment.ciphertext = messages[-1].segment.ciphertext[:-1] + b"x"
        case "order":
            messages[2], messages[3] = messages[3], messages[2]
        case "repeat":
            messages.insert(2, messages[2])
        case "missing":
            del messages[2]
        case _:
            del messages[-2:]
            messages[-1].segment.last = True
    reply = await post(edge, joined(messages))
    assert (reply.status_code, reply.json()["error"]) == (400, "refused")
    await edge.until(lambda: edge.served and edge.served[0].aborted)
    assert edge.served[0].body == b""
    assert await ask(client) == "hello there "


async def test_a_refusal_arrives_whatever_is_still_being_sent(edge, client) -> None:
    bad = envelope_pb2.SealedIn(segment=envelope_pb2.SealedSegment(ciphertext=bytes(20)))

    async def body():
        header = split((await session(client)).body)[0]
        header.header.version = 9
        yield joined([header])
        for _ in range(400):
            yield joined([bad] * 20)
            await asyncio.sleep(0)

    for _ in range(6):
        assert (await post(edge, body())).json()["error"] == "bad_version"
    # And one that comes of what the jobhelper finds at the beginning of megabytes that it is being sent.
    messages = split((await session(client, "x" * 6_000_000)).body)
    messages[1].segment.ciphertext = bytes(len(messages[1].segment.ciphertext))
    for code in ("refused", "replayed"):
        assert (await post(edge, joined(messages))).json()["error"] == code


@pytest.mark.parametrize("cut", ["last segment", "inside a frame", "after the header"])
async def test_a_truncated_request(edge, client, cut: str) -> None:
    body = (await session(client, "x" * 100_000)).body
    messages = split(body)
    match cut:
        case "last segment":
            body = joined(messages[:-1])
        case "inside a frame":
            body = body[:-5]
        case _:
            body = joined(messages[:1])
    reply = await post(edge, body)
    assert (reply.status_code, reply.json()["error"]) == (400, "truncated")
    assert await ask(client) == "hello there "


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "bad_frame"),
        (b"garbage that is no frame at all", 400, "bad_frame"),
        (frame(b"\xff\xff\xff"), 400, "bad_frame"),
        (frame(b""), 400, "bad_frame"),
        (frame(envelope_pb2.SealedIn(segment=envelope_pb2.SealedSegment()).SerializeToString()), 400, "bad_frame"),
        (frame(envelope_pb2.SealedIn(header=envelope_pb2.SealedHeader()).SerializeToString()), 400, "bad_version"),
        (
            frame(
                envelope_pb2.SealedIn(header=envelope_pb2.SealedHeader(version=1, node_id="node-0")).SerializeToString()
            ),
            400,
            "bad_frame",
        ),
        (
            frame(
                envelope_pb2.SealedIn(header=envelope_pb2.SealedHeader(version=1, node_id="other")).SerializeToString()
            ),
            404,
            "unknown_node",
        ),
    ],
)
async def test_bad_bodies_each_have_their_code(edge, client, body: bytes, status: int, code: str) -> None:
    reply = await post(edge, body)
    assert (reply.status_code, reply.json()["error"]) == (status, code)
    assert await ask(client) == "hello there "


async def test_a_second_header_and_data_after_the_end(edge, client) -> None:
    messages = split((await session(client, "x" * 100_000)).body)
    assert (await post(edge, joined([messages[0], *messages]))).json()["error"] == "bad_frame"
    # An app that does not answer yet, so that the surplus is what ends the request.
    edge.behaviour = _silent
    reply = await post(edge, joined([*split((await session(client)).body), messages[1]]))
    assert reply.json()["error"] == "bad_frame"


async def _silent(run) -> None:
    await run.request()
    run.aborted = (await run.next()) is not None


async def test_an_oversized_request(make_edge) -> None:
    edge = await make_edge(app=AppConfig(max_request_bytes=8192))
    async with AsyncClient(edge.url, edge.statement_key) as client:
        request = request_pb2.InferenceRequest(model="m", prompt="x" * 8000)
        edge.behaviour = _consume
        await (await client.send(request)).result()
        # One step over what the jobhelper lets through.
        with pytest.raises(RequestRefusedError, match="over the node's limit"):
            await client.send(request_pb2.InferenceRequest(model="m", prompt="x" * 8200))
        # And far over, which the ingress does not even read.
        with pytest.raises(RequestRefusedError, match="over the node's limit"):
            await client.send(request_pb2.InferenceRequest(model="m", prompt="x" * 2_000_000))
        await (await client.send(request)).result()


async def echo(run) -> None:
    request = await run.request()
    if request is not None:
        await run.text(request.messages[0].parts[0].text + " ")
        await run.done()


async def _consume(run) -> None:
    if await run.request() is not None:
        await run.done()


# The node cannot.


async def test_busy_before_any_of_the_body_is_read(edge, client) -> None:
    await ask(client)
    served = len(edge.served)
    await edge.report(cloudboard_pb2.STATE_BUSY)
    with pytest.raises(NodeBusyError):
        await ask(client)
    # The reply comes while the request has not been sent: nothing of it can have been read.
    async with edge.connection() as (reader, writer):
        writer.write(b"POST /v1/requests HTTP/1.1\r\nhost: node\r\ncontent-length: 100000\r\n\r\n")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
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
    release = asyncio.Event()

    async def wait(run) -> None:
        await run.request()
        await run.text("one ")
        await release.wait()
        await run.text("two")
        await run.done()

    edge.behaviour = wait
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
    assert await ask(client) == "hello there "


async def test_more_at_once_than_allowed(make_edge) -> None:
    edge = await make_edge(max_in_flight=1)
    edge.behaviour = _silent
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


# Something dies.


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
    edge.behaviour = _consume
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
    await asyncio.wait_for(told.wait(), SOON_S)


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
    edge.behaviour = _silent
    async with AsyncClient(edge.url, edge.statement_key, silence_s=1.0) as client:
        with pytest.raises(PeerTimeoutError):
            await ask(client)


async def test_the_request_deadline(make_edge) -> None:
    edge = await make_edge(request_deadline_s=1.5)
    edge.behaviour = _silent
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
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        assert b"408" in head.split(b"\r\n")[0]
        assert await ask(client) == "hello there "


# The client looks closely.


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
