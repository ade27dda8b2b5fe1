"""The kernel's log, and what outlives the daemon."""

import json
import signal
from typing import Any

import pytest

from gpu_verdicts import DEGRADED, HEALTHY, RESET, UNAVAILABLE


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


async def test_a_missing_gpu_that_is_listed_in_the_end_is_no_longer_missing(gpu: Any) -> None:
    gpu.log(1, xid_line(31, bus="42"))
    gpu.log(2, xid_line(62, bus="43"))
    seen = await gpu.until(lambda verdict: len(verdict.devices) == 3)
    assert {device.id for device in seen.devices} == {"GPU-1", "pci 0:42:0", "pci 0:43:0"}
    gpu.play(count=2)
    seen = await gpu.until(lambda verdict: len(verdict.devices) == 3 and verdict.devices[1].verdict == HEALTHY)
    assert {device.id for device in seen.devices} == {"GPU-1", "GPU-2", "pci 0:43:0"}
    await gpu.stop()
    await gpu.start()
    gpu.play(count=3)
    seen = await gpu.until(lambda verdict: [list(device.reasons) for device in verdict.devices] == [[], [], ["xid-62"]])
    assert {device.id for device in seen.devices} == {"GPU-1", "GPU-2", "GPU-3"}


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
