"""owner.sock and control.sock of a running tie-model-owner, hostile clients included."""

import asyncio
import contextlib
import hashlib
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvxfer import seals
from kvxfer.channel import Channel
from kvxfer.errors import PeerDiedError
from model_owner import server as server_module
from model_owner.prefix_pool import PrefixPools
from model_owner.server import AttachServer, allowed_uids
from model_owner.weights import Progress, Weights
from tie.assets.sample import make_sample_bundle
from tie.bones.config import ModelConfig
from tie.daemon import config as node_config
from tie.daemon import rpc
from tie.daemon.config import NodeConfig
from tie.daemon.errors import ConfigError
from tie.proto import metrics_pb2, metrics_pb2_grpc, owner_pb2, owner_pb2_grpc
from waiting import wait_for

DEADLINE = 30.0


@pytest.fixture(scope="session")
def bundle(tmp_path_factory):
    return make_sample_bundle(tmp_path_factory.mktemp("sample") / "bundle")


@contextlib.contextmanager
def _owner(bundle: str, dtype: str = "bf16"):
    """A tie-model-owner process and its configuration."""
    # Socket paths are short, pytest's directories are not.
    with tempfile.TemporaryDirectory(prefix="own") as directory:
        config = NodeConfig(
            run_dir=f"{directory}/run",
            model=node_config.ModelConfig(bundle=bundle),
            runtime=node_config.RuntimeConfig(executor="torch", dtype=dtype),
        )
        (Path(directory) / "node.toml").write_bytes(node_config.dump(config))
        process = subprocess.Popen(
            [sys.executable, "-m", "model_owner.main", "--config", f"{directory}/node.toml"],
            stderr=subprocess.PIPE,
            env={**os.environ, "TIE_DUMPABLE": "1"},  # or nobody but root could count its descriptors
        )
        try:
            yield process, config
        finally:
            if process.poll() is None:
                process.kill()
            process.wait(DEADLINE)
            process.stderr.close()


def _connect(config) -> Channel:
    def connected() -> Channel | None:
        with contextlib.suppress(PeerDiedError):
            return Channel.connect(config.sockets.owner, timeout=5)

    return wait_for(connected, "the owner to listen", DEADLINE)


def _request(layout_id="torch-cpu-bf16", rank=0, world_size=1) -> bytes:
    attach = owner_pb2.Attach(rank=rank, world_size=world_size, layout_id=layout_id)
    return owner_pb2.OwnerRequest(attach=attach).SerializeToString()


def _ask(channel, message) -> tuple[owner_pb2.OwnerReply, list[int]]:
    channel.send(message, timeout=5)
    data, descriptors = channel.receive(timeout=5)
    return owner_pb2.OwnerReply.FromString(data), descriptors


def _attach(channel, layout_id="torch-cpu-bf16"):
    def attached() -> tuple[owner_pb2.OwnerReply, list[int]] | None:
        reply, descriptors = _ask(channel, _request(layout_id))
        return None if reply.WhichOneof("kind") == "loading" else (reply, descriptors)

    return wait_for(attached, "the load to end", DEADLINE)


async def _status(config) -> owner_pb2.OwnerStatus:
    async with rpc.connect(config.sockets.owner_control) as channel:
        await rpc.wait_ready(channel, DEADLINE)
        return await owner_pb2_grpc.ModelOwnerStub(channel).GetStatus(owner_pb2.GetStatusRequest(), timeout=5)


@pytest.fixture(scope="module")
def running(bundle):
    with _owner(str(bundle.directory)) as (process, config):
        _connect(config).close()
        yield process, config


def test_attached_runtime_has_everything(running, bundle):
    _, config = running
    with _connect(config) as channel:
        reply, (arena, table) = _attach(channel)
    attached = reply.attached
    seals.require(arena, seals.IMMUTABLE, attached.arena_bytes)
    seals.require(table, seals.IMMUTABLE, attached.table_bytes)
    data = os.pread(table, attached.table_bytes, 0)
    assert hashlib.sha256(data).digest() == attached.table_sha256
    tensors = owner_pb2.TensorTable.FromString(data).tensors
    assert all(tensor.offset % 64 == 0 and tensor.offset + tensor.bytes <= attached.arena_bytes for tensor in tensors)
    assert ModelConfig.from_json(attached.config_json).num_layers == 2
    assert (attached.model, attached.release) == (bundle.manifest.model, bundle.manifest.release)
    with mmap.mmap(arena, attached.arena_bytes, mmap.MAP_SHARED, mmap.PROT_READ) as view:
        assert any(view[:4096])
    with pytest.raises(PermissionError):
        mmap.mmap(arena, attached.arena_bytes, mmap.MAP_SHARED, mmap.PROT_WRITE | mmap.PROT_READ)
    os.close(arena)
    os.close(table)


