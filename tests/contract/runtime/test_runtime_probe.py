"""tie-status-probe over a real runtime: status, watch, warm, metrics, recycle."""

import asyncio
import contextlib
import signal

import grpc
import pytest

from tie.daemon import rpc
from tie.daemon.triton import TritonClient
from tie.proto import metrics_pb2, metrics_pb2_grpc, owner_pb2, owner_pb2_grpc, probe_pb2, probe_pb2_grpc
from tie.proto import runtime_pb2 as pb

WAIT_S = 60.0


@pytest.fixture
async def probe(runtime, node):
    async with rpc.connect(node.sockets.probe) as channel:
        yield probe_pb2_grpc.StatusProbeStub(channel)


async def test_ready_says_what_runs(probe):
    status = await probe.GetStatus(probe_pb2.GetStatusRequest(), timeout=WAIT_S)
    assert status.state == probe_pb2.STATE_READY
    assert len(status.instance_id) == 32
    assert status.last_canary.ok
    assert 0 < status.last_canary.latency_s < 5
    assert (status.model, status.executor) == ("sample", "torch-cpu-f32")


async def test_a_call_without_a_deadline_is_refused(probe):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await probe.GetStatus(probe_pb2.GetStatusRequest())
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_watch_speaks_at_once_and_goes_on(probe):
    watch = probe.Watch(probe_pb2.WatchRequest(), timeout=WAIT_S)
    ages = [(await watch.read()).uptime_s for _ in range(3)]
    assert ages == sorted(ages)
    watch.cancel()


async def test_warm_runs_the_registered_prompts_and_says_so(probe):
    progress = [step async for step in probe.Warm(probe_pb2.WarmRequest(), timeout=WAIT_S)]
    assert [(step.done, step.total) for step in progress] == [(0, 1), (1, 1)]
    status = await probe.GetStatus(probe_pb2.GetStatusRequest(), timeout=WAIT_S)
    assert status.warmed
    assert status.state == probe_pb2.STATE_READY


async def test_metrics_are_the_engines(runtime, node):
    async with rpc.connect(node.sockets.probe) as channel:
        scrape = metrics_pb2_grpc.MetricsStub(channel).Scrape
        text = (await scrape(metrics_pb2.ScrapeRequest(), timeout=WAIT_S)).text
    assert 'tie_runtime_requests_total{kind="canary",outcome="length"}' in text
    assert "tie_runtime_steps_total" in text


async def test_a_canary_passes_while_every_place_is_taken(probe, node):
    async def crowd(client, index):
        message = pb.GenerateRequest(token_ids=[index + 1] * 400, max_tokens=500, ignore_eos=True)
        return [event async for event in client.generate(message, timeout=WAIT_S)][-1]

    async with TritonClient(node.sockets.triton) as client:
        ends = asyncio.gather(*(crowd(client, index) for index in range(16)))
        states, canaries = set(), set()
        while not ends.done():
            status = await probe.GetStatus(probe_pb2.GetStatusRequest(), timeout=WAIT_S)
            states.add(status.state)
            canaries.add(status.last_canary.ok)
            await asyncio.sleep(0.05)
    assert all(event.HasField("finished") for event in await ends)
    assert states == {probe_pb2.STATE_READY}
    assert canaries == {True}


@contextlib.contextmanager
def stopped(process):
    """Holds a process for the length of the block."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


async def told(probe, condition) -> probe_pb2.RuntimeStatus:
    """The first status for which `condition` holds."""
    async with asyncio.timeout(WAIT_S):
        watch = probe.Watch(probe_pb2.WatchRequest(), timeout=WAIT_S)
        try:
            while not condition(status := await watch.read()):
                pass
        finally:
            watch.cancel()
    return status


async def test_a_late_canary_beside_an_engine_at_work_is_no_failure(runtime, node, probe):
    """As many long answers as the runtime takes: more work than there is time until a canary is late."""
    async with TritonClient(node.sockets.triton) as client:
        message = pb.GenerateRequest(token_ids=[1, 2], max_tokens=900, ignore_eos=True)
        answers = [client.generate(message, timeout=WAIT_S) for _ in range(16)]
        first = asyncio.gather(*(anext(events) for events in answers[:8]))
        rest = asyncio.gather(*(anext(events) for events in answers[8:]))
        await first
        with stopped(runtime.member("triton")):  # the engine works on; only the way to it is held up
            status = await told(probe, lambda status: status.last_canary.error != "")
        assert (status.state, status.last_canary.ok) == (probe_pb2.STATE_READY, True)
        assert status.last_canary.error == "canary-late"
        await rest
        for events in answers:
            assert [event async for event in events][-1].finished.completion_tokens == 900


async def test_recycle_drains_refuses_and_is_followed_by_a_fresh_runtime_on_the_same_weights(runtime, node, probe):
    async with rpc.connect(node.sockets.owner_control) as channel:
        owner = owner_pb2_grpc.ModelOwnerStub(channel)
        before = await owner.GetStatus(owner_pb2.GetStatusRequest(), timeout=WAIT_S)
        async with TritonClient(node.sockets.triton) as client:
            message = pb.GenerateRequest(token_ids=[1, 2], max_tokens=900, ignore_eos=True)
            events = client.generate(message, timeout=WAIT_S)
            await anext(events)
            reply = await probe.Recycle(
                probe_pb2.RecycleRequest(reason="operator", drain_deadline_ms=30_000), timeout=WAIT_S
            )
            assert reply.in_flight >= 1
            status = await probe.GetStatus(probe_pb2.GetStatusRequest(), timeout=WAIT_S)
            assert status.state == probe_pb2.STATE_RECYCLING
            late = [event async for event in client.generate(message, timeout=WAIT_S)]
            assert late[-1].failed.code == pb.CODE_DRAINING
            rest = [event async for event in events]
            assert rest[-1].finished.completion_tokens == 900
        await asyncio.to_thread(runtime.wait_gone)
        assert runtime.process.returncode == 0
        assert node.shm_regions() == []

        fresh = await asyncio.to_thread(node.launch)
        async with rpc.connect(node.sockets.probe) as new:
            status = await probe_pb2_grpc.StatusProbeStub(new).GetStatus(probe_pb2.GetStatusRequest(), timeout=WAIT_S)
        assert status.instance_id != reply.instance_id
        after = await owner.GetStatus(owner_pb2.GetStatusRequest(), timeout=WAIT_S)
        assert (after.owner_instance, after.weight_bytes_read) == (before.owner_instance, before.weight_bytes_read)
        assert after.attaches == before.attaches + 1
    await asyncio.to_thread(fresh.stop)
