"""`tie proxy`'s API before a real edge: statuses, errors, events, and what becomes of a request on the way."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from edge_requests import DEADLINE_S, HELLO, proxied
from tie.device import AsyncClient
from tie.device.proxy.access import Access
from tie.device.proxy.handler import MAX_BODY_BYTES
from tie.device.proxy.models import Models
from tie.device.turns import Turns
from tie.proto import app_pb2, cloudboard_pb2

CHAT = {"model": "m", "messages": HELLO}
WEATHER = {"type": "function", "function": {"name": "weather"}}


@dataclass
class Api:
    """A proxy under test, and clients of it."""

    url: str
    stack: contextlib.AsyncExitStack

    async def openai(self, key: str = "none", **options: Any) -> openai.AsyncOpenAI:
        client = openai.AsyncOpenAI(
            base_url=self.url + "/v1", api_key=key, max_retries=0, timeout=DEADLINE_S, **options
        )
        return await self.stack.enter_async_context(client)

    async def chat(self, **more: Any) -> Any:
        return await (await self.openai()).chat.completions.create(**CHAT, **more)

    async def raw(self, method: str, path: str, **options: object) -> httpx.Response:
        async with httpx.AsyncClient(base_url=self.url, trust_env=False, timeout=DEADLINE_S) as http:
            return await http.request(method, path, **options)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def proxy_of(*edges, url: str = "", key: bytes = b"", **options) -> AsyncIterator[Api]:
    client = AsyncClient(url or [edge.url for edge in edges], key or edges[0].statement_key)
    async with proxied(client, **options) as address, contextlib.AsyncExitStack() as stack:
        yield Api(address, stack)


@pytest.fixture
async def api(edge) -> AsyncIterator[Api]:
    async with proxy_of(edge) as api:
        yield api


def says(*texts: str, status: app_pb2.Status.ValueType = app_pb2.STATUS_OK, detail: str = ""):
    """A played app that reads the request, answers, and ends."""

    async def behaviour(run) -> None:
        await run.request()
        for text in texts:
            await run.text(text)
        await run.done(status, detail)

    return behaviour


async def chunks_of(api: Api, body: object) -> list[bytes]:
    """What a conversation is answered with, write by write: the chunks of HTTP/1.1 (RFC 9112, section 7.1)."""
    content = json.dumps(body).encode()
    head = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", int(api.url.rpartition(":")[2]))
    writer.write(f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n".encode() + content)
    chunks = []
    try:
        async with asyncio.timeout(DEADLINE_S):
            assert b"transfer-encoding: chunked" in (await reader.readuntil(b"\r\n\r\n")).lower()
            while size := int(await reader.readline(), 16):
                chunks.append((await reader.readexactly(size + 2))[:size])
    finally:
        writer.close()
    return chunks


def deltas(data: bytes) -> list[dict[str, Any]]:
    """What the events in a piece of a stream bring of the first choice."""
    events = [event.removeprefix("data: ") for event in data.decode().split("\n\n")[:-1]]
    return [json.loads(event)["choices"][0]["delta"] for event in events if event != "[DONE]"]


async def asked(edge) -> list[bytes]:
    """The turn keys of the requests so far."""
    from tie.proto import request_pb2

    return [request_pb2.InferenceRequest.FromString(run.body).turn_key for run in edge.served]


async def test_a_stream_is_events_and_ends_with_done(api) -> None:
    reply = await api.raw("POST", "/v1/chat/completions", json={**CHAT, "stream": True})
    assert (reply.status_code, reply.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert reply.headers["cache-control"] == "no-store"
    events = reply.text.split("\n\n")
    assert all(event.startswith("data: ") for event in events[:-1])
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "hello there "
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-2:] == [None, "stop"]


REFUSALS = [
    (app_pb2.STATUS_INVALID_REQUEST, "sampling.top_p: must be less", openai.BadRequestError, 400, "top_p"),
    (app_pb2.STATUS_UNKNOWN_MODEL, "model: this node serves x", openai.NotFoundError, 404, "model"),
    (app_pb2.STATUS_PROMPT_TOO_LONG, "messages: 9 tokens", openai.BadRequestError, 400, "messages"),
    (app_pb2.STATUS_REQUEST_TOO_LARGE, "too much", openai.APIStatusError, 413, None),
    (app_pb2.STATUS_UNSUPPORTED, "tools: no", openai.UnprocessableEntityError, 422, "tools"),
    (app_pb2.STATUS_GRAMMAR_REFUSED, "constraint.json_schema: no", openai.UnprocessableEntityError, 422,
     "response_format"),
    (app_pb2.STATUS_BUSY, "full", openai.RateLimitError, 429, None),
    (app_pb2.STATUS_REPLACED, "again", openai.InternalServerError, 503, None),
    (app_pb2.STATUS_INTERNAL, "", openai.InternalServerError, 500, None),
    (app_pb2.STATUS_DEADLINE_EXCEEDED, "", openai.InternalServerError, 504, None),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
async def test_every_refusal_of_a_node_has_its_status_and_its_class(edge, api, stream) -> None:
    for status, detail, kind, number, param in REFUSALS:
        edge.behaviour = says(status=status, detail=detail)
        with pytest.raises(openai.APIStatusError) as raised:
            await api.chat(stream=stream)
        assert (type(raised.value), raised.value.status_code, raised.value.param) == (kind, number, param), status
        assert raised.value.code
        # It was read: whoever sends it again has to decide that for himself.
        assert raised.value.response.headers["x-should-retry"] == "false"


async def test_a_busy_node_says_when_to_try_again(edge, api) -> None:
    await edge.report(cloudboard_pb2.STATE_BUSY)
    with pytest.raises(openai.RateLimitError) as raised:
        await api.chat()
    headers = raised.value.response.headers
    assert (headers["x-should-retry"], headers["retry-after"]) == ("true", "1")
    assert edge.served == []


async def test_another_node_takes_what_a_busy_one_does_not(make_edge) -> None:
    first = await make_edge(standby=0)
    second = await make_edge(standby=0, fleet=first)
    await first.report(cloudboard_pb2.STATE_BUSY)
    async with proxy_of(first, second) as api:
        answer = await api.chat()
    assert answer.choices[0].message.content == "hello there "
    assert (len(first.served), len(second.served)) == (0, 1)


async def test_nobody_there(edge) -> None:
    async with proxy_of(edge, url="http://127.0.0.1:1") as api:
        with pytest.raises(openai.InternalServerError) as raised:
            await api.chat()
        assert (raised.value.status_code, raised.value.code) == (503, "node_unreachable")
        assert raised.value.response.headers["x-should-retry"] == "true"


async def test_another_fleets_node_gets_nothing(edge) -> None:
    async with proxy_of(edge, key=bytes(range(32))) as api:
        with pytest.raises(openai.InternalServerError) as raised:
            await api.chat()
    assert (raised.value.status_code, raised.value.code) == (502, "node_not_trusted")
    assert raised.value.response.headers["x-should-retry"] == "false"
    assert edge.served == []


async def test_an_answer_that_breaks_off_is_an_error_and_no_short_answer(edge, api) -> None:
    async def dies(run) -> None:
        await run.request()
        await run.text("so ")

    edge.behaviour = dies
    with pytest.raises(openai.InternalServerError):
        await api.chat()
    answer = aiter(await api.chat(stream=True))
    assert (await anext(answer)).choices[0].delta.role == "assistant"
    assert (await anext(answer)).choices[0].delta.content == "so "
    with pytest.raises(openai.APIError, match="ended"):
        await anext(answer)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_stops_the_work(edge, api, stream) -> None:
    told, aborted = asyncio.Event(), asyncio.Event()

    async def waits(run) -> None:
        await run.request()
        await run.text("first ")
        told.set()
        message = await run.next()
        assert message is None or message.HasField("abort")
        aborted.set()

    edge.behaviour = waits

    async def ask() -> None:
        async with await api.chat(stream=stream) as answer:
            async for _ in answer:
                pass

    asking = asyncio.create_task(ask())
    async with asyncio.timeout(DEADLINE_S):
        await told.wait()
        asking.cancel()
        await aborted.wait()
    with contextlib.suppress(asyncio.CancelledError):
        await asking


async def test_a_choice_that_nobody_asked_for_is_no_answer(edge, api) -> None:
    async def hostile(run) -> None:
        await run.request()
        await run.text("x", index=1)
        await run.done()

    edge.behaviour = hostile
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError) as raised:
            await api.chat(stream=stream)
        assert (raised.value.status_code, raised.value.code) == (502, "bad_answer")
        assert raised.value.response.headers["x-should-retry"] == "false"


async def test_calls_come_as_calls(edge, api) -> None:
    arguments = '{"city": "Paris \\"}", "in": [{"days": 3}]}'
    text = f'Let me see.\n<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'
    edge.behaviour = says(*(text[start : start + 7] for start in range(0, len(text), 7)))
    whole = (await api.chat(tools=[WEATHER])).choices[0]
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", "Let me see.")
    assert [(call.function.name, call.function.arguments) for call in whole.message.tool_calls] == [
        ("weather", arguments)
    ]
    content, given, ids = "", "", set()
    async for chunk in await api.chat(tools=[WEATHER], stream=True):
        content += chunk.choices[0].delta.content or ""
        for call in chunk.choices[0].delta.tool_calls or []:
            given += call.function.arguments or ""
            ids |= {call.id} - {None}
    assert (content, given, len(ids)) == ("Let me see.", arguments, 1)


async def test_a_conversation_that_goes_on_keeps_its_turn_key(edge, api) -> None:
    client = await api.openai()
    first = await client.chat.completions.create(**CHAT)
    history = [*HELLO, first.choices[0].message]
    for last in ("more", "other"):
        await client.chat.completions.create(model="m", messages=[*history, {"role": "user", "content": last}])
    await client.chat.completions.create(**CHAT)
    changed = [*HELLO, {"role": "assistant", "content": "never said"}, {"role": "user", "content": "more"}]
    await client.chat.completions.create(model="m", messages=changed)
    keys = await asked(edge)
    assert [len(key) for key in keys] == [32] * 5
    assert keys[0] == keys[1] == keys[2]
    assert len({keys[0], keys[3], keys[4]}) == 3
    async with proxy_of(edge, turns=None) as without:
        await without.chat()
    assert (await asked(edge))[-1] == b""


async def test_turns_are_known_before_the_answer_is_over(edge) -> None:
    turns = Turns()
    async with proxy_of(edge, turns=turns) as api:
        known = [len(turns) async for chunk in await api.chat(stream=True) if chunk.choices[0].finish_reason]
    assert known == [1]


async def test_pieces_are_gathered_when_asked_for(edge) -> None:
    async def says_slowly(run) -> None:
        await run.request()
        for text in "abcdefgh":
            await run.text(text)
            await asyncio.sleep(0.02)  # for a proxy that does not gather to have written it
        await run.done()

    edge.behaviour = says_slowly
    async with proxy_of(edge, gather_s=DEADLINE_S) as api:
        written = await chunks_of(api, {**CHAT, "stream": True})
    contents = [[delta.get("content") for delta in deltas(data)] for data in written]
    assert ["", *"abcdefgh"] in contents
    assert written[-1].endswith(b"data: [DONE]\n\n")


async def test_who_may_ask(edge) -> None:
    key = "0123456789abcdef"
    async with proxy_of(edge, access=Access(api_key=key.encode())) as api:
        assert len((await (await api.openai(key)).models.list()).data) == 1
        for wrong in ("0123456789abcdeF", "x"):
            client = await api.openai(wrong)
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        client = await api.openai(key, default_headers={"host": "rebound.example"})
        with pytest.raises(openai.PermissionDeniedError):
            await client.models.list()
        headers = {"authorization": f"Bearer {key}", "content-type": "text/plain"}
        simple = await api.raw("POST", "/v1/chat/completions", content=b"{}", headers=headers)
        assert (simple.status_code, simple.json()["error"]["code"]) == (415, "bad_type")
    assert edge.served == []


async def test_a_node_that_is_given_another_model(edge) -> None:
    """Its name is learned when somebody asks for it, and when the node says that the old one is none of its own."""
    served = ["m"]
    models = Models(("m",), lambda: (served[-1],), interval_s=3600.0)
    async with proxy_of(edge, models=models) as api:
        edge.behaviour = says("an answer")
        assert (await api.chat()).choices[0].message.content == "an answer"
        served.append("n")
        listed = await api.raw("GET", "/v1/models")
        assert [model["id"] for model in listed.json()["data"]] == ["m"]  # nothing has said otherwise yet
        edge.behaviour = says(status=app_pb2.STATUS_UNKNOWN_MODEL, detail="model: this node serves n")
        refused = await api.raw("POST", "/v1/chat/completions", json=CHAT)
        assert refused.status_code == 404
        assert refused.json()["error"]["message"] == "the model 'm' is not served here; there is: n"
        listed = await api.raw("GET", "/v1/models")
        assert [model["id"] for model in listed.json()["data"]] == ["n"]
        served.append("o")
        edge.behaviour = says("another")
        asked = await api.raw("POST", "/v1/chat/completions", json={**CHAT, "model": "o"})
        assert asked.json()["choices"][0]["message"]["content"] == "another"


async def test_models_that_the_user_named_stay(edge, api) -> None:
    edge.behaviour = says(status=app_pb2.STATUS_UNKNOWN_MODEL, detail="model: this node serves n")
    refused = await api.raw("POST", "/v1/chat/completions", json=CHAT)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    assert "this node serves n" in refused.json()["error"]["message"]
    assert (await api.raw("GET", "/v1/models")).json()["data"][0]["id"] == "m"


async def test_paths_methods_and_sizes(api) -> None:
    json_type = {"content-type": "application/json"}
    for method, path, status, code in [
        ("GET", "/", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "bad_method"),
        ("POST", "/v1/models", 405, "bad_method"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("POST", "/v1/chat/completions", 400, "invalid_value"),
    ]:
        reply = await api.raw(method, path, content=b"" if method == "GET" else b"[", headers=json_type)
        assert (reply.status_code, reply.json()["error"]["code"]) == (status, code), path
    assert (await api.raw("GET", "/v1/models/m")).json()["id"] == "m"
    large = {**json_type, "content-length": str(MAX_BODY_BYTES + 1)}
    reader, writer = await asyncio.open_connection("127.0.0.1", int(api.url.rpartition(":")[2]))
    head = "".join(f"{name}: {value}\r\n" for name, value in {"host": "localhost", **large}.items())
    writer.write(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode())
    async with asyncio.timeout(DEADLINE_S):
        assert b" 413 " in await reader.readline()
    writer.close()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(api.url.rpartition(":")[2]))
    writer.write(b"no HTTP at all\r\n\r\n")
    async with asyncio.timeout(DEADLINE_S):
        said = await reader.read()
    assert json.loads(said.rpartition(b"\r\n\r\n")[2])["error"]["code"] == "bad_request"
    writer.close()


async def test_nothing_that_is_said_is_logged(edge, api, capfd, monkeypatch) -> None:
    secret = "xylophone-7391"
    edge.behaviour = says(secret, status=app_pb2.STATUS_INVALID_REQUEST, detail=f"stop[0]: {secret}")
    for body in ({**CHAT, "stop": [secret]}, {**CHAT, secret: 1}, {"model": secret, "messages": HELLO}):
        reply = await api.raw("POST", "/v1/chat/completions", json=body)
        assert secret in reply.text  # the user is told

    def fail(asked: object) -> None:
        raise ValueError(secret)

    monkeypatch.setattr("tie.device.proxy.translate.chat", fail)
    assert (await api.raw("POST", "/v1/chat/completions", json=CHAT)).json()["error"]["code"] == "internal_error"
    said = capfd.readouterr()
    assert "proxy.failed" in said.err
    assert secret not in said.out + said.err