async def test_status_and_metrics(running, bundle):
    _, config = running
    with _connect(config) as channel:
        reply, descriptors = _attach(channel)
    for descriptor in descriptors:
        os.close(descriptor)
    status = await _status(config)
    assert status.state == owner_pb2.STATE_READY
    assert status.owner_instance == reply.attached.owner_instance
    assert status.generation == reply.attached.generation == 1
    assert status.weight_bytes_read % bundle.manifest.files["model.safetensors"].bytes == 0
    async with rpc.connect(config.sockets.owner_control) as channel:
        scrape = metrics_pb2_grpc.MetricsStub(channel).Scrape(metrics_pb2.ScrapeRequest(), timeout=5)
        text = (await scrape).text
    assert 'tie_owner_state{state="ready"} 1.0' in text
    assert "tie_owner_weight_bytes_read_total" in text
    with pytest.raises(grpc.aio.AioRpcError):
        async with rpc.connect(config.sockets.owner_control) as channel:
            await owner_pb2_grpc.ModelOwnerStub(channel).GetStatus(owner_pb2.GetStatusRequest())


def test_many_runtimes_share_one_arena(running):
    _, config = running
    channels = [_connect(config) for _ in range(20)]
    inodes = set()
    for channel in channels:
        _, descriptors = _attach(channel)
        inodes.add(os.fstat(descriptors[0]).st_ino)
        for descriptor in descriptors:
            os.close(descriptor)
    assert len(inodes) == 1
    for channel in channels:
        channel.close()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"layout_id": "torch-tpu-f8"}, "unknown-layout"),
        ({"layout_id": ""}, "unknown-layout"),
        ({"rank": 2, "world_size": 2}, "impossible-rank"),
        ({"world_size": 0}, "impossible-rank"),
        ({"world_size": 65}, "impossible-rank"),
        ({"layout_id": "native-auto", "world_size": 2}, "unsupported-split"),
    ],
)
def test_refusals_keep_the_connection(running, options, reason):
    _, config = running
    with _connect(config) as channel:
        reply, descriptors = _ask(channel, _request(**options))
        assert (reply.refused.reason, descriptors) == (reason, [])
        reply, descriptors = _attach(channel)
        assert reply.WhichOneof("kind") == "attached"
        for descriptor in descriptors:
            os.close(descriptor)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.one_of(st.binary(min_size=1, max_size=300), st.just(bytes(60000)), st.just(b"\xff" * 5000)))
def test_any_bytes_are_answered_or_end_the_connection(running, data):
    process, config = running
    with _connect(config) as channel:
        reply, descriptors = _ask(channel, data)
        assert reply.WhichOneof("kind") is not None
        if reply.refused.reason == "malformed":
            with pytest.raises(PeerDiedError):
                channel.receive(timeout=5)
        for descriptor in descriptors:
            os.close(descriptor)
    assert process.poll() is None


def test_descriptors_from_a_client_are_dropped(running):
    process, config = running
    descriptors = Path(f"/proc/{process.pid}/fd")
    with _connect(config) as channel:
        _ask(channel, _request("none"))
        before = len(list(descriptors.iterdir()))
        for _ in range(20):
            channel.send(_request("none"), [0, 0, 0], timeout=5)
            channel.receive(timeout=5)
        assert len(list(descriptors.iterdir())) == before


def _flood(connection: socket.socket) -> None:
    while True:
        connection.send(_request("none"))


def test_a_client_that_does_not_read_is_dropped_and_others_are_served(running):
    _, config = running
    with _connect(config) as flood, _connect(config) as other:
        raw = socket.socket(fileno=os.dup(flood.fileno()))
        raw.settimeout(DEADLINE)
        with raw, pytest.raises((BrokenPipeError, ConnectionResetError)):
            _flood(raw)
        reply, _ = _ask(other, _request("none"))
        assert reply.refused.reason == "unknown-layout"


def test_one_too_many(running, monkeypatch):
    process, config = running
    channels = [_connect(config) for _ in range(server_module.MAX_CLIENTS + 1)]
    assert _ask(channels[-1], _request())[0].refused.reason == "too-many-clients"
    for channel in channels:
        channel.close()

    def served() -> bool:
        with _connect(config) as channel, contextlib.suppress(PeerDiedError):
            return _ask(channel, _request("none"))[0].refused.reason == "unknown-layout"
        return False

    wait_for(served, "the owner to have room", DEADLINE)
    assert process.poll() is None


