"""Conversations with a turn key: the same answers as without, reuse at each turn, and survival of what may end."""

import asyncio
import contextlib
import json
import os
import random
import secrets
import signal

import grpc
import pytest

from node_log import SAVED, logged
from tie.cli import control
from tie.device.conversations import Conversation
from tie.device.errors import RequestRefusedError
from tie.proto import control_pb2, metrics_pb2, metrics_pb2_grpc

pytestmark = pytest.mark.node
TURNS = 10
BLOCK = 16
SYSTEM = {"role": "system", "content": "You are a guide who knows rivers and says so in few words. " * 6}


@pytest.fixture
def say(node, client, model):
    """One greedy turn, from the question to the moment at which the node has saved it."""

    async def say(conversation, text, *, max_tokens=24, wait=True):
        async with logged(node, SAVED, times=1 if conversation.options and wait else 0):
            answer = await client.chat(
                conversation.asking(text), model=model, temperature=0.0, max_tokens=max_tokens, **conversation.options
            )
            return await answer.result()

    return say


def stores(node) -> int:
    """How many stores have begun to serve, one after another."""
    lines = node.log_text().splitlines()
    return sum('"daemon.ready"' in line and '"tie-cache-stored"' in line for line in lines)


async def test_ten_turns_answer_the_same_with_and_without_a_key(node, say, served):
    """Through a recycle of the runtime before the fifth turn, and a new, empty store before the eighth."""
    cached, plain = Conversation([SYSTEM]), Conversation([SYSTEM], reusable=False)
    reused = []
    for turn in range(TURNS):
        if turn == 4:
            async with control.connected(node.run_dir) as connection:
                async for progress in connection.node.Recycle(
                    control_pb2.RecycleRequest(reason="operator"), timeout=120
                ):
                    if progress.finished:
                        break
            await served()
        if turn == 7:
            before = stores(node)
            (process,) = node.find("tie-cache-stored")
            process.send_signal(signal.SIGKILL)
            async with asyncio.timeout(30):
                while stores(node) == before:
                    await asyncio.sleep(0.1)
        question = f"What is special about river number {turn}?"
        with_key, without = await say(cached, question), await say(plain, question)
        assert with_key.text == without.text, f"turn {turn}"
        assert (with_key.prompt_tokens, with_key.completion_tokens) == (
            without.prompt_tokens,
            without.completion_tokens,
        )
        assert without.cached_tokens == 0
        reused.append((with_key.cached_tokens, with_key.prompt_tokens))
        cached.answered(question, with_key.text)
        plain.answered(question, without.text)
    assert [turn for turn, (tokens, _) in enumerate(reused) if tokens == 0] == [0, 7]
    for turn, (tokens, prompt) in enumerate(reused):
        if turn not in (0, 7):
            # All but this turn's question and what is left of a block.
            assert tokens % BLOCK == 0
            assert prompt - tokens < 4 * BLOCK


async def test_another_key_finds_nothing_and_the_right_one_still_does(say):
    mine, other = Conversation([SYSTEM]), Conversation([SYSTEM])
    first = await say(mine, "Name a river.")
    mine.answered("Name a river.", first.text)
    stranger = Conversation(mine.messages)
    assert (await say(stranger, "And another?")).cached_tokens == 0
    assert (await say(other, "Name a river.")).cached_tokens == 0
    assert (await say(mine, "And another?")).cached_tokens > 0


async def test_an_edited_history_reuses_what_it_shares(say):
    conversation = Conversation([SYSTEM])
    for question in ("Name a river.", "Name a longer one.", "Name the longest."):
        conversation.answered(question, (await say(conversation, question)).text)
    whole = len(conversation.messages)
    conversation.messages[3] = {"role": "user", "content": "No rivers any more: name a mountain."}
    del conversation.messages[4:]
    edited = await say(conversation, "And its height?")
    assert whole == 7
    assert 0 < edited.cached_tokens < edited.prompt_tokens
    plain = Conversation(conversation.messages, reusable=False)
    assert edited.text == (await say(plain, "And its height?")).text


async def test_two_at_once_with_one_key_do_not_mix(node, say):
    conversation = Conversation([SYSTEM])
    conversation.answered("Name a river.", (await say(conversation, "Name a river.")).text)
    questions = ["How long is it?", "Where does it end?", "Who lives there?"]
    plain = Conversation(conversation.messages, reusable=False)
    expected = [(await say(plain, question)).text for question in questions]
    for _ in range(2):
        async with logged(node, SAVED, times=len(questions)):
            together = await asyncio.gather(*(say(conversation, question, wait=False) for question in questions))
        assert [result.text for result in together] == expected


@pytest.mark.chaos
async def test_an_app_that_dies_before_it_has_saved_costs_the_reuse_and_nothing_else(node, client, model, say):
    """SIGKILL between `done` and the end of the export: the next turn finds the old head or the new one, whole."""
    conversation, plain = Conversation([SYSTEM]), Conversation([SYSTEM], reusable=False)
    chance = random.Random(13)  # noqa: S311 (when to kill)
    saved, reused = [], []
    for turn in range(8):
        question = f"What is special about river number {turn}?"
        before = node.log_text().count(SAVED)
        answer = await client.chat(
            conversation.asking(question), model=model, temperature=0.0, max_tokens=24, **conversation.options
        )
        result = await answer.result()
        done = [line for line in node.log_text().splitlines() if '"app.done"' in line][-1]
        await asyncio.sleep(chance.uniform(0, 0.03))
        with contextlib.suppress(ProcessLookupError):
            os.kill(json.loads(done)["pid"], signal.SIGKILL)
        assert result.text == (await say(plain, question)).text, f"turn {turn}"
        conversation.answered(question, result.text)
        plain.answered(question, result.text)
        saved.append(node.log_text().count(SAVED) > before)
        reused.append(result.cached_tokens)
    for turn in range(1, len(saved)):
        if saved[turn - 1]:
            assert reused[turn] > reused[turn - 1]
        assert reused[turn] >= reused[turn - 1], "an older head came back"
    # And with a turn that is left alone the conversation is whole again.
    assert (await say(conversation, "Name one.")).text == (await say(plain, "Name one.")).text
    assert (await say(conversation, "Name another.")).cached_tokens > max(reused)


def held(node) -> dict[str, float]:
    """What the store has and has had."""
    with grpc.insecure_channel(f"unix:{node.config.sockets.store_control}") as channel:
        text = metrics_pb2_grpc.MetricsStub(channel).Scrape(metrics_pb2.ScrapeRequest(), timeout=10).text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    return {
        "entries": float(values["tie_store_entries"]),
        "filed": float(values["tie_store_entries_filed_total"]),
    }


async def test_a_request_without_a_key_leaves_nothing_in_the_store(node, say):
    before = held(node)
    async with logged(node, "app.request-cached", times=2):
        answers = [(await say(Conversation([SYSTEM], reusable=False), "Name a river.")) for _ in range(2)]
    assert [answer.cached_tokens for answer in answers] == [0, 0]
    assert answers[0].text == answers[1].text
    async with asyncio.timeout(30):
        while held(node)["entries"] > before["entries"]:
            await asyncio.sleep(0.02)
    assert held(node)["filed"] >= before["filed"] + 4  # a segment and a head each


async def test_a_key_of_another_length_is_refused(client, model):
    with pytest.raises(RequestRefusedError) as refused:
        await (await client.chat([SYSTEM], model=model, turn_key=secrets.token_bytes(16))).result()
    assert "turn_key" in f"{refused.value} {refused.value.hint}"
