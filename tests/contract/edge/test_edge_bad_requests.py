"""A request that was replayed, changed, cut or misdirected has its own code, and no app sees it in plaintext."""

import asyncio

import pytest

from edge_requests import ask, consume, post, session, silent
from tie.daemon.config import AppConfig
from tie.device import AsyncClient
from tie.device.errors import RequestRefusedError
from tie.device.session import Session
from tie.envelope.frames import FrameSplitter, frame
from tie.envelope.sealing import PrivateKey
from tie.envelope.statement import NodeKey
from tie.proto import envelope_pb2, request_pb2


def split(body: bytes) -> list[envelope_pb2.SealedIn]:
    return [envelope_pb2.SealedIn.FromString(payload) for payload in FrameSplitter(1 << 20).feed(body)]


def joined(messages: list[envelope_pb2.SealedIn]) -> bytes:
    return b"".join(frame(message.SerializeToString()) for message in messages)


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
    edge.behaviour = silent
    reply = await post(edge, joined([*split((await session(client)).body), messages[1]]))
    assert reply.json()["error"] == "bad_frame"


async def test_an_oversized_request(make_edge) -> None:
    edge = await make_edge(app=AppConfig(max_request_bytes=8192))
    async with AsyncClient(edge.url, edge.statement_key) as client:
        request = request_pb2.InferenceRequest(model="m", prompt="x" * 8000)
        edge.behaviour = consume
        await (await client.send(request)).result()
        # One step over what the jobhelper lets through.
        with pytest.raises(RequestRefusedError, match="over the node's limit"):
            await client.send(request_pb2.InferenceRequest(model="m", prompt="x" * 8200))
        # And far over, which the ingress does not even read.
        with pytest.raises(RequestRefusedError, match="over the node's limit"):
            await client.send(request_pb2.InferenceRequest(model="m", prompt="x" * 2_000_000))
        await (await client.send(request)).result()
