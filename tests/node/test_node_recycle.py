"""Recycling: requests in flight finish, new ones are refused, and the weights stay where they are."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tie.assets.bundle import open_bundle
from tie.cli import control
from tie.cli.evidence import WeightWatch, identity
from tie.device.errors import NodeBusyError, NodeFailedError
from tie.proto import control_pb2

pytestmark = pytest.mark.node
RECYCLE_S = 120.0
NOTICE_S = 3.0
QUESTION = [{"role": "user", "content": "Tell me about rivers."}]


async def recycle(node, states, drain_ms=0):
    """Runs a recycle to its end and notes the states on the way."""
    request = control_pb2.RecycleRequest(reason="operator", drain_deadline_ms=drain_ms)
    async with control.connected(node.run_dir) as connection:
        async for progress in connection.node.Recycle(request, timeout=RECYCLE_S):
            states.append(progress.state)
            if progress.finished:
                return progress
    raise AssertionError("the progress ended early")


async def withdrawn(node, begin):
    """Waits until CloudBoard is busy, by the log since a place; the controller is draining a moment before it hears."""
    async with asyncio.timeout(30):
        while not any('"registry.state"' in line and '"busy"' in line for line in node.log_text()[begin:].splitlines()):
            await asyncio.sleep(0.02)


async def test_in_flight_finishes_and_new_requests_are_refused_unopened(node, client, model, served):
    answer = await client.chat(QUESTION, model=model, max_tokens=200, ignore_eos=True)
    await anext(aiter(answer))
    states = []
    begin = len(node.log_text())
    recycling = asyncio.create_task(recycle(node, states))
    await withdrawn(node, begin)
    begin = len(node.log_text())
    with pytest.raises(NodeBusyError):
        await client.chat(QUESTION, model=model)
    assert "app.done" not in node.log_text()[begin:]
    async with asyncio.timeout(60):
        result = await answer.result()
    assert (result.finish, result.completion_tokens) == (("length",), 200)
    progress = await recycling
    assert progress.error == ""
    assert {control_pb2.STATE_DRAINING, control_pb2.STATE_RECYCLING} <= set(states)
    assert (await served()).text


async def test_a_request_that_does_not_end_is_cut_at_the_deadline_and_told_why(node, client, model, served):
    answer = await client.chat(QUESTION, model=model, max_tokens=3000, ignore_eos=True)
    await anext(aiter(answer))
    began = time.monotonic()
    recycling = asyncio.create_task(recycle(node, [], drain_ms=2000))
    with pytest.raises(NodeFailedError, match="send it again") as cut:
        async with asyncio.timeout(30):
            await answer.result()
    assert 1.0 < time.monotonic() - began < 2.0 + NOTICE_S
    assert cut.value.status == "STATUS_REPLACED"
    assert (await recycling).error == ""
    assert (await served()).text


async def test_events_tell_of_the_night(node, client, model, served):
    await recycle(node, [])
    command = [sys.executable, "-m", "tie.cli.main", "events", "--run-dir", str(node.run_dir)]
    told = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60, check=True)
    for words in ("a recycle began, because an operator asked for it", "the recycle is done", "the node is in service"):
        assert words in told.stdout
    command[3] = "gpu"
    told = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60, check=True)
    assert "cpu provider" in told.stdout
    assert "healthy" in told.stdout


async def test_a_recycle_reads_no_weights(node, client, model, served):
    bundle = open_bundle(Path(node.config.model.bundle))
    greedy = {"model": model, "max_tokens": 16, "temperature": 0.0}
    before_text = (await (await client.chat(QUESTION, **greedy)).result()).text
    before = await node.status()
    owners = [identity(process) for process in node.find("tie-model-owner")]
    watch = WeightWatch(bundle.directory, bundle.manifest.weights)
    progress = await recycle(node, [])
    assert watch.count() == (0, 0)
    await served()
    after = await node.status()
    assert progress.old_instance_id == before.runtime.instance_id != after.runtime.instance_id
    assert [identity(process) for process in node.find("tie-model-owner")] == owners
    assert after.owner.owner_instance == before.owner.owner_instance
    assert after.owner.weight_bytes_read == before.owner.weight_bytes_read > 0
    assert after.owner.attaches == before.owner.attaches + 1
    assert (await (await client.chat(QUESTION, **greedy)).result()).text == before_text


async def test_the_watch_on_the_weights_sees_a_reader(node):
    bundle = open_bundle(Path(node.config.model.bundle))
    watch = WeightWatch(bundle.directory, bundle.manifest.weights)
    with bundle.path(bundle.manifest.weights[0]).open("rb") as file:
        file.read(4096)
    opens, reads = watch.count()
    assert (opens, reads > 0) == (1, True)


async def test_maintenance_withdraws_the_node_until_it_is_switched_off(node, client, model, served):
    async with control.connected(node.run_dir) as connection:
        await connection.node.SetMaintenance(control_pb2.SetMaintenanceRequest(on=True), timeout=10)
    await node.wait_for(control_pb2.STATE_MAINTENANCE, RECYCLE_S)
    with pytest.raises(NodeBusyError):
        await client.chat(QUESTION, model=model)
    async with control.connected(node.run_dir) as connection:
        await connection.node.SetMaintenance(control_pb2.SetMaintenanceRequest(on=False), timeout=10)
    assert (await served()).text
