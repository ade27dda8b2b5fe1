"""gpuhealthd as a process, its socket, and a driver that fails in every way."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tie.proto import gpuhealth_pb2, metrics_pb2, metrics_pb2_grpc

HEALTHY = gpuhealth_pb2.VERDICT_HEALTHY
DEGRADED = gpuhealth_pb2.VERDICT_DEGRADED
UNAVAILABLE = gpuhealth_pb2.VERDICT_UNAVAILABLE


def readings(device: gpuhealth_pb2.DeviceVerdict) -> dict[str, float | None]:
    return {reading.name: reading.value if reading.measured else None for reading in device.readings}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until_dead(pid: int) -> None:
    async with asyncio.timeout(30):
        while alive(pid):
            await asyncio.sleep(0.02)


# ---- the cpu provider ----


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
    watch = asyncio.create_task(daemon.until_reason("probe-gone"))
    await asyncio.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    assert (await watch).verdict == UNAVAILABLE
    await daemon.until_healthy()
    assert daemon.child() != child


# ---- the nvml provider over a fake driver ----


async def test_without_a_driver_a_gpu_node_is_unavailable(make_daemon: Any, tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").touch()  # so that no driver of this machine is found instead
    daemon = make_daemon(tmp_path)
    await daemon.start()
    verdict = await daemon.until_reason("driver-missing")
    assert (verdict.verdict, verdict.provider) == (UNAVAILABLE, "nvml")
    assert not verdict.devices


async def test_a_healthy_gpu(gpu: Any) -> None:
    verdict = await gpu.verdict()
    device = verdict.devices[0]
    assert (verdict.verdict, device.id, device.name) == (HEALTHY, "GPU-1", "Fake GPU")
    values = readings(device)
    assert values["temperature_c"] == 40
    assert values["power_w"] == 70
    assert values["recovery_action"] == 0
    assert values["memory_total_bytes"] == 80 << 30
    assert values["mig_mode"] is None  # the driver has no such call
    assert values["pcie_width"] is None


@pytest.mark.parametrize(
    ("values", "reason", "verdict", "action"),
    [
        ({"nvmlDeviceGetTemperature": 15}, "gpu-lost", UNAVAILABLE, gpuhealth_pb2.ACTION_REBOOT),
        ({"nvmlDeviceGetHandleByIndex_v2": 999}, "nvml-unknown", UNAVAILABLE, gpuhealth_pb2.ACTION_REBOOT),
        ({"nvmlDeviceGetEccMode": 16}, "reset-required", UNAVAILABLE, gpuhealth_pb2.ACTION_RESET_GPU),
        ({"nvmlDeviceGetPowerUsage": 77}, "nvml-unknown", UNAVAILABLE, gpuhealth_pb2.ACTION_REBOOT),
        ({"nvmlDeviceGetHandleByIndex_v2": 4}, "device-missing", UNAVAILABLE, gpuhealth_pb2.ACTION_REBOOT),
        ({"nvmlDeviceGetCount_v2": 9}, "driver-not-loaded", UNAVAILABLE, gpuhealth_pb2.ACTION_REBOOT),
        ({"count": 0}, "device-missing", UNAVAILABLE, gpuhealth_pb2.ACTION_REBOOT),
        ({"recovery": 1}, "recovery-gpu-reset", UNAVAILABLE, gpuhealth_pb2.ACTION_RESET_GPU),
        ({"recovery": 42}, "recovery-unknown", UNAVAILABLE, gpuhealth_pb2.ACTION_SERVICE),
        ({"recovery_result": 15}, "gpu-lost", UNAVAILABLE, gpuhealth_pb2.ACTION_REBOOT),
        ({"uncorrected": 1}, "ecc-uncorrected", UNAVAILABLE, gpuhealth_pb2.ACTION_RESET_GPU),
        ({"pending": 1}, "remap-pending", DEGRADED, gpuhealth_pb2.ACTION_RESET_GPU),
        ({"temperature": 95}, "too-hot", DEGRADED, gpuhealth_pb2.ACTION_NONE),
        ({"xid_number": 1, "xid": 79}, "xid-79", UNAVAILABLE, gpuhealth_pb2.ACTION_REBOOT),
        ({"xid_number": 1, "xid": 94}, "xid-94", DEGRADED, gpuhealth_pb2.ACTION_RECYCLE_RUNTIME),
    ],
)
async def test_faults(gpu: Any, values: dict[str, int], reason: str, verdict: int, action: int) -> None:
    gpu.play(**values)
    seen = await gpu.until_reason(reason)
    assert (seen.verdict, seen.action) == (verdict, action)


async def test_a_fault_that_passes_is_forgiven_slowly(gpu: Any) -> None:
    gpu.play(recovery=1)
    await gpu.until_reason("recovery-gpu-reset")
    gpu.play()
    await gpu.until_reason("recovering")
    await gpu.until_healthy()


@pytest.mark.parametrize("code", [3, 4, 21])
async def test_what_a_driver_does_not_give_is_not_measured(make_daemon: Any, fake_driver: Path, code: int) -> None:
    daemon = make_daemon(fake_driver)
    daemon.play(nvmlDeviceGetTemperature=code, recovery_result=code)
    await daemon.start()
    values = readings((await daemon.until_healthy()).devices[0])
    assert values["temperature_c"] is None
    assert values["recovery_action"] is None
    assert values["ecc_uncorrected_volatile"] == 0


async def test_a_driver_that_comes_later_is_found(make_daemon: Any, fake_driver: Path) -> None:
    daemon = make_daemon(fake_driver)
    daemon.play(nvmlInitWithFlags=9)
    await daemon.start()
    await daemon.until_reason("driver-not-loaded")
    daemon.play()
    await daemon.until_healthy()


async def test_a_hung_driver_is_a_verdict_and_not_a_wait(gpu: Any) -> None:
    child = gpu.child()
    gpu.play(hang=1)
    seen = await gpu.until_reason("probe-hung")
    assert seen.verdict == UNAVAILABLE
    assert (await gpu.verdict()).age_s > 0.5  # answered while the child still hangs
    gpu.play()
    await gpu.until_healthy()
    assert gpu.child() == child  # a driver that was only slow costs no restart


async def test_a_driver_that_hangs_from_the_start(make_daemon: Any, fake_driver: Path) -> None:
    daemon = make_daemon(fake_driver)
    daemon.play(hang=1)
    await daemon.start()
    assert (await daemon.verdict()).verdict == UNAVAILABLE
    await daemon.until_reason("probe-hung")


async def test_a_child_that_hangs_for_long_is_replaced(make_daemon: Any, fake_driver: Path) -> None:
    daemon = make_daemon(fake_driver, stale_after_s=0.3)
    await daemon.start()
    await daemon.until_healthy()
    child = daemon.child()
    daemon.play(hang=1)
    await until_dead(child)
    daemon.play()
    await daemon.until_healthy()
    assert daemon.child() != child
