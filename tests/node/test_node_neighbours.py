"""Two nodes on one machine do not disturb each other."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tie.cli import control
from tie.cli.local_node import LocalNode
from tie.device.async_client import AsyncClient
from tie.proto import control_pb2

pytestmark = [pytest.mark.node, pytest.mark.chaos]
START_S = 240.0
MESSAGE_S = 2.0  # no status is as old as that
QUESTION = [{"role": "user", "content": "Tell me a story."}]


@pytest.fixture
def neighbours(bundle: Path) -> Iterator[tuple[LocalNode, LocalNode]]:
    """Two nodes on the same bundle."""
    nodes: list[LocalNode] = []
    try:
        settings = ("runtime.dtype=f32", "runtime.kv_tokens=4096", "probe.canary_interval_s=1")
        nodes.extend(LocalNode(bundle=bundle, overrides=settings) for _ in range(2))
        for node in nodes:
            asyncio.run(node.wait_for(control_pb2.STATE_AVAILABLE, START_S))
        yield nodes[0], nodes[1]
    finally:
        left = [node.stop() for node in nodes]
    assert left == [[], []]


async def test_what_happens_to_one_is_nothing_to_the_other(neighbours, model_of):
    one, other = neighbours
    before = await other.status()
    async with AsyncClient(other.url, other.config.sockets.statement_key.with_suffix(".pub")) as client:
        answer = await client.chat(QUESTION, model=model_of(other), max_tokens=300, ignore_eos=True)
        await anext(aiter(answer))
        async with control.connected(one.run_dir) as connection:
            async for progress in connection.node.Recycle(control_pb2.RecycleRequest(), timeout=START_S):
                assert not progress.error
        for process in one.find("supervisor.supervisord"):
            process.kill()
        async with asyncio.timeout(START_S):
            assert (await answer.result()).completion_tokens == 300
    await one.wait_for(control_pb2.STATE_AVAILABLE, START_S)
    after = await other.status()
    assert (after.state, after.runtime.instance_id) == (control_pb2.STATE_AVAILABLE, before.runtime.instance_id)
    assert [event.to for event in after.events] == [event.to for event in before.events]
    assert await asyncio.to_thread(one.stop) == []
    gone = time.monotonic()
    async with asyncio.timeout(START_S), control.connected(other.run_dir) as connection:
        async for status in connection.node.Watch(control_pb2.WatchRequest(), timeout=START_S):
            assert status.state == control_pb2.STATE_AVAILABLE
            if status.runtime.last_canary.age_s < time.monotonic() - gone - MESSAGE_S:
                break  # its runtime has been asked since
    assert status.runtime.last_canary.ok
    assert [event.to for event in status.events] == [event.to for event in before.events]


@pytest.fixture
def model_of():
    """The id of the model that a node serves."""
    from tie.assets.bundle import open_bundle

    return lambda node: open_bundle(Path(node.config.model.bundle)).manifest.model
