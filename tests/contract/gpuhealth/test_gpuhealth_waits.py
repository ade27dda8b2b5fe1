"""A driver that is slow, late or hung is a verdict and not a wait, and a fault that passes is forgiven slowly."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gpu_verdicts import HEALTHY, UNAVAILABLE, until_dead

SLACK = 4  # the answer takes 1 ms; the rest is a machine that runs other tests


async def test_a_fault_that_passes_is_forgiven_slowly(gpu: Any) -> None:
    gpu.play(recovery=1)
    await gpu.until_reason("recovery-gpu-reset")
    gpu.play()
    await gpu.until_reason("recovering")
    await gpu.until_healthy()


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
    daemon.play({where: 1})
    slowest, age_s = 0.0, 0.0
    while age_s < 3 * poll_s:  # since its newest look, by its own clock: a busy machine changes nothing
        asked = loop.time()
        verdict = await daemon.verdict()
        slowest = max(slowest, loop.time() - asked)
        age_s = verdict.age_s
        assert (verdict.verdict == UNAVAILABLE) == (age_s > 2 * poll_s)
        await asyncio.sleep(0.02)
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
