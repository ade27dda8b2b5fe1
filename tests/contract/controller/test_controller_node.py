"""The controller's gates, and peers that speak the real contracts over real sockets: who keeps a node from serving."""

import asyncio
from typing import Any

import pytest

from controller_states import AVAILABLE, ERROR, eventually, states
from tie.proto import cloudboard_pb2, gpuhealth_pb2, owner_pb2, probe_pb2


async def test_is_available_only_after_every_gate(make_node: Any) -> None:
    node = make_node()
    await node.start_controller()
    status = await node.status()
    assert set(status.reasons) >= {"owner-gone", "runtime-gone", "gpuhealthd-gone", "cloudboard-gone"}
    await node.owner.start()
    await node.gpu.start()
    await node.probe.start()
    await node.until(lambda status: list(status.reasons) == ["cloudboard-gone"])
    assert node.probe.warms == [node.probe.status.instance_id]
    await node.cloudboard.start()
    status = await node.until_available()
    await eventually(lambda: node.cloudboard.state == cloudboard_pb2.STATE_AVAILABLE)
    assert status.node_id == node.config.node_id
    assert not status.reasons
    assert status.runtime.instance_id == node.probe.status.instance_id
    assert status.gpu.verdict == gpuhealth_pb2.VERDICT_HEALTHY
    assert status.owner.owner_instance == "owner-1"
    assert status.probe_peer.connected
    assert status.cloudboard_peer.connected
    assert 0 < status.next_recycle_s <= 3600 * 1.2
    assert states(status) == ["available"]
    assert node.journal == ["warm", "initializing", "available"]
    report = node.cloudboard.reports[-1]
    assert (report.model, report.release, report.summary) == ("demo", "r1", "")
    assert not node.probe.recycles


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda node: node.probe.change(state=probe_pb2.STATE_INITIALIZING), "runtime-initializing"),
        (lambda node: node.probe.status.last_canary.Clear(), "canary-failed"),
        (lambda node: setattr(node.owner.status, "state", owner_pb2.STATE_LOADING), "owner-loading"),
        (lambda node: node.gpu.change(verdict=gpuhealth_pb2.VERDICT_UNAVAILABLE), "gpu-unavailable"),
        (lambda node: node.gpu.change(verdict=gpuhealth_pb2.VERDICT_UNSPECIFIED), "gpu-unavailable"),
        (lambda node: node.gpu.change(verdict=gpuhealth_pb2.VERDICT_HEALTHY, age_s=99.0), "gpu-stale"),
        (lambda node: node.gpu.change(verdict=gpuhealth_pb2.VERDICT_HEALTHY, age_s=-1.0), "gpu-stale"),
    ],
)
async def test_one_gate_shut_keeps_the_node_from_starting(make_node: Any, change: Any, reason: str) -> None:
    node = make_node(error_grace_s=30.0)
    change(node)
    await node.start()
    status = await node.until(lambda status: reason in status.reasons and status.cloudboard_peer.connected)
    assert status.state != AVAILABLE
    assert cloudboard_pb2.STATE_AVAILABLE not in {report.state for report in node.cloudboard.reports}


async def test_hardware_that_has_not_been_looked_at_is_no_error(make_node: Any) -> None:
    node = make_node()
    node.gpu.change(verdict=gpuhealth_pb2.VERDICT_UNAVAILABLE, reasons=["probe-starting"], age_s=-1.0)
    await node.start()
    await node.until(lambda status: list(status.reasons) == ["gpu-starting"])
    node.gpu.change(verdict=gpuhealth_pb2.VERDICT_HEALTHY)
    status = await node.until_available()
    assert states(status) == ["available"]


async def test_degraded_hardware_serves(make_node: Any) -> None:
    node = make_node()
    node.gpu.change(verdict=gpuhealth_pb2.VERDICT_DEGRADED)
    await node.start()
    await node.until_available()