async def test_a_failed_load_is_a_state_and_stays_answerable(tmp_path):
    with _owner(str(tmp_path / "absent")) as (process, config):
        with _connect(config) as channel:
            reply, _ = _attach(channel)
        assert reply.refused.reason == "no-bundle"
        status = await _status(config)
        assert (status.state, status.error) == (owner_pb2.STATE_FAILED, "no-bundle")
        assert process.poll() is None


async def test_shutdown_by_the_controller(bundle):
    with _owner(str(bundle.directory)) as (process, config):
        await _status(config)
        async with rpc.connect(config.sockets.owner_control) as channel:
            request = owner_pb2.ShutdownRequest(reason="operator")
            await owner_pb2_grpc.ModelOwnerStub(channel).Shutdown(request, timeout=5)
        assert await asyncio.to_thread(process.wait, DEADLINE) == 0
        assert not config.sockets.owner.exists()


def test_weights_outlive_the_owner_and_a_new_one_takes_the_socket(bundle):
    with _owner(str(bundle.directory)) as (process, config):
        with _connect(config) as channel:
            reply, (arena, table) = _attach(channel)
            process.send_signal(signal.SIGKILL)
            process.wait(DEADLINE)
            with pytest.raises(PeerDiedError):
                channel.receive(timeout=5)
        with mmap.mmap(arena, reply.attached.arena_bytes, mmap.MAP_SHARED, mmap.PROT_READ) as view:
            assert any(view[:4096])
        os.close(arena)
        os.close(table)
        again = subprocess.Popen([*process.args], stderr=subprocess.DEVNULL)
        try:
            with _connect(config) as channel:
                second, descriptors = _attach(channel)
            for descriptor in descriptors:
                os.close(descriptor)
            assert second.attached.owner_instance != reply.attached.owner_instance
            assert second.attached.table_sha256 == reply.attached.table_sha256
            again.send_signal(signal.SIGTERM)
            assert again.wait(DEADLINE) == 0
        finally:
            again.kill()
            again.wait(DEADLINE)


def test_a_second_owner_does_not_take_over(running):
    process, config = running
    second = subprocess.run([*process.args], stderr=subprocess.PIPE, timeout=DEADLINE, check=False)
    assert second.returncode == 1
    assert process.poll() is None
    with _connect(config) as channel:
        assert _ask(channel, _request("none"))[0].refused.reason == "unknown-layout"


class _Served:
    """An attach server in this process, for what a process cannot be made to show."""

    def __init__(self, weights, uids):
        self.server = AttachServer(weights, PrefixPools(1 << 20), uids)
        self.directory = tempfile.TemporaryDirectory(prefix="own")
        self.path = Path(self.directory.name) / "o.sock"

    async def ask(self, message: bytes) -> owner_pb2.OwnerReply:
        async with self.server.serve(self.path):
            return await asyncio.to_thread(self._ask, message)

    def _ask(self, message):
        with Channel.connect(self.path, timeout=5) as channel:
            channel.send(message, timeout=5)
            return owner_pb2.OwnerReply.FromString(channel.receive(timeout=5)[0])


@pytest.fixture
def weights(bundle):
    made = Weights(str(bundle.directory), "torch-cpu-bf16")
    yield made
    made.close()


async def test_a_stranger_is_refused(weights):
    served = _Served(weights, {os.geteuid() + 1})
    reply = await served.ask(_request())
    assert reply.refused.reason == "not-allowed"
    assert served.server.refusals == {"not-allowed": 1}
    served.directory.cleanup()


async def test_loading_is_said_with_progress(weights, monkeypatch):
    monkeypatch.setattr(weights, "get", lambda _: Progress(3, 10))
    served = _Served(weights, {os.geteuid()})
    reply = await served.ask(_request())
    assert (reply.loading.bytes_done, reply.loading.bytes_total) == (3, 10)
    served.directory.cleanup()


@pytest.mark.parametrize("welcome", [True, False])
async def test_a_silent_client_is_disconnected(weights, monkeypatch, welcome):
    monkeypatch.setattr(server_module, "IDLE_S", 0.05)
    monkeypatch.setattr(server_module, "UNWELCOME_S", 0.05)
    served = _Served(weights, {os.geteuid()} if welcome else set())
    async with served.server.serve(served.path):

        def wait_for_the_end():
            with Channel.connect(served.path, timeout=5) as channel, pytest.raises(PeerDiedError):
                channel.receive(timeout=DEADLINE)

        await asyncio.to_thread(wait_for_the_end)
    served.directory.cleanup()


def test_allowed_users():
    assert allowed_uids(["root", "1234"]) == {0, 1234, os.geteuid()}
    with pytest.raises(ConfigError):
        allowed_uids(["no-such-user-here"])
