"""Peers of the controller that speak the real contracts over real sockets, and a node built from them."""

import asyncio
import contextlib
import itertools
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from controllerd.main import serve
from tie.daemon import rpc
from tie.daemon.config import ControllerConfig, NodeConfig
from tie.daemon.service import Lifetime
from tie.proto import (
    cloudboard_pb2,
    cloudboard_pb2_grpc,
    control_pb2,
    control_pb2_grpc,
    gpuhealth_pb2,
    gpuhealth_pb2_grpc,
    owner_pb2,
    owner_pb2_grpc,
    probe_pb2,
    probe_pb2_grpc,
)

DEADLINE_S = 30.0
BEAT_S = 0.1


class Server(ABC):
    """A server that can be killed and started again, and whose status can be watched."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.changed = asyncio.Event()
        self.metrics = "# HELP peer_beats Beats\n# TYPE peer_beats gauge\npeer_beats 1.0\n"
        self._stack: AsyncExitStack | None = None

    @abstractmethod
    def register(self, server: Any) -> None:
        """Adds what it serves."""

    async def start(self) -> None:
        self._stack = AsyncExitStack()
        await self._stack.enter_async_context(
            rpc.serve(self.path, self.register, metrics=lambda: self.metrics, grace=0.0)
        )

    async def kill(self) -> None:
        if self._stack is not None:
            await self._stack.aclose()
            self._stack = None

    def ring(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def beats(self, make: Callable[[], Any]) -> AsyncIterator[Any]:
        while True:
            changed = self.changed
            yield make()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S):
                    await changed.wait()


class Probe(Server, probe_pb2_grpc.StatusProbeServicer):
    """A probe whose runtime is replaced when it is told to recycle."""

    names = itertools.count(1)

    def __init__(self, path: Path, journal: list[str]) -> None:
        super().__init__(path)
        self.journal = journal
        self.status = probe_pb2.RuntimeStatus()
        self.replace = True  # whether a recycled runtime is followed by a fresh one
        self.warms: list[str] = []
        self.recycles: list[probe_pb2.RecycleRequest] = []
        self.fresh()

    def register(self, server: Any) -> None:
        probe_pb2_grpc.add_StatusProbeServicer_to_server(self, server)

    def fresh(self, **fields: Any) -> None:
        self.status = probe_pb2.RuntimeStatus(
            state=probe_pb2.STATE_READY,
            instance_id=f"runtime-{next(self.names)}",
            last_canary=probe_pb2.Canary(ok=True, age_s=0.1, latency_s=0.01),
            model="demo",
            release="r1",
            owner_generation=1,
            uptime_s=1.0,
        )
        self.change(**fields)

    def change(self, **fields: Any) -> None:
        self.status.MergeFrom(probe_pb2.RuntimeStatus(**fields))
        self.ring()

    async def GetStatus(self, _request: Any, _context: Any) -> probe_pb2.RuntimeStatus:  # noqa: N802
        return self.status

    async def Watch(self, _request: Any, _context: Any) -> AsyncIterator[probe_pb2.RuntimeStatus]:  # noqa: N802
        async for status in self.beats(lambda: self.status):
            yield status

    async def Warm(self, _request: Any, _context: Any) -> AsyncIterator[probe_pb2.WarmProgress]:  # noqa: N802
        self.warms.append(self.status.instance_id)
        self.journal.append("warm")
        yield probe_pb2.WarmProgress(done=0, total=1)
        yield probe_pb2.WarmProgress(done=1, total=1)
        self.change(warmed=True)

    async def Recycle(self, request: probe_pb2.RecycleRequest, _context: Any) -> probe_pb2.RecycleReply:  # noqa: N802
        self.recycles.append(request)
        self.journal.append("recycle")
        old = self.status.instance_id
        self.change(state=probe_pb2.STATE_RECYCLING)
        if self.replace:
            asyncio.get_running_loop().call_later(0.1, self.fresh)
        return probe_pb2.RecycleReply(instance_id=old)


class Gpu(Server, gpuhealth_pb2_grpc.GpuHealthServicer):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.verdict = gpuhealth_pb2.NodeVerdict(verdict=gpuhealth_pb2.VERDICT_HEALTHY, age_s=0.1, provider="cpu")

    def register(self, server: Any) -> None:
        gpuhealth_pb2_grpc.add_GpuHealthServicer_to_server(self, server)

    def change(self, **fields: Any) -> None:
        self.verdict = gpuhealth_pb2.NodeVerdict(**{"age_s": 0.1, "provider": "cpu", **fields})
        self.ring()

    async def Watch(self, _request: Any, _context: Any) -> AsyncIterator[gpuhealth_pb2.NodeVerdict]:  # noqa: N802
        async for verdict in self.beats(lambda: self.verdict):
            yield verdict


class Owner(Server, owner_pb2_grpc.ModelOwnerServicer):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.status = owner_pb2.OwnerStatus(
            owner_instance="owner-1", generation=1, state=owner_pb2.STATE_READY, model="demo", release="r1"
        )

    def register(self, server: Any) -> None:
        owner_pb2_grpc.add_ModelOwnerServicer_to_server(self, server)

    async def GetStatus(self, _request: Any, _context: Any) -> owner_pb2.OwnerStatus:  # noqa: N802
        return self.status


class CloudBoard(Server, cloudboard_pb2_grpc.CloudBoardServicer):
    """Acknowledges every report, unless it is told to stay silent; checks their numbers."""

    def __init__(self, path: Path, journal: list[str]) -> None:
        super().__init__(path)
        self.journal = journal
        self.reports: list[cloudboard_pb2.NodeReport] = []
        self.in_flight = 0
        self.silent = False
        self.keys = cloudboard_pb2.KEY_SERVICE_UNSPECIFIED
        self.key_id = ""
        self.gaps = 0

    def register(self, server: Any) -> None:
        cloudboard_pb2_grpc.add_CloudBoardServicer_to_server(self, server)

    @property
    def state(self) -> int:
        return self.reports[-1].state if self.reports else cloudboard_pb2.STATE_UNSPECIFIED

    async def Attach(self, requests: Any, _context: Any) -> AsyncIterator[cloudboard_pb2.NodeAck]:  # noqa: N802
        expected = 0
        async for report in requests:
            expected += 1
            self.gaps += report.number != expected
            if self.state != report.state:
                self.journal.append(cloudboard_pb2.State.Name(report.state).removeprefix("STATE_").lower())
            self.reports.append(report)
            if not self.silent:
                yield cloudboard_pb2.NodeAck(
                    number=report.number, in_flight=self.in_flight, keys=self.keys, key_id=self.key_id
                )


class Store(Server):
    """A cache store's control socket: metrics, which say since when it has held entries."""

    def __init__(self, path: Path, began: float) -> None:
        super().__init__(path)
        self.metrics = f"tie_store_entries 0.0\ntie_store_start_time_seconds {began:e}\n"

    def register(self, server: Any) -> None:
        """Nothing but metrics."""


