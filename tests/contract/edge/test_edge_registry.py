"""The Attach stream: numbered reports, acknowledgements, withdrawal."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from tie.cloudboard import key_watch
from tie.cloudboard.registry import Registry, Servicer
from tie.daemon import rpc
from tie.proto import cloudboard_pb2, cloudboard_pb2_grpc, kps_pb2, kps_pb2_grpc
from tie.proto.cloudboard_pb2 import STATE_AVAILABLE, STATE_BUSY, NodeReport


class Board:
    """A registry behind its socket, and one client channel to it."""

    def __init__(self, registry: Registry, stub: "cloudboard_pb2_grpc.CloudBoardAsyncStub") -> None:
        self.registry = registry
        self.stub = stub

    def attach(self):
        return self.stub.Attach(wait_for_ready=True)

    async def until(self, condition) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.005)


@pytest.fixture
async def board(tmp_path_factory) -> AsyncIterator[Board]:
    path = Path(tmp_path_factory.mktemp("b")) / "node.sock"
    registry = Registry("node-0", max_in_flight=2)

    def register(server) -> None:
        cloudboard_pb2_grpc.add_CloudBoardServicer_to_server(Servicer(registry), server)

    async with rpc.serve(path, register), rpc.connect(path) as channel:
        yield Board(registry, cloudboard_pb2_grpc.CloudBoardStub(channel))


def report(number: int, state: int = STATE_AVAILABLE, **fields: object) -> NodeReport:
    return NodeReport(**{"number": number, "node_id": "node-0", "state": state, "model": "m", **fields})


async def test_reports_are_acknowledged_and_put_in_force(board) -> None:
    call = board.attach()
    for number, state in enumerate((STATE_BUSY, STATE_AVAILABLE, STATE_BUSY), start=1):
        await call.write(report(number, state))
        assert (await call.read()).number == number
        assert board.registry.takes_requests() == (state == STATE_AVAILABLE)
    entry = (await board.stub.GetRegistry(cloudboard_pb2.GetRegistryRequest(), timeout=5)).nodes[0]
    assert (entry.node_id, entry.state, entry.model) == ("node-0", STATE_BUSY, "m")
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK
    assert board.registry.report is None
    assert not (await board.stub.GetRegistry(cloudboard_pb2.GetRegistryRequest(), timeout=5)).nodes


@pytest.mark.parametrize(
    "bad",
    [
        report(1),  # a repeat
        report(3),  # a gap
        report(0),
        report(2, state=0),
        report(2, state=99),
        report(2, node_id="node-1"),
        report(2, summary="x" * 2000),
    ],
)
async def test_a_bad_report_breaks_the_stream_and_withdraws_the_node(board, bad) -> None:
    call = board.attach()
    await call.write(report(1))
    await call.read()
    assert board.registry.takes_requests()
    await call.write(bad)
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    await board.until(lambda: board.registry.report is None)


async def test_a_client_that_vanishes_withdraws_the_node(board) -> None:
    call = board.attach()
    await call.write(report(1))
    await call.read()
    call.cancel()
    await board.until(lambda: not board.registry.takes_requests())


async def test_what_is_in_flight_is_said_again_while_busy(board) -> None:
    call = board.attach()
    await call.write(report(1))
    assert (await call.read()).in_flight == 0
    assert board.registry.begin()
    assert board.registry.begin()
    assert not board.registry.begin()  # the limit
    await call.write(report(2, STATE_BUSY))
    ack = await call.read()
    assert (ack.number, ack.in_flight) == (2, 2)
    assert not board.registry.begin()
    for left in (1, 0):
        board.registry.end()
        ack = await call.read()
        assert (ack.number, ack.in_flight) == (2, left)
    await call.write(report(3))
    assert (await call.read()).number == 3
    assert board.registry.begin()


async def test_a_newer_stream_takes_over(board) -> None:
    first = board.attach()
    await first.write(report(1))
    await first.read()
    second = board.attach()
    await second.write(report(1, STATE_BUSY))
    assert (await second.read()).number == 1
    assert await first.code() is grpc.StatusCode.ABORTED
    assert board.registry.report.state == STATE_BUSY
    await second.write(report(2))
    await second.read()
    assert board.registry.takes_requests()


async def test_what_is_known_of_the_keys_is_told_at_once_in_any_state(board) -> None:
    call = board.attach()
    await call.write(report(1))
    assert (await call.read()).keys == cloudboard_pb2.KEY_SERVICE_UNSPECIFIED
    board.registry.tell_keys(cloudboard_pb2.KEY_SERVICE_ANSWERS, "ab")
    told = await call.read()
    assert (told.number, told.keys, told.key_id) == (1, cloudboard_pb2.KEY_SERVICE_ANSWERS, "ab")
    board.registry.tell_keys(cloudboard_pb2.KEY_SERVICE_SILENT, "")
    assert (await call.read()).keys == cloudboard_pb2.KEY_SERVICE_SILENT
    call.cancel()


async def test_a_key_service_that_hangs_or_dies_is_silent_until_it_answers(tmp_path_factory, monkeypatch) -> None:
    monkeypatch.setattr(key_watch, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(key_watch, "PERIOD_S", 0.02)
    path = Path(tmp_path_factory.mktemp("k")) / "kps.sock"
    registry = Registry("node-0", max_in_flight=2)
    changed = registry.listen()
    awake = asyncio.Event()

    class Keys(kps_pb2_grpc.KeyProtectionServicer):
        async def GetStatement(self, _request, _context):  # noqa: N802
            await awake.wait()
            return kps_pb2.KeyStatement(key_id=b"\xab\xcd")

    async def until(keys: int) -> None:
        async with asyncio.timeout(20):
            while registry.keys != keys:
                await changed.wait()
                changed.clear()

    def register(server) -> None:
        kps_pb2_grpc.add_KeyProtectionServicer_to_server(Keys(), server)

    async with rpc.connect(path) as channel:
        watching = asyncio.create_task(key_watch.KeyWatch(channel, registry).run())
        async with rpc.serve(path, register, grace=0.0):
            await until(cloudboard_pb2.KEY_SERVICE_SILENT)  # it hangs
            awake.set()
            await until(cloudboard_pb2.KEY_SERVICE_ANSWERS)
            assert registry.key_id == "abcd"
        await until(cloudboard_pb2.KEY_SERVICE_SILENT)  # it is gone
        assert registry.key_id == ""
        async with rpc.serve(path, register, grace=0.0):
            await until(cloudboard_pb2.KEY_SERVICE_ANSWERS)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
