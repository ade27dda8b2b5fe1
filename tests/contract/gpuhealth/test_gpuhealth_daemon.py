"""gpuhealthd as a process, its socket, and a driver that fails in every way."""

import asyncio
import json
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
SLACK = 4  # the answer takes 1 ms; the rest is a machine that runs other tests


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
    watch = daemon.stub.Watch(gpuhealth_pb2.WatchRequest(), timeout=30)
    assert (await watch.read()).verdict == HEALTHY
    os.kill(child, signal.SIGKILL)
    while "probe-gone" not in (seen := await watch.read()).reasons:
        pass
    watch.cancel()
    assert seen.verdict == UNAVAILABLE
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
    assert values["thermal_margin_limit_c"] == -2
    assert values["nvlink_active"] is None  # it has no links
    assert all(value is not None for name, value in values.items() if not name.startswith("nvlink_"))


async def test_an_old_driver_measures_less_and_is_no_fault(make_daemon: Any, old_driver: Path) -> None:
    daemon = make_daemon(old_driver)
    daemon.play(driver=470)
    await daemon.start()
    values = readings((await daemon.until_healthy()).devices[0])
    missing = {
        "mig_mode",
        "pcie_width",
        "sram_threshold",
        "repair_pending",
        "fabric_state",
        "cc_feature",
        "thermal_margin_c",
    }
    assert {name for name in missing if values[name] is None} == missing
    assert values["temperature_c"] == 40


async def test_fabric_is_not_asked_of_drivers_that_crash_on_it(make_daemon: Any, fake_driver: Path) -> None:
    daemon = make_daemon(fake_driver)
    daemon.play(driver=535, fabric=1)
    await daemon.start()
    assert readings((await daemon.until_healthy()).devices[0])["fabric_state"] is None


NONE, RECYCLE = gpuhealth_pb2.ACTION_NONE, gpuhealth_pb2.ACTION_RECYCLE_RUNTIME
RESET, REBOOT, SERVICE = gpuhealth_pb2.ACTION_RESET_GPU, gpuhealth_pb2.ACTION_REBOOT, gpuhealth_pb2.ACTION_SERVICE