class Node:
    """All peers, a controller, and an operator."""

    def __init__(self, run_dir: Path, **settings: Any) -> None:
        defaults: dict[str, Any] = {
            "recycle_interval_s": 3600.0,
            "drain_deadline_s": 20.0,
            "busy_ack_deadline_s": 1.0,
            "fresh_runtime_deadline_s": 20.0,
            "error_grace_s": 0.5,
            "error_backoff_s": 0.5,
            "heartbeat_s": 0.5,
        }
        self.config = NodeConfig(run_dir=str(run_dir), controller=ControllerConfig(**{**defaults, **settings}))
        self.journal: list[str] = []
        sockets = self.config.sockets
        self.probe = Probe(sockets.probe, self.journal)
        self.gpu = Gpu(sockets.gpuhealth)
        self.owner = Owner(sockets.owner_control)
        self.cloudboard = CloudBoard(sockets.node, self.journal)
        self.lifetime = Lifetime("test")
        self.task: asyncio.Task[None] | None = None
        self._stack = AsyncExitStack()
        self.operator: Any = None

    async def start(self) -> None:
        for peer in (self.probe, self.gpu, self.owner, self.cloudboard):
            await peer.start()
        await self.start_controller()

    async def start_controller(self) -> None:
        self.lifetime = Lifetime("test")
        self.task = asyncio.create_task(serve(self.config, self.lifetime))
        await self.connect()

    async def connect(self) -> None:
        await self._stack.aclose()
        self._stack = AsyncExitStack()
        channel = await self._stack.enter_async_context(rpc.connect(self.config.sockets.control))
        await rpc.wait_ready(channel, DEADLINE_S)
        self.operator = control_pb2_grpc.NodeControlStub(channel)
        self.channel = channel

    async def stop_controller(self) -> None:
        await self._stack.aclose()
        if self.task is not None:
            self.lifetime.stop()
            async with asyncio.timeout(DEADLINE_S):
                await self.task
            self.task = None

    async def stop(self) -> None:
        await self.stop_controller()
        for peer in (self.probe, self.gpu, self.owner, self.cloudboard):
            await peer.kill()

    async def status(self) -> control_pb2.NodeStatus:
        return await self.operator.GetStatus(control_pb2.GetStatusRequest(), timeout=DEADLINE_S)

    async def until(self, condition: Callable[[control_pb2.NodeStatus], bool]) -> control_pb2.NodeStatus:
        """The first status of the watch for which `condition` holds."""
        call = self.operator.Watch(control_pb2.WatchRequest(), timeout=DEADLINE_S)
        try:
            async for status in call:
                if condition(status):
                    return status
        finally:
            call.cancel()
        raise AssertionError("the watch ended")

    async def until_state(self, state: "control_pb2.State.ValueType") -> control_pb2.NodeStatus:
        return await self.until(lambda status: status.state == state)

    async def until_lasting(self, state: "control_pb2.State.ValueType", seconds: float) -> control_pb2.NodeStatus:
        """The first status in which `state` has lasted for longer than this on the controller's own clock."""
        return await self.until(lambda status: status.state == state and status.state_age_s > seconds)

    async def until_looked(self) -> None:
        """Returns when the controller has heard news, and has looked at all it knows, several times from now on."""
        for verdict in (gpuhealth_pb2.VERDICT_DEGRADED, gpuhealth_pb2.VERDICT_HEALTHY) * 2:  # it serves with either
            self.gpu.change(verdict=verdict)
            await self.until(lambda status, verdict=verdict: status.gpu.verdict == verdict)

    async def until_available(self) -> control_pb2.NodeStatus:
        return await self.until_state(control_pb2.STATE_AVAILABLE)


@pytest.fixture
async def make_node() -> AsyncIterator[Callable[..., Node]]:
    """Builds nodes in a directory with a short path, and takes them down."""
    nodes: list[Node] = []
    run_dir = Path(tempfile.mkdtemp(prefix="ctl-", dir="/tmp"))

    def make(**settings: Any) -> Node:
        nodes.append(Node(run_dir / str(len(nodes)), **settings))
        return nodes[-1]

    yield make
    for node in nodes:
        await node.stop()
    shutil.rmtree(run_dir)


@pytest.fixture
async def make_store() -> AsyncIterator[Callable[[Path, float], Store]]:
    """Builds cache stores, and takes them down."""
    stores: list[Store] = []

    def make(path: Path, began: float) -> Store:
        stores.append(Store(path, began))
        return stores[-1]

    yield make
    for store in stores:
        await store.kill()


@pytest.fixture
async def node(make_node: Callable[..., Node]) -> Node:
    """A node that is available."""
    made = make_node()
    await made.start()
    await made.until_available()
    return made
