"""`tie proxy` before a real node, asked by the official client of OpenAI's API as its users have it."""

import asyncio
import json
import shutil
import subprocess
from pathlib import Path

import jsonschema
import openai
import pytest

from node_log import SAVED, logged

pytestmark = pytest.mark.node
ANSWER_S = 60.0
MODEL = "smollm2-135m-instruct"
COLOURS = {"role": "user", "content": "Name three colours."}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": SCHEMA}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
NAMED = {"type": "function", "function": {"name": "weather"}}
CALLED = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome","days":2}'}}


@pytest.fixture(scope="module")
def bundle(tools_bundle: Path) -> Path:
    return tools_bundle


@pytest.fixture(scope="module")
def api(proxy_url):
    with openai.OpenAI(base_url=proxy_url, api_key="none", timeout=ANSWER_S) as client:
        yield client


def gathered(chunks):
    """A stream, put together as its readers do: for each choice its message, logprobs and end; and the usage."""
    choices, usage = {}, None
    for chunk in chunks:
        usage = chunk.usage or usage
        for piece in chunk.choices:
            choice = choices.setdefault(piece.index, {"content": "", "calls": {}, "logprobs": [], "finish": None})
            choice["content"] += piece.delta.content or ""
            choice["logprobs"] += (piece.logprobs and piece.logprobs.content) or []
            choice["finish"] = piece.finish_reason or choice["finish"]
            for call in piece.delta.tool_calls or []:
                name, arguments = choice["calls"].get(call.index, ("", ""))
                function = call.function
                choice["calls"][call.index] = (name + (function.name or ""), arguments + (function.arguments or ""))
    return [choices[index] for index in sorted(choices)], usage


def both(api, **asked):
    """A question asked twice, whole and as a stream, with the same answer; as the stream has it."""
    asked = {"model": MODEL, "messages": [COLOURS], "max_tokens": 12, "temperature": 0, **asked}
    whole = api.chat.completions.create(**asked)
    with api.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}) as stream:
        choices, usage = gathered(stream)
    for choice, streamed in zip(whole.choices, choices, strict=True):
        message = choice.message
        assert (message.content or "", choice.finish_reason) == (streamed["content"], streamed["finish"])
        calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
        assert calls == list(streamed["calls"].values())
        tokens = choice.logprobs.content if choice.logprobs else []
        assert [one.token for one in tokens] == [one.token for one in streamed["logprobs"]]
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    return choices, usage


@pytest.fixture(scope="module")
def plain(api):
    """What the model says when nothing special is asked for."""
    return both(api)[0][0]["content"]


def test_the_model_is_listed(api):
    assert [model.id for model in api.models.list()] == [MODEL]
    assert api.models.retrieve(MODEL).owned_by == "tie"


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "Answer in French."}, COLOURS],
        [{"role": "developer", "content": "Be brief."}, COLOURS],
        [{"role": "user", "name": "ann", "content": [{"type": "text", "text": it} for it in ("Name ", "three.")]}],
        [COLOURS, {"role": "assistant", "content": "Red."}, {"role": "user", "content": "Grüße, 世界! 👋"}],
        [COLOURS, {"role": "assistant", "content": None, "tool_calls": [CALLED]},
         {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."}],
    ],
)  # fmt: skip
def test_messages_of_every_kind(api, messages):
    assert both(api, messages=messages)[0][0]["content"]


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 1.0, "seed": 7},
        {"temperature": 1.0, "seed": -7},
        {"temperature": 1.0, "top_p": 0.3, "seed": 7},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"user": "somebody", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
        {"extra_body": {"top_k": 1, "temperature": 1.0}},
        {"extra_body": {"min_p": 0.9, "repetition_penalty": 1.3}},
        {"extra_body": {"ignore_eos": True, "min_tokens": 12}},
        {"tools": [WEATHER], "tool_choice": "none"},
        {"tools": [WEATHER, CLOCK]},
        {"response_format": {"type": "text"}},
        {"stop": None, "seed": None, "tools": None, "top_p": None},
    ],
)
def test_parameters_that_shape_an_answer(api, asked):
    choices, usage = both(api, **asked)
    assert choices[0]["content"] or choices[0]["calls"]
    assert usage.completion_tokens <= 12


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_longest_answer(api, name):
    asked = {"max_tokens": None, name: 3}
    choices, usage = both(api, **asked)
    assert (choices[0]["finish"], usage.completion_tokens) == ("length", 3)


@pytest.mark.parametrize("several", [False, True])
def test_stop_strings(api, plain, several):
    stop = plain[6:9]
    choices, _ = both(api, stop=["never said", stop] if several else stop)
    assert (choices[0]["content"], choices[0]["finish"]) == (plain[: plain.index(stop)], "stop")


def test_several_choices(api):
    choices, _ = both(api, n=3, temperature=1.0, seed=5)
    assert len({choice["content"] for choice in choices}) > 1


@pytest.mark.parametrize("top", [None, 4])
def test_logprobs(api, plain, top):
    choices, usage = both(api, logprobs=True, **({"top_logprobs": top} if top else {}))
    tokens = choices[0]["logprobs"]
    assert b"".join(bytes(token.bytes) for token in tokens).decode().startswith(plain)
    assert all(token.logprob <= 0 for token in tokens)
    assert {len(token.top_logprobs) for token in tokens} == {top or 0}
    assert 0 <= usage.completion_tokens - len(tokens) <= 1  # the end of the turn may have none


