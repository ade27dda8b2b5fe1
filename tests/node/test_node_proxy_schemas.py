"""Schemas that people write, through OpenAI's API: whatever answer or call came to its end validates."""

import asyncio
import json
import os
import time
from pathlib import Path

import jsonschema
import openai
import pytest

CORPUS = Path(__file__).parents[3] / "shared" / "data" / "json-schemas.jsonl"
WHOLE = os.environ.get("TIE_SLOW") == "1"
SAMPLE = int(os.environ.get("TIE_SCHEMAS", "300"))
AT_ONCE = 8
ANSWER_S = 240.0
MODEL = "smollm2-135m-instruct"

pytestmark = [
    pytest.mark.node,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not WHOLE, reason="minutes of answers; TIE_SLOW=1 runs it (of TIE_SCHEMAS schemas)"),
    pytest.mark.skipif(not CORPUS.exists(), reason="no ../shared/data/json-schemas.jsonl beside this checkout"),
]


@pytest.fixture(scope="module")
def bundle(tools_bundle: Path) -> Path:
    return tools_bundle


async def ask(client, number, schema, *, as_tool):
    """One answer: how it ended, and its JSON."""
    wish = {"role": "user", "content": "Fill in something short." if not as_tool else "Call the tool."}
    asked = {"model": MODEL, "messages": [wish], "temperature": 1.0, "seed": number, "max_tokens": 256}
    if as_tool:
        asked["tools"] = [{"type": "function", "function": {"name": "tool", "parameters": schema}}]
        asked["tool_choice"] = "required"
    else:
        asked["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    try:
        choice = (await client.chat.completions.create(**asked)).choices[0]
    except openai.UnprocessableEntityError as refusal:
        return "refused", refusal.code
    except openai.BadRequestError as refusal:
        if refusal.code != "context_length_exceeded":
            raise
        return "refused", refusal.code
    text = choice.message.tool_calls[0].function.arguments if as_tool else choice.message.content
    return ("cut" if choice.finish_reason == "length" else "whole"), text


async def test_answers_and_calls_validate(proxy_url) -> None:
    entries = [json.loads(line) for line in CORPUS.read_text().splitlines()]
    entries = entries[:: max(1, len(entries) // SAMPLE)][:SAMPLE]
    room = asyncio.Semaphore(AT_ONCE)
    counts: dict[tuple[str, str], int] = {}
    invalid = []

    async def one(number, entry, *, as_tool) -> None:
        async with room:
            kind, text = await ask(client, number, entry["schema"], as_tool=as_tool)
        what = "calls" if as_tool else "answers"
        counts[what, kind] = counts.get((what, kind), 0) + 1
        if kind == "refused":
            return
        try:
            value = json.loads(text)
            jsonschema.validators.validator_for(entry["schema"])(entry["schema"]).validate(value)
        except (ValueError, jsonschema.ValidationError):
            if kind == "whole":  # one that ran out of tokens says so
                invalid.append((entry["id"], what))

    begun = time.monotonic()
    client = openai.AsyncOpenAI(base_url=proxy_url, api_key="none", timeout=ANSWER_S, max_retries=8)
    async with client, asyncio.TaskGroup() as group:
        for number, entry in enumerate(entries):
            for as_tool in (False, True):
                # Arguments are always an object.
                if not as_tool or entry["schema"].get("type") == "object":
                    group.create_task(one(number, entry, as_tool=as_tool))
    print(f"{len(entries)} schemas in {time.monotonic() - begun:.0f} s: {counts}, invalid: {invalid}")
    assert sum(count for (_, kind), count in counts.items() if kind == "whole") >= len(entries)
    assert invalid == []
