"""The whole path: a sealed request goes in, the answer of a real model streams back."""

import asyncio
import json
import subprocess
import sys

import pytest

from tie.daemon.errors import TieError
from tie.device.async_client import AsyncClient
from tie.device.errors import RequestRefusedError
from tie.envelope.statement import StatementError

pytestmark = pytest.mark.node
QUESTION = [{"role": "user", "content": "Name three colours."}]
ANSWER_S = 60.0


async def ask(client, model, messages=QUESTION, **options):
    async with asyncio.timeout(ANSWER_S):
        answer = await client.chat(messages, model=model, **{"temperature": 0.0, "max_tokens": 24, **options})
        return await answer.result()


async def test_an_answer_streams(client, model):
    async with asyncio.timeout(ANSWER_S):
        answer = await client.chat(QUESTION, model=model, max_tokens=60, ignore_eos=True, temperature=0.0)
        pieces = [delta.text async for delta in answer if delta.text]
        result = await answer.result()
    assert len(pieces) > 3
    assert "".join(pieces) == result.text
    assert result.finish == ("length",)
    assert result.completion_tokens == 60
    assert result.prompt_tokens > 5


async def test_greedy_answers_are_the_same_and_seeds_count(client, model):
    assert (await ask(client, model)).text == (await ask(client, model)).text
    one, again, other = [await ask(client, model, temperature=1.0, seed=seed) for seed in (3, 3, 4)]
    assert one.text == again.text
    assert one.text != other.text


async def test_a_stop_string_ends_the_answer_and_is_not_in_it(client, model):
    whole = (await ask(client, model, max_tokens=40, ignore_eos=True)).text
    stop = whole[10:14]
    cut = await ask(client, model, max_tokens=40, ignore_eos=True, stop=[stop])
    assert cut.finish == ("stop",)
    assert cut.text == whole[: whole.index(stop)]


async def test_a_conversation_is_rendered_whole(client, model):
    history = [*QUESTION, {"role": "assistant", "content": "Red."}, {"role": "user", "content": "And another?"}]
    assert (await ask(client, model, history)).prompt_tokens > (await ask(client, model)).prompt_tokens + 8


async def test_closing_an_answer_stops_the_work_on_it(client, model, node):
    async with asyncio.timeout(ANSWER_S):
        answer = await client.chat(QUESTION, model=model, max_tokens=2000, ignore_eos=True)
        await anext(aiter(answer))
        assert (await node.status()).runtime.running >= 0
        await answer.close()
        while (await node.status()).runtime.running:
            await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    ("messages", "options", "status"),
    [
        (QUESTION, {"model": "no-such-model"}, "STATUS_UNKNOWN_MODEL"),
        ([], {}, "STATUS_INVALID_REQUEST"),
        (QUESTION, {"max_tokens": -1}, "STATUS_INVALID_REQUEST"),
        (QUESTION, {"temperature": -0.5}, "STATUS_INVALID_REQUEST"),
        ([{"role": "user", "content": "word " * 20_000}], {}, "STATUS_PROMPT_TOO_LONG"),
    ],
)
async def test_a_bad_request_gets_its_own_error(client, model, messages, options, status):
    with pytest.raises(RequestRefusedError) as refusal:
        await ask(client, **{"model": model, "messages": messages, **options})
    assert refusal.value.status == status
    assert (await ask(client, model, max_tokens=2)).completion_tokens


async def test_another_fleets_node_is_not_believed(node, model):
    async with AsyncClient(node.url, bytes(range(32))) as stranger:
        with pytest.raises(StatementError):
            await ask(stranger, model)


async def test_no_answer_is_an_error_of_ours(node, model):
    async with AsyncClient("http://127.0.0.1:9", bytes(32)) as client:
        with pytest.raises(TieError):
            await ask(client, model)


def tie(node, *arguments, stdin=""):
    return subprocess.run(
        [sys.executable, "-m", "tie.cli.main", *arguments, "--run-dir", str(node.run_dir)],
        input=stdin, capture_output=True, text=True, timeout=ANSWER_S, check=False,
    )  # fmt: skip


def test_chat_answers_an_argument_and_standard_input(node):
    options = ("--temperature", "0", "--max-tokens", "12")
    argument = tie(node, "chat", *options, "--stats", "Name", "three", "colours.")
    assert (argument.returncode, argument.stdout.strip() != "") == (0, True), argument.stderr
    assert "tokens/s" in argument.stderr
    assert tie(node, "chat", *options, stdin="Name three colours.\n").stdout == argument.stdout
    as_json = json.loads(tie(node, "chat", *options, "--json", "Name three colours.").stdout)
    assert as_json["text"].strip() == argument.stdout.strip()
    assert as_json["completion_tokens"] <= 12


def test_chat_says_what_is_wrong_and_exits_with_a_code(node):
    refused = tie(node, "chat", "--max-tokens", "-3", "Hello")
    assert refused.returncode == 65
    assert "max_tokens" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert tie(node, "chat", "--url", "http://127.0.0.1:9", "Hello").returncode == 69


def test_status_and_metrics_tell(node):
    status = tie(node, "status", "--json")
    assert status.returncode == 0
    told = json.loads(status.stdout)
    assert told["state"] == "available"
    assert told["owner"]["loads"] == 1
    assert "available" in tie(node, "status").stdout
    metrics = tie(node, "metrics").stdout
    assert 'tie_node_state{state="available"} 1.0' in metrics
    assert 'tie_cloudboard_in_flight{daemon="cloudboard"}' in metrics


def test_a_second_node_in_the_same_directory_is_refused(node):
    second = tie(node, "up")
    assert second.returncode == 78
    assert "a node already runs in" in second.stderr
