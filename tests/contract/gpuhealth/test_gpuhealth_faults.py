"""What a driver answers, and the verdict, reason and action that follow."""

from pathlib import Path
from typing import Any

import pytest

from gpu_verdicts import DEGRADED, HEALTHY, NONE, REBOOT, RECYCLE, RESET, SERVICE, UNAVAILABLE, readings


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


@pytest.mark.parametrize("code", [3, 4, 21])
async def test_what_a_driver_does_not_give_is_not_measured(make_daemon: Any, fake_driver: Path, code: int) -> None:
    daemon = make_daemon(fake_driver)
    daemon.play(nvmlDeviceGetTemperature=code, recovery_result=code)
    await daemon.start()
    values = readings((await daemon.until_healthy()).devices[0])
    assert values["temperature_c"] is None
    assert values["recovery_action"] is None
    assert values["ecc_uncorrected_volatile"] == 0


@pytest.mark.parametrize("before", [{}, {"nvmlDeviceGetName": 10}])  # also where the same fault was seen already
async def test_an_inforom_that_could_not_be_read_is_read_again(
    make_daemon: Any, fake_driver: Path, before: dict[str, int]
) -> None:
    daemon = make_daemon(fake_driver)
    daemon.play(before, nvmlDeviceValidateInforom=10)
    await daemon.start()
    await daemon.until_reason("nvml-timeout")
    daemon.play()
    await daemon.until_healthy()
    daemon.play(nvmlDeviceValidateInforom=14)  # known by now: flash memory is not read again
    assert (await daemon.next_look()).verdict == HEALTHY
    await daemon.stop()
    daemon.play(before, nvmlDeviceValidateInforom=10)
    await daemon.start()
    await daemon.until_reason("nvml-timeout")
    daemon.play(nvmlDeviceValidateInforom=14)
    await daemon.until_reason("inforom-corrupt")
