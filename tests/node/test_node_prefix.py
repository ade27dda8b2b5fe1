"""The system-prompt prefix cache on a real node: warmed before it is advertised, restored by the next runtime."""

import asyncio
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from node_log import SAVED, logged
from tie.assets.bundle import open_bundle
from tie.cli import control
from tie.device.conversations import Conversation
from tie.proto import control_pb2, owner_pb2

pytestmark = pytest.mark.node
BLOCK = 16
QUESTION = "How far away is the moon?"


async def metrics(node) -> dict[str, float]:
    """The node's metrics: sums over all labels."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tie.cli.main", "metrics", "--run-dir", str(node.run_dir)),
        stdout=asyncio.subprocess.PIPE,
    )
    text, _ = await process.communicate()
    sums: dict[str, float] = {}
    for line in text.decode().splitlines():
        if sample := re.fullmatch(r"(\w+)(?:\{.*\})? ([0-9.e+]+)", line):
            sums[sample[1]] = sums.get(sample[1], 0.0) + float(sample[2])
    return sums


@pytest.fixture
def registered(node):
    """The longest registered prompt of the bundle."""
    prompts = open_bundle(Path(node.config.model.bundle)).manifest.system_prompts
    return max(prompts, key=lambda prompt: len(prompt.token_ids))


@pytest.fixture
def ask(client, model):
    async def ask(system: str, question: str = QUESTION):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        return await (await client.chat(messages, model=model, max_tokens=12, temperature=0.0)).result()

    return ask


async def recycle(node):
    async with control.connected(node.run_dir) as connection:
        async for progress in connection.node.Recycle(control_pb2.RecycleRequest(reason="operator"), timeout=120):
            if progress.finished:
                assert progress.error == ""


async def told(node, condition, timeout=10.0):
    """The status, once what the probe says every second has come through."""
    deadline = time.monotonic() + timeout
    while not condition(status := await node.status()):
        assert time.monotonic() < deadline, status.runtime.prefix
        await asyncio.sleep(0.1)
    return status


async def test_registered_prompts_are_there_before_the_node_is(node, ask, registered):
    status = await told(node, lambda status: status.runtime.prefix.state == "sealed")
    assert status.owner.pool_stage == owner_pb2.POOL_STAGE_SEALED
    assert status.owner.pool_blocks == status.runtime.prefix.blocks >= len(registered.token_ids) // BLOCK
    before = await metrics(node)
    answers = [await ask(registered.text), await ask(registered.text, "What is a star?")]
    whole = len(registered.token_ids) // BLOCK * BLOCK
    assert [answer.cached_tokens for answer in answers] == [whole, whole]
    after = await metrics(node)
    assert after["tie_runtime_prefix_hits_total"] == before["tie_runtime_prefix_hits_total"] + 2
    assert after["tie_runtime_prefix_tokens_total"] == before["tie_runtime_prefix_tokens_total"] + 2 * whole
    assert after["tie_owner_pool_seals_total"] == 1


async def test_a_prompt_that_is_not_registered_is_computed(node, ask, registered):
    first, second = [await ask("Speak like a sailor. " * 10) for _ in range(2)]
    assert (first.text, first.cached_tokens, second.cached_tokens) == (second.text, 0, 0)


async def test_a_conversation_leaves_the_shared_prefix_out_and_goes_on_after_it(node, client, model, registered):
    """Through a recycle: its own blocks come from its entries, the prompt's from the pool."""
    system = [{"role": "system", "content": registered.text}]
    kept, plain = Conversation(system), Conversation(system, reusable=False)
    whole = len(registered.token_ids) // BLOCK * BLOCK
    reused = []
    for turn, question in enumerate(("What is a star?", "And a planet?", "Which one is nearest?")):
        if turn == 2:
            await recycle(node)
            await node.wait_for(control_pb2.STATE_AVAILABLE, 90)
        answers = []
        async with logged(node, SAVED):
            for each in (kept, plain):
                answer = await client.chat(
                    each.asking(question), model=model, temperature=0.0, max_tokens=24, **each.options
                )
                answers.append(await answer.result())
                each.answered(question, answers[-1].text)
        assert answers[0].text == answers[1].text
        assert answers[1].cached_tokens == whole
        reused.append(answers[0].cached_tokens)
    assert whole == reused[0] < reused[1] < reused[2]


async def test_the_next_runtime_computes_no_registered_prompt(node, ask, registered, served):
    answer = await ask(registered.text)
    before = await node.status()
    await recycle(node)
    await served()
    after = await told(node, lambda status: status.runtime.prefix.restored)
    assert after.runtime.instance_id != before.runtime.instance_id
    assert after.runtime.prefix.state == "sealed"
    assert (after.owner.pool_seals, after.owner.pool_restores) == (
        before.owner.pool_seals,
        before.owner.pool_restores + 1,
    )
    assert after.owner.pool_resets == 0
    again = await ask(registered.text)
    assert (again.text, again.cached_tokens) == (answer.text, answer.cached_tokens)
    counted = await metrics(node)
    # Canaries and the two requests: had the prompts been computed, it would be hundreds more.
    assert counted["tie_runtime_computed_tokens_total"] < len(registered.token_ids)


async def test_a_killed_owner_is_noticed_replaced_and_warmed_again(node, ask, registered, served):
    answer = await ask(registered.text)
    before = await node.status()
    (owner,) = node.find("tie-model-owner")
    began = time.monotonic()
    owner.send_signal(signal.SIGKILL)
    await told(node, lambda status: status.state != control_pb2.STATE_AVAILABLE)
    withdrawn = time.monotonic() - began
    assert (await served()).text
    after = await told(node, lambda status: status.runtime.prefix.state == "sealed")
    assert after.owner.owner_instance != before.owner.owner_instance
    assert after.runtime.instance_id != before.runtime.instance_id
    assert (after.runtime.prefix.restored, after.owner.pool_seals) == (False, 1)
    again = await ask(registered.text)
    assert (again.text, again.cached_tokens) == (answer.text, answer.cached_tokens)
    print(f"withdrawn after {withdrawn:.2f} s")