# What the driver answers; reason, verdict and action that follow. One row for each condition.
FAULTS = [
    # the driver's own verdict
    ({"recovery": 1}, "recovery-gpu-reset", UNAVAILABLE, RESET),
    ({"recovery": 2}, "recovery-node-reboot", UNAVAILABLE, REBOOT),
    ({"recovery": 3}, "recovery-drain-p2p", DEGRADED, RESET),
    ({"recovery": 4}, "recovery-drain-and-reset", UNAVAILABLE, RESET),
    ({"recovery": 5}, "recovery-imex-domain", UNAVAILABLE, REBOOT),
    ({"recovery": 6}, "recovery-bus-reset", UNAVAILABLE, REBOOT),
    ({"recovery": 7}, "recovery-system-reboot", UNAVAILABLE, REBOOT),
    ({"recovery": 42}, "recovery-unknown", UNAVAILABLE, SERVICE),
    ({"recovery_result": 15}, "gpu-lost", UNAVAILABLE, REBOOT),
    ({"xid_number": 1, "event_type": 0x4000}, "gpu-unavailable", UNAVAILABLE, RESET),
    # return codes
    ({"nvmlDeviceGetTemperature": 15}, "gpu-lost", UNAVAILABLE, REBOOT),
    ({"nvmlDeviceGetEccMode": 16}, "reset-required", UNAVAILABLE, RESET),
    ({"nvmlDeviceGetHandleByIndex_v2": 999}, "nvml-unknown", UNAVAILABLE, REBOOT),
    ({"nvmlDeviceGetHandleByIndex_v2": 4}, "device-missing", UNAVAILABLE, REBOOT),
    ({"nvmlDeviceGetPowerUsage": 77}, "nvml-unknown", UNAVAILABLE, REBOOT),
    ({"nvmlDeviceGetPowerUsage": 8}, "power-missing", UNAVAILABLE, SERVICE),
    ({"nvmlDeviceGetPowerUsage": 10}, "nvml-timeout", UNAVAILABLE, REBOOT),
    ({"nvmlDeviceGetPowerUsage": 11}, "nvml-irq", UNAVAILABLE, REBOOT),
    ({"nvmlDeviceGetPowerUsage": 17}, "blocked-by-os", UNAVAILABLE, SERVICE),
    ({"nvmlDeviceGetPowerUsage": 20}, "nvml-memory", UNAVAILABLE, REBOOT),
    ({"nvmlDeviceGetPowerUsage": 14}, "inforom-corrupt", DEGRADED, SERVICE),
    ({"nvmlDeviceGetCount_v2": 9}, "driver-not-loaded", UNAVAILABLE, REBOOT),
    ({"nvmlDeviceGetCount_v2": 18}, "driver-mismatch", UNAVAILABLE, REBOOT),
    ({"count": 0}, "device-missing", UNAVAILABLE, REBOOT),
    # memory
    ({"uncorrected": 1}, "ecc-uncorrected", UNAVAILABLE, RESET),
    ({"sram": 1}, "sram-threshold", UNAVAILABLE, SERVICE),
    ({"pending": 1}, "remap-pending", DEGRADED, RESET),
    ({"failure": 1}, "remap-failure", UNAVAILABLE, SERVICE),
    ({"remapped": 512}, "remap-exhausted", DEGRADED, SERVICE),
    ({"remapped": 513}, "remap-over-limit", UNAVAILABLE, SERVICE),
    ({"repair_channel": 1}, "repair-pending", DEGRADED, RESET),
    ({"repair_tpc": 1}, "repair-pending", DEGRADED, RESET),
    ({"retired_pending": 1}, "retired-pending", DEGRADED, RESET),
    ({"retired_single": 63}, "retired-limit", UNAVAILABLE, SERVICE),
    ({"retired_double": 16}, "retired-growing", UNAVAILABLE, SERVICE),  # from none
    ({"ecc": 0}, "ecc-off", DEGRADED, REBOOT),
    ({"ecc_pending": 0}, "ecc-pending", DEGRADED, REBOOT),
    # heat and power
    ({"temperature": 95}, "too-hot", DEGRADED, NONE),
    ({"memory_temperature": 95}, "memory-too-hot", DEGRADED, NONE),
    ({"margin": -3}, "thermal-margin", DEGRADED, NONE),
    ({"clock_events": 0x40}, "thermal-slowdown", DEGRADED, NONE),
    ({"clock_events": 0x80}, "power-brake", DEGRADED, NONE),
    ({"clock_events": 0x08}, "hardware-slowdown", DEGRADED, NONE),
    ({"clock_events": 0x20}, "software-thermal", DEGRADED, NONE),
    # links
    ({"links": 18, "links_up": 17}, "nvlink-down", UNAVAILABLE, RESET),
    ({"crc": 1000}, "nvlink-crc", UNAVAILABLE, SERVICE),
    ({"replays": 1}, "nvlink-replays", DEGRADED, NONE),
    ({"recoveries": 1}, "nvlink-recoveries", DEGRADED, NONE),
    ({"fabric": 1}, "fabric-not-started", UNAVAILABLE, SERVICE),
    ({"fabric": 2}, "fabric-in-progress", DEGRADED, NONE),
    ({"fabric": 3, "fabric_status": 999}, "fabric-failed", UNAVAILABLE, SERVICE),
    ({"fabric": 3, "fabric_health": 0xA9}, "fabric-unhealthy", UNAVAILABLE, SERVICE),
    ({"fabric": 77}, "fabric-unknown", UNAVAILABLE, SERVICE),
    ({"width": 8}, "pcie-width", DEGRADED, NONE),
    ({"generation": 3, "utilization": 99}, "pcie-generation", DEGRADED, NONE),
    # modes
    ({"persistence": 0}, "persistence-off", DEGRADED, NONE),
    ({"mig": 1}, "mig-on", UNAVAILABLE, SERVICE),
    ({"mig_pending": 1}, "mig-pending", DEGRADED, RESET),
    ({"cc_feature": 1, "cc_ready": 0}, "cc-not-ready", UNAVAILABLE, REBOOT),
    # XIDs
    ({"xid_number": 1, "xid": 79}, "xid-79", UNAVAILABLE, REBOOT),
    ({"xid_number": 1, "xid": 94}, "xid-94", DEGRADED, RECYCLE),
    ({"xid_number": 1, "xid": 145}, "xid-145", DEGRADED, NONE),
    ({"xid_number": 1, "xid": 4711}, "xid-4711", DEGRADED, NONE),
]


@pytest.mark.parametrize(("values", "reason", "verdict", "action"), FAULTS)
async def test_faults(gpu: Any, values: dict[str, int], reason: str, verdict: int, action: int) -> None:
    gpu.play(values)
    seen = await gpu.until_reason(reason)
    assert (seen.verdict, seen.action) == (verdict, action)


async def test_one_of_several_gpus(make_daemon: Any, fake_driver: Path) -> None:
    daemon = make_daemon(fake_driver)
    daemon.play(count=4)
    await daemon.start()
    await daemon.until_healthy()
    daemon.play({"count": 4, "3:uncorrected": 1, "3:nvmlDeviceGetTemperature": 3})
    verdict = await daemon.until_reason("ecc-uncorrected")
    assert [device.verdict for device in verdict.devices] == [HEALTHY, HEALTHY, UNAVAILABLE, HEALTHY]
    daemon.play(count=3)
    verdict = await daemon.until_reason("device-missing")
    assert {device.id for device in verdict.devices} == {"GPU-1", "GPU-2", "GPU-3", "GPU-4"}


async def test_a_damaged_inforom_is_found_at_the_start_and_not_forgotten(make_daemon: Any, fake_driver: Path) -> None:
    daemon = make_daemon(fake_driver)
    daemon.play(nvmlDeviceValidateInforom=14)
    await daemon.start()
    assert (await daemon.until_reason("inforom-corrupt")).verdict == DEGRADED
    daemon.play()
    for _ in range(5):
        assert "inforom-corrupt" in (await daemon.next_look()).reasons


