"""A node's edge: real key protection service, CloudBoard, jobhelpers and clients. The app alone is played, at app.sock.

Jobhelpers are real processes, one for each connection, started as a socket unit with Accept=yes would.
"""

import asyncio
import contextlib
import math
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from edge_requests import DEADLINE_S, echo
from tie.cloudboard import kps, main
from tie.cloudboard.keys import create_node_keys, public_path
from tie.daemon import config as node_config
from tie.daemon import frames, rpc, service, socket_path
from tie.daemon.config import AppConfig, CloudBoardConfig, NodeConfig
from tie.daemon.padding import pad
from tie.device import AsyncClient
from tie.proto import app_pb2, cloudboard_pb2, cloudboard_pb2_grpc, metrics_pb2, metrics_pb2_grpc, request_pb2


@dataclass
class AppRun:
    """One connection to the played app: what it was sent, and how to answer."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    buckets: tuple[int, ...]
    opened: app_pb2.Open | None = None
    body: bytes = b""
    aborted: bool = False

    async def say(self, message: app_pb2.AppOut) -> None:
        await frames.write_bytes(self.writer, pad(message, self.buckets), timeout=DEADLINE_S)

    async def text(self, text: str, index: int = 0) -> None:
        await self.say(app_pb2.AppOut(delta=app_pb2.Delta(text=text, index=index)))

    async def done(self, status: app_pb2.Status.ValueType = app_pb2.STATUS_OK, detail: str = "") -> None:
        finish = [app_pb2.Finish(reason=app_pb2.FINISH_STOP)] if status == app_pb2.STATUS_OK else []
        usage = app_pb2.Usage(prompt_tokens=3, completion_tokens=2)
        await self.say(app_pb2.AppOut(done=app_pb2.Done(status=status, finish=finish, usage=usage, detail=detail)))

    async def next(self, idle: float = DEADLINE_S) -> app_pb2.AppIn | None:
        return await frames.read_message(self.reader, app_pb2.AppIn, limit=1 << 20, timeout=DEADLINE_S, idle=idle)

    async def request(self) -> request_pb2.InferenceRequest | None:
        """The whole request; None when the other side stopped before its end."""
        while True:
            message = await self.next()
            if message is None or message.HasField("abort"):
                self.aborted = message is not None
                return None
            assert message.HasField("body")
            self.body += message.body.data
            if message.body.last:
                return request_pb2.InferenceRequest.FromString(self.body)


Behaviour = Callable[[AppRun], Awaitable[None]]


@dataclass
class Edge:
    """The running edge.

    Attributes:
        behaviour: what the played app does with a request; looked up when one is opened.
        runs: every connection to the app, in order.
        served: those of them that saw a request, in the order of the requests: of pairs that start together either one
            may connect first.
        jobhelpers: every process started for a connection.
    """

    config: NodeConfig
    config_path: Path
    behaviour: Behaviour = echo
    runs: list[AppRun] = field(default_factory=list)
    served: list[AppRun] = field(default_factory=list)
    jobhelpers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    acks: list[cloudboard_pb2.NodeAck] = field(default_factory=list)
    _stack: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)
    _kps: tuple[service.Lifetime, asyncio.Task[None]] | None = None
    _apps: set[asyncio.Task[None]] = field(default_factory=set)
    _call: object = None
    _number: int = 0
    _acked: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.config.cloudboard.port}"

    @property
    def statement_key(self) -> Path:
        return public_path(self.config.sockets.statement_key)

    def hold(self) -> asyncio.Event:
        """Has the app answer "one ", and "two" once the event is set that this returns."""
        release = asyncio.Event()

        async def answer(run: AppRun) -> None:
            await run.request()
            await run.text("one ")
            await release.wait()
            await run.text("two")
            await run.done()

        self.behaviour = answer
        return release

    async def start_kps(self) -> None:
        self._kps = await _start(kps.serve, self.config)

    async def stop_kps(self) -> None:
        assert self._kps is not None
        await _stop(*self._kps)
        self._kps = None

    async def attach(self) -> None:
        channel = await self._stack.enter_async_context(rpc.connect(self.config.sockets.node))
        stub = cloudboard_pb2_grpc.CloudBoardStub(channel)
        self._call = stub.Attach(wait_for_ready=True)
        self._number = 0
        reading = asyncio.create_task(self._read_acks(self._call))
        self._stack.callback(reading.cancel)

    async def report(self, state: cloudboard_pb2.State.ValueType) -> None:
        """Reports a state and waits for its acknowledgement."""
        self._number += 1
        report = cloudboard_pb2.NodeReport(number=self._number, node_id=self.config.node_id, state=state)
        await self._call.write(report)  # type: ignore[attr-defined]
        await self.until(lambda: bool(self.acks) and self.acks[-1].number == self._number)

    def withdraw(self) -> None:
        """Breaks the Attach stream."""
        self._call.cancel()  # type: ignore[attr-defined]

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A bare connection to the ingress."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.config.cloudboard.port)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def metric(self, line: str) -> None:
        """Waits until CloudBoard's metrics have a line."""
        async with asyncio.timeout(DEADLINE_S), rpc.connect(self.config.sockets.node) as channel:
            stub = metrics_pb2_grpc.MetricsStub(channel)
            while line not in (await stub.Scrape(metrics_pb2.ScrapeRequest(), timeout=5)).text:
                await asyncio.sleep(0.01)

    async def until(self, condition: Callable[[], bool], deadline: float = DEADLINE_S) -> None:
        """Waits for something that another process brings about."""
        async with asyncio.timeout(deadline):
            while not condition():
                await asyncio.sleep(0.01)

    async def _read_acks(self, call: object) -> None:
        async for ack in call:  # type: ignore[attr-defined]
            self.acks.append(ack)

    async def _app(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        run = AppRun(reader, writer, self.config.app.buckets)
        self.runs.append(run)
        task = asyncio.current_task()
        assert task is not None
        self._apps.add(task)
        try:
            await run.say(app_pb2.AppOut(ready=app_pb2.Ready()))
            first = await run.next(idle=math.inf)
            if first is not None:
                assert first.HasField("open")
                run.opened = first.open
                self.served.append(run)
                await self.behaviour(run)
        except (ConnectionError, frames.PeerDiedError):
            pass  # the jobhelper went away, which some tests want
        finally:
            writer.transport.abort()

    def _accept(self, listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            shell = 'exec 3<&0 </dev/null; LISTEN_PID=$$ LISTEN_FDS=1 exec "$@"'
            command = [sys.executable, "-m", "tie.cloudboard.jobhelper", "--config", str(self.config_path)]
            process = subprocess.Popen(["sh", "-c", shell, "sh", *command], stdin=connection)
            self.jobhelpers.append(process)

    async def start(self) -> None:
        create_node_keys(self.config)
        self.config_path.write_bytes(node_config.dump(self.config))
        sockets = self.config.sockets
        socket_path.prepare_directory(sockets.app)
        app = await asyncio.start_unix_server(self._app, sockets.app)
        self._stack.callback(app.close)
        socket_path.prepare_directory(sockets.jobhelper)
        listening = self._stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listening.bind(str(sockets.jobhelper))
        listening.listen(128)
        asyncio.get_running_loop().add_reader(listening, self._accept, listening)
        self._stack.callback(asyncio.get_running_loop().remove_reader, listening)
        await self.start_kps()
        self._stack.push_async_callback(_stop, *await _start(main.serve, self.config))
        await self.attach()
        await self.report(cloudboard_pb2.STATE_AVAILABLE)

    async def stop(self) -> None:
        await self._stack.aclose()
        if self._kps is not None:
            await self.stop_kps()
        for process in self.jobhelpers:
            if process.poll() is None:
                process.terminate()
        for process in self.jobhelpers:
            await asyncio.to_thread(process.wait, 20)
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*self._apps)


async def _start(
    daemon: Callable[[NodeConfig, service.Lifetime], Awaitable[None]], config: NodeConfig
) -> tuple[service.Lifetime, asyncio.Task[None]]:
    lifetime = service.Lifetime("test")
    serving = asyncio.Event()
    lifetime.ready = lambda *_: serving.set()  # type: ignore[method-assign]
    task: asyncio.Task[None] = asyncio.ensure_future(daemon(config, lifetime))
    ready = asyncio.create_task(serving.wait())
    await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED, timeout=DEADLINE_S)
    ready.cancel()
    if task.done():
        await task
    return lifetime, task