async def test_gpu_unavailable_is_an_error_that_heals(node: Any) -> None:
    node.gpu.change(verdict=gpuhealth_pb2.VERDICT_UNAVAILABLE, reasons=["gpu-lost"])
    status = await node.until_state(ERROR)
    assert "gpu-unavailable" in status.reasons
    await eventually(lambda: len(node.probe.recycles) == 1)  # once, after the grace: a GPU's reset needs it let go
    await node.until_lasting(ERROR, 1.5)
    assert len(node.probe.recycles) == 1
    node.gpu.change(verdict=gpuhealth_pb2.VERDICT_HEALTHY)
    await node.until_available()


async def test_a_short_gpu_error_costs_no_recycle(make_node: Any) -> None:
    node = make_node(error_grace_s=10.0)
    await node.start()
    await node.until_available()
    node.gpu.change(verdict=gpuhealth_pb2.VERDICT_UNAVAILABLE)
    await node.until_state(ERROR)
    node.gpu.change(verdict=gpuhealth_pb2.VERDICT_HEALTHY)
    await node.until_available()
    assert not node.probe.recycles


async def test_the_hardware_may_ask_for_a_recycle_once(node: Any) -> None:
    fields = {"verdict": gpuhealth_pb2.VERDICT_DEGRADED, "action": gpuhealth_pb2.ACTION_RECYCLE_RUNTIME}
    node.gpu.change(**fields)
    await node.until(lambda status: status.recycles == 1 and status.state == AVAILABLE)
    await node.until_lasting(AVAILABLE, 1.0)
    assert len(node.probe.recycles) == 1


@pytest.mark.parametrize(
    ("name", "reason"),
    [("gpu", "gpuhealthd-gone"), ("owner", "owner-gone"), ("cloudboard", "cloudboard-gone"), ("probe", "runtime-gone")],
)
async def test_a_peer_that_restarts_costs_no_recycle(node: Any, name: str, reason: str) -> None:
    peer = getattr(node, name)
    await peer.kill()
    status = await node.until(lambda status: reason in status.reasons)
    assert status.state == ERROR
    await peer.start()
    await node.until_available()
    assert not node.probe.recycles
    assert len(node.probe.warms) == 1


async def test_a_killed_runtime_comes_back_by_itself(node: Any) -> None:
    await node.probe.kill()
    await node.until_state(ERROR)
    node.probe.fresh()
    await node.probe.start()
    status = await node.until_available()
    assert status.runtime.instance_id == node.probe.status.instance_id
    assert not node.probe.recycles
    assert node.probe.warms[-1] == node.probe.status.instance_id
    assert len(node.probe.warms) == 2


async def test_a_peer_that_goes_silent_is_gone(node: Any) -> None:
    hang = asyncio.Event()

    async def silent(request: Any, context: Any) -> Any:
        await hang.wait()
        yield node.gpu.verdict

    await node.gpu.kill()
    node.gpu.Watch = silent
    await node.gpu.start()
    status = await node.until(lambda status: "gpuhealthd-gone" in status.reasons)
    assert status.state == ERROR
    hang.set()


async def test_a_peer_that_talks_nonsense_is_gone(node: Any) -> None:
    node.probe.change(uptime_s=float("nan"))
    status = await node.until(lambda status: "runtime-gone" in status.reasons)
    assert status.state == ERROR
    node.probe.fresh()
    await node.until_available()


async def test_another_owner_means_attaching_again(node: Any) -> None:
    node.owner.status.owner_instance = "owner-2"
    status = await node.until(lambda status: status.recycles == 1 and status.state == AVAILABLE)
    assert status.last_recycle_reason == "owner"
    assert node.probe.recycles[0].reason == "owner"


async def test_weights_of_another_generation_mean_attaching_again(node: Any) -> None:
    node.owner.status.generation = 2
    fresh = node.probe.fresh
    node.probe.fresh = lambda: fresh(owner_generation=2)
    status = await node.until(lambda status: status.recycles == 1 and status.state == AVAILABLE)
    assert status.last_recycle_reason == "owner"
    await node.until_lasting(AVAILABLE, 1.0)
    assert len(node.probe.recycles) == 1
