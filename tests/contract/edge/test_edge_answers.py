"""A sealed request goes through the edge to an app and comes back."""

import asyncio

import httpx
import pytest

from tie.device import AsyncClient, Client
from tie.device.errors import RequestRefusedError
from tie.proto import app_pb2, kps_pb2, request_pb2

GREETING = [{"role": "user", "content": "grüße an alle"}]


async def test_the_answer_streams_back(edge) -> None:
    async with AsyncClient(edge.url, edge.statement_key) as client:
        answer = await client.chat(GREETING, model="m", temperature=0.0, max_tokens=5)
        pieces = [delta.text async for delta in answer]
        result = await answer.result()
    assert pieces == ["grüße ", "an ", "alle "]
    assert (result.text, result.finish, result.completion_tokens) == ("grüße an alle ", ("stop",), 2)
    (run,) = edge.served
    assert run.opened.model == "m"
    assert len(run.opened.dek) == 32
    request = request_pb2.InferenceRequest.FromString(run.body)
    assert request.sampling.HasField("temperature")
    assert request.max_tokens == 5


async def test_the_synchronous_client(edge) -> None:
    def ask() -> str:
        with Client(edge.url, edge.statement_key) as client:
            return "".join(delta.text for delta in client.chat(GREETING, model="m"))

    assert await asyncio.to_thread(ask) == "grüße an alle "


async def test_a_large_request_comes_through_whole(edge) -> None:
    words = "wort " * 200_000
    async with AsyncClient(edge.url, edge.statement_key) as client:
        request = request_pb2.InferenceRequest(model="m")
        request.messages.add(role="user").parts.add(image=words.encode())
        request.messages.add(role="user")

        async def measure(run) -> None:
            received = await run.request()
            await run.text(str(len(received.messages[0].parts[0].image)))
            await run.done()

        edge.behaviour = measure
        answer = await client.send(request)
        assert (await answer.result()).text == str(len(words))
    assert len(edge.served[0].body).bit_count() == 1


async def test_twenty_at_once(edge) -> None:
    async def ask(client: AsyncClient, number: int) -> str:
        answer = await client.chat([{"role": "user", "content": f"number {number}"}], model="m")
        return (await answer.result()).text

    async with AsyncClient(edge.url, edge.statement_key) as client:
        texts = await asyncio.gather(*(ask(client, number) for number in range(20)))
    assert texts == [f"number {number} " for number in range(20)]
    deks = {run.opened.dek for run in edge.served}
    assert len(deks) == 20
    await edge.until(lambda: sum(process.poll() is None for process in edge.jobhelpers) <= 1)


async def test_every_sealed_segment_has_a_size_of_the_list(edge) -> None:
    async with AsyncClient(edge.url, edge.statement_key) as client:
        answer = await client.chat([{"role": "user", "content": "a bb " + "c" * 3000}], model="m")
        sizes = []
        original = answer._session._splitter.feed
        answer._session._splitter.feed = lambda data: (sizes.append(len(one)) or one for one in original(data))
        await answer.result()
    assert len(sizes) == 4
    assert {size - 17 for size in sizes} <= set(edge.config.app.buckets)


async def test_a_refusal_of_the_app_names_its_status(edge) -> None:
    async def refuse(run) -> None:
        await run.request()
        await run.done(app_pb2.STATUS_PROMPT_TOO_LONG, detail="messages: 9000 tokens, at most 2048")

    edge.behaviour = refuse
    async with AsyncClient(edge.url, edge.statement_key) as client:
        answer = await client.chat(GREETING, model="m")
        with pytest.raises(RequestRefusedError, match="longer than the model's context") as refused:
            await answer.result()
    assert refused.value.status == "STATUS_PROMPT_TOO_LONG"
    assert "9000" in refused.value.detail
    assert "9000" not in str(refused.value)


async def test_several_choices(edge) -> None:
    async def two(run) -> None:
        await run.request()
        for index in (1, 0, 1):
            await run.text(f"{index}.", index=index)
        await run.done()

    edge.behaviour = two
    async with AsyncClient(edge.url, edge.statement_key) as client:
        result = await (await client.chat(GREETING, model="m", n=2)).result()
    assert result.texts == ("0.", "1.1.")


async def test_trust_on_first_use_must_be_asked_for(edge) -> None:
    async with AsyncClient(edge.url, trust_on_first_use=True) as client:
        assert (await (await client.chat(GREETING, model="m")).result()).text == "grüße an alle "
        assert client.statement_key == edge.statement_key.read_bytes()


@pytest.mark.parametrize("http2", [True, False])
async def test_the_statement_over_both_http_versions(edge, http2: bool) -> None:
    async with httpx.AsyncClient(base_url=edge.url, http1=not http2, http2=http2) as client:
        reply = await client.get("/v1/node")
        assert reply.http_version == ("HTTP/2" if http2 else "HTTP/1.1")
        statement = kps_pb2.KeyStatement.FromString(reply.content)
        assert statement.node_id == "node-0"
        as_json = (await client.get("/v1/node", headers={"accept": "application/json"})).json()
        assert as_json["node_id"] == "node-0"
        assert (await client.get("/nowhere")).json()["error"] == "not_found"
        assert (await client.post("/v1/node")).json()["error"] == "bad_method"


async def test_a_pair_stands_by_and_serves_the_next_request(edge) -> None:
    await edge.until(lambda: len(edge.runs) == 1)
    waiting = edge.runs[0]
    async with AsyncClient(edge.url, edge.statement_key) as client:
        await (await client.chat(GREETING, model="m")).result()
    assert edge.served == [waiting]
    await edge.until(lambda: len(edge.runs) == 2)
