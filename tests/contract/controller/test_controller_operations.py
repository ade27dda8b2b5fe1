"""The controller's own restarts, and what an operator asks of it: maintenance, warming, metrics."""

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from prometheus_client.parser import text_string_to_metric_families

from controller_states import AVAILABLE, ERROR, MAINTENANCE, eventually, states
from tie.daemon import config as node_config
from tie.proto import cloudboard_pb2, control_pb2, metrics_pb2, metrics_pb2_grpc


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
    assert samples["tie_peer_up", (("daemon", "cloudboard"),)] == 1
    assert samples["tie_peer_up", (("daemon", "owner"),)] == 0
    assert samples["tie_peer_up", (("daemon", "gpuhealthd"),)] == 0
    assert ("tie_node_state", (("state", "available"),)) in samples
