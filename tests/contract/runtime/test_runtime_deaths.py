"""kill -9 of any process of the container: everything goes, nothing is left, and the next one starts.

`node.launch` waits until the next runtime is ready, which it would not be beside remains of the last one.
"""

import asyncio
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from status_probe.engine_client import DeathNotice
from tie.daemon import rpc
from tie.daemon.errors import PeerError
from tie.daemon.triton import TritonClient
from tie.proto import probe_pb2, probe_pb2_grpc
from tie.proto import runtime_pb2 as pb
from tie.runtime.environment import remove_stale_regions, shm_prefix

WAIT_S = 60.0
NOTICE_S = 2.0
CONTEXT_TOKENS = 16384  # of `node`: an answer of that length takes half a minute
LONG = CONTEXT_TOKENS - 8


async def generate(node, count=4) -> int:
    async with TritonClient(node.sockets.triton) as client:
        message = pb.GenerateRequest(token_ids=[1, 2], max_tokens=count, ignore_eos=True)
        events = [event async for event in client.generate(message, timeout=WAIT_S)]
        return events[-1].finished.completion_tokens


async def stream_until_cut(node, break_it) -> float:
    """Breaks the runtime in the middle of a long answer; how many seconds later its client had its error."""
    async with TritonClient(node.sockets.triton) as client:
        message = pb.GenerateRequest(token_ids=[1, 2], max_tokens=LONG, ignore_eos=True)
        events = client.generate(message, timeout=WAIT_S)
        assert (await anext(events)).HasField("tokens")
        broken = time.monotonic()
        break_it()
        with pytest.raises(PeerError):
            async for _ in events:
                pass
        return time.monotonic() - broken


@pytest.mark.parametrize("victim", ["triton", "serve", "probe", "guard", "watch", "supervisord"])
async def test_the_death_of_any_process_takes_the_container_down_at_once(node, victim):
    runtime = node.launch()
    assert await generate(node) == 4
    kill = runtime.process.kill if victim == "supervisord" else runtime.member(victim).kill
    assert await stream_until_cut(node, kill) < NOTICE_S
    await asyncio.to_thread(runtime.wait_gone)
    assert node.shm_regions() == []
    if victim != "supervisord":
        assert runtime.has("container.down")


# Stands in for status_probe.main: ends as the file beside it says, at once or when told.
PROBE = """
import os, pathlib, signal, time
from tie.daemon.notify import notify
how = (pathlib.Path(__file__).parent.parent / "how").read_text().split()
signal.signal(signal.SIGUSR1, lambda *_: os._exit(int(how[1])))
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
if how[0] == "at-once":
    os._exit(int(how[1]))
while True:
    if how[0] != "silent":
        notify("WATCHDOG=1")
    time.sleep(1)
"""


def launch_with_probe(node, how: str):
    folder = node.directory / "substitute"
    (folder / "status_probe").mkdir(parents=True, exist_ok=True)
    (folder / "status_probe" / "main.py").write_text(PROBE)
    (folder / "how").write_text(how)
    return node.begin(PYTHONPATH=str(folder))


async def ready(node) -> None:
    async with asyncio.timeout(WAIT_S), TritonClient(node.sockets.triton) as client:
        while not await client.ready(timeout=5):
            await asyncio.sleep(0.1)


async def test_a_probe_that_exits_with_an_error_takes_the_container_down_at_once(node):
    runtime = launch_with_probe(node, "when-told 1")
    await ready(node)
    runtime.identify()
    assert await stream_until_cut(node, lambda: runtime.member("probe").send_signal(signal.SIGUSR1)) < NOTICE_S
    await asyncio.to_thread(runtime.wait_gone)
    assert runtime.has("container.down", reason="probe-died")


