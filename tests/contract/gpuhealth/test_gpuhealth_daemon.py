"""gpuhealthd as a process: its socket, its child, its policy; on a node without a GPU as well."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from gpu_verdicts import HEALTHY, UNAVAILABLE, readings, until_dead
from tie.proto import gpuhealth_pb2, metrics_pb2, metrics_pb2_grpc


async def test_a_cpu_node_is_judged_by_what_it_runs_on(make_daemon: Any) -> None:
    daemon = make_daemon(provider="cpu")
    await daemon.start()
    verdict = await daemon.until_healthy()
    assert verdict.provider == "cpu"
    assert 0 <= verdict.age_s < 1
    values = readings(verdict.devices[0])
    assert verdict.devices[0].id == "cpu0"
    assert values["available_bytes"]
    assert values["load1_per_core"] is not None


async def test_too_little_memory_is_unavailable(make_daemon: Any) -> None:
    daemon = make_daemon(provider="cpu", min_available_bytes=1 << 60)
    await daemon.start()
    verdict = await daemon.until_reason("low-memory")
    assert verdict.verdict == UNAVAILABLE
    assert verdict.action == gpuhealth_pb2.ACTION_RECYCLE_RUNTIME


async def test_a_watch_has_a_heartbeat(make_daemon: Any) -> None:
    daemon = make_daemon(provider="cpu")
    await daemon.start()
    await daemon.until_healthy()
    call = daemon.stub.Watch(gpuhealth_pb2.WatchRequest(), timeout=30)
    async with asyncio.timeout(30):
        beats = [await call.read() for _ in range(3)]
    call.cancel()
    assert {beat.verdict for beat in beats} == {HEALTHY}


async def test_metrics_hold_what_was_measured(make_daemon: Any) -> None:
    daemon = make_daemon(provider="cpu")
    await daemon.start()
    await daemon.until_healthy()
    reply = await metrics_pb2_grpc.MetricsStub(daemon.channel).Scrape(metrics_pb2.ScrapeRequest(), timeout=5)
    names = {
        (sample.name, sample.labels.get("name"))
        for family in text_string_to_metric_families(reply.text)
        for sample in family.samples
    }
    assert ("tie_gpu_node_verdict", None) in names
    assert ("tie_gpu_reading", "available_bytes") in names


async def test_it_ends_when_asked_and_takes_its_child_along(make_daemon: Any) -> None:
    daemon = make_daemon(provider="cpu")
    await daemon.start()
    await daemon.until_healthy()
    child = daemon.child()
    assert await daemon.stop() == 0
    await until_dead(child)


async def test_a_killed_daemon_leaves_no_child(make_daemon: Any) -> None:
    daemon = make_daemon(provider="cpu")
    await daemon.start()
    await daemon.until_healthy()
    child = daemon.child()
    await daemon.stop(signal.SIGKILL)
    await until_dead(child)


async def test_a_killed_child_is_said_and_replaced(make_daemon: Any) -> None:
    daemon = make_daemon(provider="cpu")
    await daemon.start()
    await daemon.until_healthy()
    child = daemon.child()
    watch = daemon.stub.Watch(gpuhealth_pb2.WatchRequest(), timeout=30)
    assert (await watch.read()).verdict == HEALTHY
    os.kill(child, signal.SIGKILL)
    while "probe-gone" not in (seen := await watch.read()).reasons:
        pass
    watch.cancel()
    assert seen.verdict == UNAVAILABLE
    await daemon.until_healthy()
    assert daemon.child() != child


async def test_a_policy_file_moves_conditions(make_daemon: Any, fake_driver: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text('[verdicts]\necc-off = "unavailable"\ntoo-hot = "healthy"\n')
    daemon = make_daemon(fake_driver, policy_file=str(policy))
    daemon.play(temperature=95)
    await daemon.start()
    await daemon.until_healthy()
    daemon.play(ecc=0)
    assert (await daemon.until_reason("ecc-off")).verdict == UNAVAILABLE


async def test_a_policy_that_names_nothing_is_refused(make_daemon: Any, fake_driver: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text('[verdicts]\necc-of = "unavailable"\n')
    daemon = make_daemon(fake_driver, policy_file=str(policy))
    assert await daemon.run() == 78
