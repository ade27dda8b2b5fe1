"""When a runtime is replaced, in which order, and when it is not."""

import asyncio
import contextlib
import json
from typing import Any

import pytest

from controller_states import AVAILABLE, ERROR, eventually, states
from controllerd.recycle_timer import RecycleTimer
from tie.proto import cloudboard_pb2, control_pb2, probe_pb2


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


async def test_the_log_names_runtimes_in_full_and_each_peer_once(
    capsys: pytest.CaptureFixture[str], make_node: Any
) -> None:
    node = make_node()
    await node.start()
    await node.until_available()
    old = node.probe.status.instance_id
    async for step in node.operator.Recycle(control_pb2.RecycleRequest(), timeout=30):
        last = step
    new = node.probe.status.instance_id
    happened = await node.operator.GetEvents(control_pb2.GetEventsRequest(), timeout=5)
    assert ("recycled", old, new) in [(entry.kind, entry.before, entry.after) for entry in happened.happenings]
    records = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
    (finished,) = [record for record in records if record["event"] == "recycle.finished"]
    assert (finished["status"], finished["instance_id"]) == ("ok", new)
    assert finished["elapsed_s"] == pytest.approx(last.elapsed_s, abs=0.001)
    assert [record["instance_id"] for record in records if record["event"] == "runtime.seen"] == [old, new]
    assert [record["event"] for record in records if record.get("peer") == "owner"] == ["peer.connected"]


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
