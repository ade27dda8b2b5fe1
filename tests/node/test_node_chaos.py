"""kill -9 of anything, in the middle of an answer: a clear error at once, and a node that comes back by itself."""

import asyncio
import random
import signal
import time

import pytest

from tie.daemon.errors import TieError
from tie.proto import control_pb2

pytestmark = [pytest.mark.node, pytest.mark.chaos]
NOTICE_S = 2.0
MOMENT = random.SystemRandom()
QUESTION = [{"role": "user", "content": "Tell me a long story."}]


async def begin(client, model):
    """An answer that streams for many seconds."""
    answer = await client.chat(QUESTION, model=model, max_tokens=1500, ignore_eos=True)
    pieces = aiter(answer)
    await anext(pieces)
    return answer


def kill(node, name):
    """Sends SIGKILL to all of the node's processes with that program."""
    found = node.find(name)
    assert found, f"no process called {name}"
    for process in found:
        process.send_signal(signal.SIGKILL)
    return time.monotonic()


async def history(node):
    """The states that the node has gone through lately."""
    return [event.to for event in (await node.status()).events]


@pytest.mark.parametrize(
    "victim",
    [
        "triton_python_backend_stub",
        "tritonserver",
        "supervisor.supervisord",
        "tie.runtime.container",
    ],
)
async def test_a_dead_runtime_is_an_error_at_once_and_is_replaced(node, client, model, served, victim):
    answer = await begin(client, model)
    await asyncio.sleep(MOMENT.uniform(0, 0.5))
    old = (await node.status()).runtime.instance_id
    killed = kill(node, victim)
    with pytest.raises(TieError):
        async with asyncio.timeout(30):
            await answer.result()
    assert time.monotonic() - killed < NOTICE_S
    async with asyncio.timeout(30):
        while (await node.status()).state == control_pb2.STATE_AVAILABLE:
            await asyncio.sleep(0.05)
    assert (await served()).text
    assert (await node.status()).runtime.instance_id != old
    assert set(await history(node)) & {control_pb2.STATE_ERROR, control_pb2.STATE_RECYCLING}


@pytest.mark.parametrize("victim", ["tie-cloud-app", "cb_jobhelper"])
async def test_a_dead_process_of_a_request_is_an_error_for_that_request_alone(node, client, model, served, victim):
    answer = await begin(client, model)
    await asyncio.sleep(MOMENT.uniform(0, 0.5))
    instance = (await node.status()).runtime.instance_id
    killed = kill(node, victim)
    with pytest.raises(TieError):
        async with asyncio.timeout(30):
            await answer.result()
    assert time.monotonic() - killed < NOTICE_S
    assert (await served()).text
    assert (await node.status()).runtime.instance_id == instance


@pytest.mark.parametrize("victim", ["gpuhealthd", "tie-controllerd", "tie-kps", "tie-model-owner", "status_probe.main"])
async def test_a_dead_daemon_comes_back_and_the_answer_goes_on(node, client, model, served, victim):
    answer = await client.chat(QUESTION, model=model, max_tokens=60, ignore_eos=True)
    await anext(aiter(answer))
    await asyncio.sleep(MOMENT.uniform(0, 0.5))
    old = [process.pid for process in node.find(victim)]
    kill(node, victim)
    async with asyncio.timeout(60):
        assert (await answer.result()).completion_tokens == 60
        while not node.find(victim) or [process.pid for process in node.find(victim)] == old:
            await asyncio.sleep(0.05)
    assert (await served()).text


async def test_a_dead_ingress_is_an_error_at_once_and_comes_back(node, client, model, served):
    answer = await begin(client, model)
    killed = kill(node, "tie-cloudboard")
    with pytest.raises(TieError):
        async with asyncio.timeout(30):
            await answer.result()
    assert time.monotonic() - killed < NOTICE_S
    await asyncio.sleep(1)
    assert (await served()).text