def test_biased_tokens(api, plain):
    assert plain.startswith("1")
    choices, _ = both(api, logit_bias={"33": -100})  # that is "1"
    assert "1" not in choices[0]["content"]


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_json_answers(api, kind):
    schema = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
    wanted = schema if kind == "json_schema" else {"type": kind}
    choices, _ = both(api, response_format=wanted, max_tokens=40, temperature=1.0, seed=3)
    jsonschema.validate(json.loads(choices[0]["content"]), SCHEMA if wanted is schema else {"type": "object"})


@pytest.mark.parametrize(
    "asked",
    [
        {"tool_choice": "required"},
        {"tool_choice": NAMED, "temperature": 1.0, "seed": 11},
        {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 1.0, "seed": 12},
    ],
)
def test_calls_that_are_demanded(api, asked):
    choices, _ = both(api, tools=[WEATHER], max_tokens=60, **asked)
    ((name, arguments),) = choices[0]["calls"].values()
    assert (name, choices[0]["content"], choices[0]["finish"]) == ("weather", "", "tool_calls")
    jsonschema.validate(json.loads(arguments), SCHEMA)


async def test_a_conversation_goes_on_from_where_it_was(running_node, api):
    told = {"role": "user", "content": "Tell me about the colours of the sea, at some length. " * 4}
    async with logged(running_node, SAVED):
        first = api.chat.completions.create(model=MODEL, messages=[told], max_tokens=24, temperature=0)
    again = [told, first.choices[0].message, {"role": "user", "content": "And the sky?"}]
    second = api.chat.completions.create(model=MODEL, messages=again, max_tokens=2, temperature=0)
    assert second.usage.prompt_tokens_details.cached_tokens >= 32


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"stop": "\n"},
        {"logprobs": 2},
        {"n": 2, "temperature": 1.0, "seed": 5},
        {"temperature": 1.0, "seed": 9, "top_p": 0.5},
        {"presence_penalty": 1.0, "frequency_penalty": 1.0},
    ],
)
def test_raw_completions(api, asked):
    asked = {"model": MODEL, "prompt": "The sky is", "max_tokens": 8, "temperature": 0, **asked}
    whole = api.completions.create(**asked)
    texts = [""] * len(whole.choices)
    tokens, usage = [], None
    with api.completions.create(**asked, stream=True, stream_options={"include_usage": True}) as stream:
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                tokens += choice.logprobs.tokens if choice.logprobs else []
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == (whole.choices[0].logprobs.tokens if "logprobs" in asked else [])
    assert usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize(
    ("asked", "kind", "param"),
    [
        ({"model": "gpt-4o"}, openai.NotFoundError, "model"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"messages": [{"role": "user", "content": "word " * 20_000}]}, openai.BadRequestError, "messages"),
        ({"temperature": 2.5}, openai.BadRequestError, "temperature"),
        ({"temperature": "hot"}, openai.BadRequestError, "temperature"),
        ({"top_p": 0.0}, openai.BadRequestError, "top_p"),
        ({"max_tokens": -1}, openai.BadRequestError, "max_tokens"),
        ({"n": 9}, openai.BadRequestError, "n"),
        ({"logprobs": True, "top_logprobs": 99}, openai.BadRequestError, "logprobs"),
        ({"logit_bias": {"x": 1}}, openai.BadRequestError, "logit_bias"),
        ({"stop": [""]}, openai.BadRequestError, "stop[0]"),
        ({"reasoning_effort": "high"}, openai.BadRequestError, "reasoning_effort"),
        ({"extra_body": {"invented": 1}}, openai.BadRequestError, "invented"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, openai.BadRequestError,
         "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, openai.BadRequestError, "tools[1].function.name"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object",
          "patternProperties": {"(?=a)": {}}}}}}, openai.UnprocessableEntityError, "response_format"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://a/b"}}]}]},
         openai.BadRequestError, "messages[0].content[0].image_url.url"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url",
          "image_url": {"url": "data:image/png;base64,YQ=="}}]}]},
         openai.UnprocessableEntityError, "messages[0].content[0].image_url"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(api, asked, kind, param):
    stream = len(param) % 2 == 0  # a refusal comes before the first event: it is the same for both
    question = {"model": MODEL, "messages": [COLOURS], "max_tokens": 4, "stream": stream, **asked}
    with pytest.raises(openai.APIStatusError) as raised:
        api.chat.completions.create(**question)
    assert (type(raised.value), raised.value.param) == (kind, param)


def test_a_stream_that_is_closed_stops_the_work(api, running_node):
    async def until(*, running: bool) -> None:
        async with asyncio.timeout(ANSWER_S / 4):  # the whole answer would take longer
            while bool((await running_node.status()).runtime.running) is not running:
                await asyncio.sleep(0.05)

    endless = {"max_tokens": 1800, "extra_body": {"ignore_eos": True}}
    with api.chat.completions.create(model=MODEL, messages=[COLOURS], stream=True, **endless) as stream:
        assert next(iter(stream)).choices[0].delta.role == "assistant"
        asyncio.run(until(running=True))
    asyncio.run(until(running=False))


def test_curl_reads_events(proxy_url):
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    body = {"model": MODEL, "messages": [COLOURS], "max_tokens": 6, "stream": True}
    command = ["curl", "-sSN", f"{proxy_url}/chat/completions", "-H", "content-type: application/json"]
    command += ["-d", json.dumps(body)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=True)
    events = [line for line in done.stdout.splitlines() if line]
    assert events.pop() == "data: [DONE]"
    answers = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    assert [answer["finish_reason"] for answer in answers][-2:] == [None, "length"]