async def _stop(lifetime: service.Lifetime, task: "asyncio.Task[None]") -> None:
    lifetime.stop()
    async with asyncio.timeout(DEADLINE_S):
        await task


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
async def make_edge() -> AsyncIterator[Callable[..., Awaitable[Edge]]]:
    """Starts an edge, of the fleet of another if so told; other keyword arguments change its configuration."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(
            standby: int = 1, app: AppConfig | None = None, fleet: Edge | None = None, **cloudboard: object
        ) -> Edge:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="edge", dir="/tmp")))
            config = NodeConfig(
                run_dir=str(directory),
                app=app or AppConfig(),
                cloudboard=CloudBoardConfig(port=_free_port(), standby=standby, **cloudboard),  # type: ignore[arg-type]
            )
            if fleet is not None:
                config.sockets.statement_key.parent.mkdir(mode=0o700)
                shutil.copy(fleet.config.sockets.statement_key, config.sockets.statement_key)
            edge = Edge(config=config, config_path=directory / "node.toml")
            stack.push_async_callback(edge.stop)
            await edge.start()
            return edge

        yield make


@pytest.fixture
async def edge(make_edge: Callable[..., Awaitable[Edge]]) -> Edge:
    """An edge whose node is available, with one pair standing by."""
    return await make_edge()


@pytest.fixture
async def client(edge: Edge) -> AsyncIterator[AsyncClient]:
    """A device of that edge."""
    async with AsyncClient(edge.url, edge.statement_key) as client:
        yield client
