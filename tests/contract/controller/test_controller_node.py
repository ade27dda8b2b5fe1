"""The controller against peers that speak the real contracts over real sockets."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from prometheus_client.parser import text_string_to_metric_families

from controllerd.recycle_timer import RecycleTimer
from tie.daemon import config as node_config
from tie.proto import cloudboard_pb2, control_pb2, gpuhealth_pb2, metrics_pb2, metrics_pb2_grpc, owner_pb2, probe_pb2

AVAILABLE = control_pb2.STATE_AVAILABLE
ERROR = control_pb2.STATE_ERROR
MAINTENANCE = control_pb2.STATE_MAINTENANCE


async def eventually(condition: Callable[[], bool], timeout: float = 30.0) -> None:
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.02)


def states(status: control_pb2.NodeStatus) -> list[str]:
    return [control_pb2.State.Name(event.to).removeprefix("STATE_").lower() for event in status.events]


# ---- start ----


async def test_is_available_only_after_every_gate(make_node: Any) -> None:
    node = make_node()
    await node.start_controller()
    status = await node.status()
    assert set(status.reasons) >= {"owner-gone", "probe-gone", "gpuhealthd-gone", "cloudboard-gone"}
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


# ---- recycle ----


async def test_operator_recycle_streams_its_progress(node: Any) -> None:
    await eventually(lambda: node.cloudboard.state == cloudboard_pb2.STATE_AVAILABLE)
    old = node.probe.status.instance_id
    node.journal.clear()
    steps = [
        step
        async for step in node.operator.Recycle(
            control_pb2.RecycleRequest(reason="operator", drain_deadline_ms=5000), timeout=30
        )
    ]
    assert steps[0].state == control_pb2.STATE_DRAINING
    assert control_pb2.STATE_RECYCLING in {step.state for step in steps}
    last = steps[-1]
    assert last.finished
    assert not last.error
    assert (last.old_instance_id, last.new_instance_id) == (old, node.probe.status.instance_id)
    assert last.new_instance_id != old
    assert last.elapsed_s > 0
    status = await node.status()
    assert status.state == AVAILABLE
    assert (status.recycles, status.last_recycle_reason) == (1, "operator")
    assert status.last_recycle_s == pytest.approx(last.elapsed_s)
    await eventually(lambda: node.journal[-1] == "available")
    assert node.journal == ["busy", "recycle", "warm", "available"]
    assert 0 < node.probe.recycles[0].drain_deadline_ms <= 5000
    assert node.cloudboard.gaps == 0


async def test_two_recycles_at_once_are_one(node: Any) -> None:
    async def recycle() -> control_pb2.RecycleProgress:
        steps = [step async for step in node.operator.Recycle(control_pb2.RecycleRequest(), timeout=30)]
        return steps[-1]

    one, two = await asyncio.gather(recycle(), recycle())
    assert one.new_instance_id == two.new_instance_id
    assert len(node.probe.recycles) == 1


async def test_busy_is_acknowledged_before_the_runtime_is_told(make_node: Any) -> None:
    node = make_node(busy_ack_deadline_s=20.0, heartbeat_s=10.0)
    await node.start()
    await node.until_available()
    await eventually(lambda: node.cloudboard.state == cloudboard_pb2.STATE_AVAILABLE)
    node.cloudboard.silent = True
    call = node.operator.Recycle(control_pb2.RecycleRequest(), timeout=30)
    await eventually(lambda: node.cloudboard.state == cloudboard_pb2.STATE_BUSY)
    await node.until_looked()
    assert not node.probe.recycles
    node.cloudboard.silent = False
    await node.cloudboard.kill()  # a new stream reports "busy" again, and is acknowledged
    await node.cloudboard.start()
    steps = [step async for step in call]
    assert steps[-1].finished
    assert not steps[-1].error
    assert len(node.probe.recycles) == 1


async def test_requests_in_flight_end_before_the_runtime_is_told(node: Any) -> None:
    node.cloudboard.in_flight = 2
    call = node.operator.Recycle(control_pb2.RecycleRequest(), timeout=30)
    await node.until(lambda status: status.state == control_pb2.STATE_DRAINING and status.in_flight == 2)
    assert not node.probe.recycles
    node.cloudboard.in_flight = 0
    steps = [step async for step in call]
    assert steps[-1].finished
    assert len(node.probe.recycles) == 1


async def test_requests_that_do_not_end_do_not_hold_the_recycle(node: Any) -> None:
    node.cloudboard.in_flight = 1
    request = control_pb2.RecycleRequest(drain_deadline_ms=300)
    steps = [step async for step in node.operator.Recycle(request, timeout=30)]
    assert steps[-1].finished
    assert not steps[-1].error
    assert node.probe.recycles[0].drain_deadline_ms == 1


async def test_recycles_although_cloudboard_is_gone(node: Any) -> None:
    await node.cloudboard.kill()
    await node.until(lambda status: not status.cloudboard_peer.connected)
    call = node.operator.Recycle(control_pb2.RecycleRequest(), timeout=30)
    await eventually(lambda: len(node.probe.recycles) == 1)
    await node.cloudboard.start()
    assert [step async for step in call][-1].finished


async def test_the_timer_recycles_each_runtime(make_node: Any) -> None:
    node = make_node(recycle_interval_s=2.0, recycle_jitter=0.1)
    await node.start()
    status = await node.until(lambda status: status.recycles >= 2 and status.state == AVAILABLE)
    assert status.last_recycle_reason == "timer"
    assert {request.reason for request in node.probe.recycles} == {"timer"}
    assert "error" not in node.journal


async def test_a_runtime_in_error_is_recycled_at_once(node: Any) -> None:
    node.probe.change(state=probe_pb2.STATE_IN_ERROR, reasons=["engine-gone"])
    status = await node.until(lambda status: status.state == AVAILABLE and status.recycles == 1)
    assert status.last_recycle_reason == "error"
    assert states(status)[-4:] == ["error", "draining", "recycling", "available"]
    assert node.probe.recycles[0].reason == "error"


async def test_one_canary_that_fails_costs_no_recycle(make_node: Any) -> None:
    node = make_node(error_grace_s=20.0)
    await node.start()
    await node.until_available()
    node.probe.change(state=probe_pb2.STATE_IN_ERROR, reasons=["canary-timeout"])
    await node.until_state(ERROR)
    node.probe.status.ClearField("reasons")
    node.probe.change(state=probe_pb2.STATE_READY)
    await node.until_available()
    assert not node.probe.recycles


async def test_canaries_that_go_on_failing_do(node: Any) -> None:
    node.probe.change(state=probe_pb2.STATE_IN_ERROR, reasons=["canary-timeout"])
    status = await node.until(lambda status: status.state == AVAILABLE and status.recycles == 1)
    assert status.last_recycle_reason == "error"


async def test_repeated_errors_do_not_loop(make_node: Any) -> None:
    node = make_node(error_backoff_s=3.0)
    await node.start()
    await node.until_available()
    fresh = node.probe.fresh
    node.probe.fresh = lambda **_: fresh(state=probe_pb2.STATE_IN_ERROR)  # every new runtime fails as well
    node.probe.change(state=probe_pb2.STATE_IN_ERROR)
    await node.until(lambda status: status.recycles == 1 and status.state == ERROR)
    node.probe.fresh = fresh
    status = await node.until(lambda status: status.recycles == 2 and status.state == AVAILABLE)
    assert status.last_recycle_reason == "error"
    first, second = (event.age_s for event in status.events if event.to == control_pb2.STATE_DRAINING)
    assert first - second > 2.0
    assert len(node.probe.recycles) == 2


async def test_no_fresh_runtime_is_an_error_and_heals(make_node: Any) -> None:
    node = make_node(fresh_runtime_deadline_s=1.0, drain_deadline_s=0.2, error_backoff_s=60.0)
    await node.start()
    await node.until_available()
    node.probe.replace = False
    steps = [step async for step in node.operator.Recycle(control_pb2.RecycleRequest(), timeout=60)]
    assert steps[-1].finished
    assert steps[-1].error == "fresh-runtime-deadline"
    status = await node.until(lambda status: "fresh-runtime-deadline" in status.reasons)
    assert status.state == ERROR
    node.probe.fresh()
    await node.until_available()


# ---- errors of peers ----


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
    [("gpu", "gpuhealthd-gone"), ("owner", "owner-gone"), ("cloudboard", "cloudboard-gone"), ("probe", "probe-gone")],
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
    status = await node.until(lambda status: "probe-gone" in status.reasons)
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


# ---- the controller itself ----


async def test_a_restarted_controller_adopts_the_runtime(node: Any) -> None:
    await node.stop_controller()
    await node.start_controller()
    status = await node.until_available()
    assert not node.probe.recycles
    assert len(node.probe.warms) == 1
    assert status.recycles == 0


async def test_a_killed_controller_is_replaced(make_node: Any, tmp_path: Path) -> None:
    node = make_node()
    for peer in (node.probe, node.gpu, node.owner, node.cloudboard):
        await peer.start()
    path = tmp_path / "node.toml"
    path.write_bytes(node_config.dump(node.config))
    for _ in range(2):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "controllerd.main", "--config", str(path), stderr=asyncio.subprocess.DEVNULL
        )
        try:
            await node.connect()
            await node.until_available()
        finally:
            process.send_signal(signal.SIGKILL)
            await process.wait()
        await eventually(lambda: node.cloudboard.reports != [])
    assert not node.probe.recycles
    assert len(node.probe.warms) == 1


async def test_the_timer_counts_the_age_that_a_runtime_already_has(make_node: Any) -> None:
    node = make_node(recycle_jitter=0.0)
    node.probe.change(uptime_s=3000.0)
    await node.start()
    status = await node.until_available()
    assert 500 < status.next_recycle_s <= 600


async def test_maintenance_recycles_and_stays_until_switched_off(node: Any) -> None:
    await node.operator.SetMaintenance(control_pb2.SetMaintenanceRequest(on=True, reason="disk"), timeout=30)
    status = await node.until_state(MAINTENANCE)
    assert status.maintenance
    assert status.reasons[0] == "maintenance"
    assert [request.reason for request in node.probe.recycles] == ["maintenance"]
    await eventually(lambda: node.cloudboard.state == cloudboard_pb2.STATE_BUSY)
    status = await node.until_lasting(MAINTENANCE, 0.5)
    assert states(status)[-1] == "maintenance"
    await node.operator.SetMaintenance(control_pb2.SetMaintenanceRequest(on=False), timeout=30)
    status = await node.until_available()
    assert not status.maintenance
    assert len(node.probe.recycles) == 1


async def test_maintenance_survives_a_restart_of_the_controller(node: Any) -> None:
    await node.operator.SetMaintenance(control_pb2.SetMaintenanceRequest(on=True), timeout=30)
    await node.until_state(MAINTENANCE)
    await node.stop_controller()
    await node.start_controller()
    await node.until_state(MAINTENANCE)
    assert cloudboard_pb2.STATE_AVAILABLE not in {report.state for report in node.cloudboard.reports[-3:]}
    await node.operator.SetMaintenance(control_pb2.SetMaintenanceRequest(on=False), timeout=30)
    await node.until_available()


async def test_maintenance_during_a_recycle_waits_for_its_end(node: Any) -> None:
    node.probe.replace = False
    call = node.operator.Recycle(control_pb2.RecycleRequest(), timeout=30)
    await node.until(lambda status: status.state == control_pb2.STATE_RECYCLING or len(node.probe.recycles) == 1)
    await node.operator.SetMaintenance(control_pb2.SetMaintenanceRequest(on=True), timeout=30)
    node.probe.fresh()
    await node.until_state(MAINTENANCE)
    assert [step async for step in call][-1].finished
    assert len(node.probe.recycles) == 1


async def test_an_operator_may_warm_again(node: Any) -> None:
    status = await node.operator.Warm(control_pb2.WarmRequest(), timeout=30)
    assert status.state == AVAILABLE
    assert len(node.probe.warms) == 2
    await node.probe.kill()
    await node.until_state(ERROR)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await node.operator.Warm(control_pb2.WarmRequest(), timeout=30)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


# ---- metrics ----


async def test_metrics_of_all_daemons_are_served_together(node: Any) -> None:
    node.probe.metrics = "# TYPE afm_steps counter\nafm_steps_total 7\n"
    node.owner.metrics = "this is no metric {\n"
    await node.gpu.kill()
    reply = await metrics_pb2_grpc.MetricsStub(node.channel).Scrape(metrics_pb2.ScrapeRequest(), timeout=30)
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(reply.text)
        for sample in family.samples
    }
    assert samples["afm_steps_total", (("daemon", "probe"),)] == 7
    assert samples["tie_peer_up", (("daemon", "probe"),)] == 1
    assert samples["tie_peer_up", (("daemon", "owner"),)] == 0
    assert samples["tie_peer_up", (("daemon", "gpuhealthd"),)] == 0
    assert ("tie_node_state", (("state", "available"),)) in samples


def test_a_timer_is_drawn_from_the_kernel() -> None:
    drawn = set()
    for _ in range(8):
        timer = RecycleTimer(1000.0, 0.2)
        timer.start(0.0)
        remaining = timer.remaining(0.0)
        assert remaining is not None
        assert 800.0 <= remaining <= 1200.0
        drawn.add(remaining)
    assert len(drawn) > 1


async def test_a_caller_that_leaves_does_not_stop_its_recycle(node: Any) -> None:
    call = node.operator.Recycle(control_pb2.RecycleRequest(), timeout=30)
    await call.read()
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call.code()
    status = await node.until(lambda status: status.recycles == 1 and status.state == AVAILABLE)
    assert status.last_recycle_s > 0
