"""kill -9 of any process of the container: everything goes, nothing is left, and the next one starts.

`node.launch` waits until the next runtime is ready, which it would not be beside remains of the last one.
"""

import asyncio

import pytest

from status_probe.engine_client import DeathNotice
from tie.daemon import rpc
from tie.daemon.triton import TritonClient
from tie.proto import probe_pb2, probe_pb2_grpc
from tie.proto import runtime_pb2 as pb

WAIT_S = 60.0


async def generate(node, count=4) -> int:
    async with TritonClient(node.sockets.triton) as client:
        message = pb.GenerateRequest(token_ids=[1, 2], max_tokens=count, ignore_eos=True)
        events = [event async for event in client.generate(message, timeout=WAIT_S)]
        return events[-1].finished.completion_tokens


@pytest.mark.parametrize("victim", ["triton", "serve", "probe", "guard", "watch", "supervisord"])
async def test_the_death_of_any_process_takes_the_container_down(node, victim):
    runtime = node.launch()
    assert await generate(node) == 4
    if victim == "supervisord":
        runtime.process.kill()
    else:
        runtime.member(victim).kill()
    await asyncio.to_thread(runtime.wait_gone)
    assert node.shm_regions() == []
    if victim != "supervisord":
        assert runtime.has("container.down")


async def test_a_killed_stub_is_noticed_at_once_and_recycled_away(node):
    runtime = node.launch()
    async with rpc.connect(node.sockets.probe) as channel:
        probe = probe_pb2_grpc.StatusProbeStub(channel)
        watch = probe.Watch(probe_pb2.WatchRequest())
        assert (await watch.read()).state == probe_pb2.STATE_READY
        notice = await DeathNotice.connect(node.sockets.kv, timeout=WAIT_S)
        died = asyncio.Event()
        notice.watch(died.set)
        runtime.member("stub").kill()
        async with asyncio.timeout(2):
            await died.wait()
            while (status := await watch.read()).state == probe_pb2.STATE_READY:
                pass
        notice.close()
        assert status.state == probe_pb2.STATE_IN_ERROR
        assert list(status.reasons) == ["engine-gone"]
        # Triton itself has noticed nothing, which is why the probe looks elsewhere.
        assert runtime.member("triton").is_running()
        watch.cancel()
        await probe.Recycle(probe_pb2.RecycleRequest(reason="error", drain_deadline_ms=1000), timeout=WAIT_S)
    await asyncio.to_thread(runtime.wait_gone)
    assert node.shm_regions() == []


async def test_a_client_that_holds_an_idle_stream_does_not_keep_the_container_alive(node):
    from tie.daemon.triton import service_pb2_grpc

    runtime = node.launch()
    async with rpc.connect(node.sockets.triton) as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(timeout=WAIT_S)
        await call.wait_for_connection()
        await asyncio.wait_for(asyncio.to_thread(runtime.stop), 15)
        call.cancel()


def test_an_engine_that_cannot_start_ends_the_container_with_a_reason(node):
    lonely = node.directory / "lonely.toml"
    lonely.write_text(
        f'run_dir = "{node.directory}/lonely"\n[model]\nbundle = "{node.directory}/bundle"\n'
        "[probe]\nstart_deadline_s = 0.5\n"
    )
    log = node.directory / "lonely.log"
    assert node.start("tie.runtime.launch", log, lonely).wait(WAIT_S) == 0
    assert "the model owner gave no weights within the deadline" in log.read_text()


async def test_stopping_lets_requests_in_flight_finish(node):
    runtime = node.launch()
    async with TritonClient(node.sockets.triton) as client:
        message = pb.GenerateRequest(token_ids=[1, 2], max_tokens=900, ignore_eos=True)
        events = client.generate(message, timeout=WAIT_S)
        first = await anext(events)
        assert first.HasField("tokens")
        runtime.process.terminate()
        last = first
        async for event in events:
            last = event
    assert last.finished.reason == pb.REASON_LENGTH
    assert last.finished.completion_tokens == 900
    await asyncio.to_thread(runtime.wait_gone)


@pytest.fixture(autouse=True)
def _nothing_left(node):
    yield
    for runtime in node.runtimes:
        runtime.stop()