async def test_a_probe_that_exits_with_success_lets_requests_in_flight_finish(node):
    runtime = launch_with_probe(node, "when-told 0")
    await ready(node)
    runtime.identify()
    async with TritonClient(node.sockets.triton) as client:
        message = pb.GenerateRequest(token_ids=[1, 2], max_tokens=500, ignore_eos=True)
        events = client.generate(message, timeout=WAIT_S)
        await anext(events)
        runtime.member("probe").send_signal(signal.SIGUSR1)
        last = [event async for event in events][-1]
    assert last.finished.completion_tokens == 500
    await asyncio.to_thread(runtime.wait_gone)
    assert runtime.has("container.down", reason="probe-ended")
    assert runtime.process.returncode == 0


@pytest.mark.parametrize("code", [0, 1])
def test_a_probe_that_ends_before_anything_has_started_takes_the_container_down(node, code):
    runtime = launch_with_probe(node, f"at-once {code}")
    runtime.process.wait(WAIT_S)
    assert runtime.has("container.down", reason="probe-died" if code else "probe-ended")


def test_a_probe_that_hangs_takes_the_container_down(node):
    runtime = launch_with_probe(node, "silent 0")
    runtime.process.wait(WAIT_S + 30)
    assert runtime.has("container.down", reason="probe-hung")


async def test_both_keepers_killed_at_once_still_take_the_container_down(node):
    runtime = node.launch()

    def kill() -> None:
        runtime.member("guard").kill()
        runtime.member("watch").kill()

    assert await stream_until_cut(node, kill) < NOTICE_S
    await asyncio.to_thread(runtime.wait_gone)


def test_a_runtime_killed_while_it_starts_leaves_nothing_for_long(node):
    gone = subprocess.Popen(["true"])
    gone.wait()
    stale, live, foreign = (
        Path("/dev/shm") / name
        for name in (
            shm_prefix("/elsewhere", gone.pid, "0" * 32) + "-x",
            shm_prefix("/elsewhere", os.getpid(), "0" * 32) + "-x",
            f"tie-other-{gone.pid}",
        )
    )
    try:
        for path in (stale, live, foreign):
            path.touch()
        remove_stale_regions()
        assert [path.exists() for path in (stale, live, foreign)] == [False, True, True]
    finally:
        for path in (stale, live, foreign):
            path.unlink(missing_ok=True)


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


async def test_a_hung_engine_is_missed_at_once_and_in_error_when_it_stays_so(node):
    runtime = node.launch()
    async with rpc.connect(node.sockets.probe) as channel:
        watch = probe_pb2_grpc.StatusProbeStub(channel).Watch(probe_pb2.WatchRequest(), timeout=WAIT_S)
        runtime.member("stub").send_signal(signal.SIGSTOP)
        async with asyncio.timeout(WAIT_S):
            while (missed := await watch.read()).last_canary.ok:
                pass
            assert (missed.state, missed.last_canary.error) == (probe_pb2.STATE_READY, "canary-timeout")
            while (failed := await watch.read()).state == probe_pb2.STATE_READY:
                pass
        assert list(failed.reasons) == ["canary-timeout"]
        watch.cancel()
    runtime.member("stub").send_signal(signal.SIGCONT)


async def test_a_client_that_holds_an_idle_stream_does_not_keep_the_container_alive(node):
    from tie.daemon.triton import service_pb2_grpc

    runtime = node.launch()
    async with rpc.connect(node.sockets.triton) as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(timeout=WAIT_S)
        await call.wait_for_connection()
        async with asyncio.timeout(15):
            await asyncio.to_thread(runtime.stop)
        call.cancel()


def test_an_engine_that_cannot_start_ends_the_container_with_a_reason(node):
    lonely = node.directory / "lonely.toml"
    lonely.write_text(
        f'run_dir = "{node.directory}/lonely"\n[model]\nbundle = "{node.directory}/bundle"\n'
        "[probe]\nstart_deadline_s = 0.5\n"
    )
    log = node.directory / "lonely.log"
    assert node.start("tie.runtime.launch", log, lonely).wait(WAIT_S) == -signal.SIGKILL
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
