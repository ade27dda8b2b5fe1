"""kill -9 of anything, in the middle of an answer: a clear error at once, and a node that comes back by itself."""

import asyncio
import contextlib
import random
import signal
import time

import psutil
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


def running(node, command):
    """The node's processes whose command line has these words."""
    found = []
    for process in node.processes():
        with contextlib.suppress(psutil.Error):
            if command in " ".join(process.cmdline()):
                found.append(process)
    return found


def kill(node, command):
    """Sends SIGKILL to all of the node's processes with these words on their command line."""
    found = running(node, command)
    assert found, f"no process called {command}"
    for process in found:
        process.send_signal(signal.SIGKILL)
    return time.monotonic()


async def history(node):
    """The states that the node has gone through lately."""
    return [event.to for event in (await node.status()).events]


async def lost_since(node, moment):
    """Whether the node has known of an error since then."""
    events = (await node.status()).events
    return any(event.to == control_pb2.STATE_ERROR and event.age_s < time.monotonic() - moment for event in events)


@pytest.mark.parametrize(
    "victim",
    [
        "triton_python_backend_stub ",
        "bin/tritonserver ",
        "supervisor.supervisord",
        "tie.runtime.container",  # all three at once
        "tie.runtime.container guard",
        "tie.runtime.container watch",
        "tie.runtime.container serve",
        "status_probe.main",
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


@pytest.mark.parametrize("victim", ["bin/tie-cloud-app", "bin/cb_jobhelper"])
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


@pytest.mark.parametrize(
    "victim", ["bin/gpuhealthd", "bin/tie-controllerd", "bin/tie-kps", "bin/tie-model-owner", "bin/tie-cache-stored"]
)
async def test_a_dead_daemon_comes_back_and_the_answer_goes_on(node, client, model, served, victim):
    answer = await client.chat(QUESTION, model=model, max_tokens=60, ignore_eos=True)
    await anext(aiter(answer))
    await asyncio.sleep(MOMENT.uniform(0, 0.5))
    old = [process.pid for process in running(node, victim)]
    kill(node, victim)
    async with asyncio.timeout(60):
        assert (await answer.result()).completion_tokens == 60
        while not (now := [process.pid for process in running(node, victim)]) or now == old:
            await asyncio.sleep(0.05)
    assert (await served()).text


async def test_a_dead_ingress_is_an_error_at_once_and_comes_back(node, client, model, served):
    answer = await begin(client, model)
    killed = kill(node, "bin/tie-cloudboard")
    with pytest.raises(TieError):
        async with asyncio.timeout(30):
            await answer.result()
    assert time.monotonic() - killed < NOTICE_S
    async with asyncio.timeout(30):
        while not await lost_since(node, killed):
            await asyncio.sleep(0.05)
    assert (await served()).text
