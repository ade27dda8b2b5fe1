"""What operators are told afterwards: their own words, what was cut, keys, cache store, disk, the controller itself."""

import asyncio
import contextlib
import os
import time
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from controller_states import AVAILABLE, ERROR, MAINTENANCE, eventually
from tie.proto import cloudboard_pb2, control_pb2


async def told(node: Any, *kinds: str) -> list[control_pb2.Happening]:
    reply = await node.operator.GetEvents(control_pb2.GetEventsRequest(), timeout=5)
    return [entry for entry in reply.happenings if entry.kind in kinds]


async def until_told(node: Any, kind: str, code: str) -> control_pb2.Happening:
    async with asyncio.timeout(30):
        while True:
            for entry in await told(node, kind):
                if entry.code == code:
                    return entry
            await asyncio.sleep(0.02)


async def kill_controller(node: Any) -> None:
    """As if by SIGKILL: it gets to say nothing."""
    node.task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await node.task
    node.task = None


async def test_a_recycle_tells_whose_it_was_and_what_it_cut(node: Any) -> None:
    node.cloudboard.in_flight = 2
    request = control_pb2.RecycleRequest(reason="kernel update, Ann", drain_deadline_ms=300)
    steps = [step async for step in node.operator.Recycle(request, timeout=30)]
    assert steps[-1].cut == 2
    (began,) = await told(node, "recycle")
    assert (began.code, began.word) == ("operator", "kernel update, Ann")
    assert began.seconds == pytest.approx(0.3)
    (cut,) = await told(node, "cut")
    assert cut.count == 2


@pytest.mark.parametrize("word", ["a" * 201, "two\nlines", "\x1b[31mred"])
async def test_what_is_no_reason_is_refused(node: Any, word: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await node.operator.SetMaintenance(control_pb2.SetMaintenanceRequest(on=True, reason=word), timeout=5)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError):
        [step async for step in node.operator.Recycle(control_pb2.RecycleRequest(reason=word), timeout=5)]
    status = await node.status()
    assert (status.state, status.recycles, status.maintenance) == (AVAILABLE, 0, False)


async def test_a_container_that_ends_in_a_recycle_has_not_died(node: Any) -> None:
    node.probe.replace = False
    call = node.operator.Recycle(control_pb2.RecycleRequest(), timeout=30)
    await eventually(lambda: len(node.probe.recycles) == 1)
    await node.probe.kill()
    assert (await until_told(node, "peer", "left")).after == "probe"
    node.probe.fresh()
    await node.probe.start()
    assert [step async for step in call][-1].finished
    await node.probe.kill()
    await until_told(node, "peer", "gone")


async def test_a_controller_that_died_says_so_and_knows_whose_maintenance_it_is(node: Any) -> None:
    request = control_pb2.SetMaintenanceRequest(on=True, reason="disk swap, Ann")
    assert (await node.operator.SetMaintenance(request, timeout=5)).word == "disk swap, Ann"
    await node.until_state(MAINTENANCE)
    # What exchanges the bundle of a node in maintenance does not make it its own.
    await node.operator.SetMaintenance(control_pb2.SetMaintenanceRequest(on=True, reason="asset"), timeout=5)
    await kill_controller(node)
    await node.start_controller()
    status = await node.until_state(MAINTENANCE)
    assert (status.word, status.recycles) == ("disk swap, Ann", 2)
    assert [entry.code for entry in await told(node, "controller")] == ["began", "began-anew"]
    assert {entry.word for entry in await told(node, "maintenance")} == {"disk swap, Ann"}


async def test_a_controller_that_was_stopped_did_not_die(node: Any) -> None:
    await node.stop_controller()
    await node.start_controller()
    assert [entry.code for entry in await told(node, "controller")] == ["began", "stopped", "began"]


async def test_a_controller_whose_socket_lost_its_file_says_so(node: Any) -> None:
    node.config.sockets.control.unlink()
    async with asyncio.timeout(30):
        await node.task
    node.task = None
    await node.start_controller()
    assert [entry.code for entry in await told(node, "controller")] == ["began", "socket-gone", "began"]


async def test_without_its_key_service_a_node_is_withdrawn(node: Any) -> None:
    node.cloudboard.keys = cloudboard_pb2.KEY_SERVICE_SILENT
    status = await node.until_state(ERROR)
    assert (list(status.reasons), status.keys) == (["keys-silent"], "silent")
    node.cloudboard.keys = cloudboard_pb2.KEY_SERVICE_ANSWERS
    await node.until_available()
    assert [entry.code for entry in await told(node, "keys")] == ["silent", "answers"]
    assert not node.probe.recycles


async def test_a_new_key_is_told_and_costs_nothing(node: Any) -> None:
    node.cloudboard.keys, node.cloudboard.key_id = cloudboard_pb2.KEY_SERVICE_ANSWERS, "aa"
    await node.until(lambda status: status.keys == "answers")
    node.cloudboard.key_id = "bb"
    await until_told(node, "keys", "new-key")
    assert (await node.status()).state == AVAILABLE


async def test_a_cloudboard_with_an_impossible_key_is_gone(node: Any) -> None:
    node.cloudboard.key_id = "no key"
    await node.until(lambda status: "cloudboard-gone" in status.reasons)
    assert (await until_told(node, "peer", "garbled")).after == "cloudboard"
    node.cloudboard.key_id = ""
    await node.until_available()


async def test_a_cache_store_that_begins_anew_is_told_and_costs_nothing(node: Any, make_store: Any) -> None:
    store = make_store(node.config.sockets.store_control, 1.5e9)
    await store.start()
    await node.until(lambda status: status.store_peer.connected)
    await store.kill()
    store = make_store(node.config.sockets.store_control, 1.6e9)
    await store.start()
    await until_told(node, "peer", "anew")
    status = await node.status()
    assert (status.state, status.store_peer.connected) == (AVAILABLE, True)


async def test_a_controller_that_stood_still_blames_nobody(node: Any) -> None:
    await node.until_looked()
    # The event loop, and with it everything in this process, stands still for longer than a peer may be silent.
    time.sleep(3.0)  # noqa: ASYNC251 (that it blocks is the point)
    still = await until_told(node, "controller", "stood-still")
    assert still.seconds >= 3.0
    await node.until_looked()
    assert (await node.status()).state == AVAILABLE
    assert [entry.after for entry in await told(node, "state")] == ["available"]
    assert {entry.code for entry in await told(node, "peer")} == {"connected"}


async def test_a_full_disk_is_told_and_noted(node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    really = os.statvfs

    def full(path: Path) -> os.statvfs_result:
        fields = list(really(path))
        fields[4] = 0  # f_bavail
        return os.statvfs_result(fields)

    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", full)
        await node.until(lambda status: list(status.notes) == ["disk-full"])
    await node.until(lambda status: not status.notes)
    assert [entry.code for entry in await told(node, "disk")] == ["full", "room"]
    assert (await node.status()).state == AVAILABLE