# ---- the kernel's log, and what outlives the daemon ----


def xid_line(number: int, text: str = "", bus: str = "41") -> str:
    return f"NVRM: Xid (PCI:0000:{bus}:00): {number}, pid='<unknown>', {text}"


async def test_an_xid_of_the_kernels_log(gpu: Any) -> None:
    gpu.log(1, "usb 1-1: new device")
    gpu.log(2, xid_line(62, "halt"))
    seen = await gpu.until_reason("xid-62")
    assert (seen.verdict, seen.devices[0].reasons) == (UNAVAILABLE, ["xid-62"])


async def test_a_fatal_nvlink_error_of_the_kernels_log(gpu: Any) -> None:
    gpu.log(1, xid_line(145, "RLW_REMAP Nonfatal XC1 i0 Link 00"))
    assert (await gpu.until_reason("xid-145")).verdict == DEGRADED
    gpu.log(2, xid_line(145, "RLW_REMAP Fatal XC1 i0 Link 00"))
    seen = await gpu.until(lambda verdict: verdict.verdict == UNAVAILABLE)
    assert (list(seen.reasons), seen.action) == (["xid-145"], RESET)


async def test_a_gpu_that_only_the_kernel_knows_is_missing(gpu: Any) -> None:
    gpu.log(1, xid_line(79, bus="c1"))
    seen = await gpu.until_reason("device-missing")
    assert seen.verdict == UNAVAILABLE
    for _ in range(5):
        assert (await gpu.next_look()).verdict == UNAVAILABLE


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_restart_does_not_heal_a_gpu_and_a_reboot_does(gpu: Any, number: int) -> None:
    gpu.play(xid_number=1, xid=79)
    await gpu.until_reason("xid-79")
    await gpu.stop(number)
    gpu.play()
    await gpu.start()
    seen = await gpu.until(lambda verdict: "probe-starting" not in verdict.reasons)
    assert (seen.verdict, list(seen.reasons)) == (UNAVAILABLE, ["xid-79"])
    await gpu.stop()
    history = gpu.config.sockets.gpuhealth.with_name("history.json")
    stored = json.loads(history.read_bytes())
    history.write_text(json.dumps({**stored, "boot": "another"}))
    await gpu.start()
    await gpu.until_healthy()


async def test_a_record_of_the_kernels_log_counts_once(gpu: Any) -> None:
    for number in (1, 2):
        gpu.log(number, xid_line(32))
    await gpu.until_reason("xid-32")
    await gpu.until_healthy()
    await gpu.stop()
    await gpu.start()  # the log is still there, and is read again
    await gpu.until_healthy()
    gpu.log(3, xid_line(32))
    assert (await gpu.until_reason("xid-32")).verdict == UNAVAILABLE  # the third


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"boot": 1}', b"\xff" * 100, b" " * 300_000])
async def test_a_damaged_history_is_set_aside(gpu: Any, damage: bytes) -> None:
    await gpu.stop()
    history = gpu.config.sockets.gpuhealth.with_name("history.json")
    history.write_bytes(damage)
    await gpu.start()
    await gpu.until_healthy()
    assert history.with_suffix(".damaged").read_bytes() == damage
    assert json.loads(history.read_bytes())["boot"]


# ---- the policy file ----


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


# ---- slow, and hung ----


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


async def test_a_slow_driver_is_not_a_hung_one(make_daemon: Any, fake_driver: Path) -> None:
    daemon = make_daemon(fake_driver, stale_after_s=5.0)
    await daemon.start()
    await daemon.until_healthy()
    daemon.play(slow_ms=5)  # some eighty calls for a look
    for _ in range(3):
        assert (await daemon.next_look()).verdict == HEALTHY


@pytest.mark.parametrize("where", ["hang", "nvmlDeviceGetTotalEccErrors.hang"])
async def test_a_hung_call_is_unavailable_within_two_polls_while_every_answer_comes_at_once(
    make_daemon: Any, fake_driver: Path, where: str
) -> None:
    poll_s = 1.0
    daemon = make_daemon(fake_driver, poll_interval_s=poll_s, stale_after_s=2 * poll_s)  # as the defaults have it
    await daemon.start()
    await daemon.until_healthy()
    loop = asyncio.get_running_loop()
    began = loop.time()
    daemon.play({where: 1})
    slowest, noticed = 0.0, None
    while loop.time() < began + 4 * poll_s:
        asked = loop.time()
        verdict = await daemon.verdict()
        slowest = max(slowest, loop.time() - asked)
        if noticed is None and verdict.verdict == UNAVAILABLE:
            noticed = loop.time() - began
        await asyncio.sleep(0.02)
    print(f"noticed after {noticed} s, slowest answer {slowest * 1000:.1f} ms")
    assert noticed is not None
    assert noticed <= 2 * poll_s + 0.5  # and this test's own time
    assert slowest < 0.05 * SLACK
    assert len(daemon.children()) == 1


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
