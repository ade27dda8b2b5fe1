"""gRPC over Unix sockets: live paths are not stolen, dead ones are replaced, calls need a deadline."""

import os
import stat
import tempfile
from pathlib import Path

import grpc
import pytest

from tie.daemon import rpc
from tie.daemon.errors import ConfigError
from tie.daemon.socket_path import SocketInUseError, claim, prepare_directory
from tie.proto import metrics_pb2, metrics_pb2_grpc


@pytest.fixture
def socket_path():
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield Path(directory) / "edge" / "server.sock"


def nothing(server: grpc.aio.Server) -> None:
    del server


async def scrape(path: Path, **arguments) -> str:
    async with rpc.connect(path) as channel:
        await rpc.wait_ready(channel, 5)
        reply = await metrics_pb2_grpc.MetricsStub(channel).Scrape(metrics_pb2.ScrapeRequest(), **arguments)
        return reply.text


async def test_a_server_answers_and_guards_its_socket(socket_path):
    async with rpc.serve(socket_path, nothing, metrics=lambda: "up 1\n"):
        assert await scrape(socket_path, timeout=5) == "up 1\n"
        assert stat.S_IMODE(socket_path.stat().st_mode) == 0o660
        assert socket_path.parent.stat().st_mode & 0o777 == 0o750


async def test_metrics_may_be_gathered_by_a_coroutine(socket_path):
    async def text() -> str:
        return "up 2\n"

    async with rpc.serve(socket_path, nothing, metrics=text):
        assert await scrape(socket_path, timeout=5) == "up 2\n"


async def test_a_call_without_a_deadline_is_refused(socket_path):
    async with rpc.serve(socket_path, nothing, metrics=lambda: ""):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await scrape(socket_path)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_second_server_does_not_take_a_live_socket(socket_path):
    async with rpc.serve(socket_path, nothing, metrics=lambda: "first"):
        with pytest.raises(SocketInUseError):
            async with rpc.serve(socket_path, nothing):
                pytest.fail("the second server started")
        assert await scrape(socket_path, timeout=5) == "first"


async def test_a_dead_server_s_socket_is_replaced_and_the_lock_given_back(socket_path):
    for text in ("first", "second"):
        async with rpc.serve(socket_path, nothing, metrics=lambda text=text: text):
            assert await scrape(socket_path, timeout=5) == text


async def test_a_path_that_no_socket_can_have_is_a_configuration_error():
    with pytest.raises(ConfigError, match="107"):
        prepare_directory(Path("/tmp") / ("x" * 120) / "a.sock")


async def test_a_file_that_is_no_socket_is_left_alone(socket_path):
    socket_path.parent.mkdir()
    socket_path.write_text("kept")
    os.close(claim(socket_path))
    assert socket_path.read_text() == "kept"


async def test_nobody_there_is_noticed_within_the_deadline(socket_path):
    async with rpc.connect(socket_path) as channel:
        with pytest.raises(TimeoutError):
            await rpc.wait_ready(channel, 0.2)
