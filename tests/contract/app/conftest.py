"""The real tie-cloud-app process between a jobhelper played by the test and a runtime played at its two sockets."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import sysconfig
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from kvxfer import channel
from kvxfer.errors import PeerDiedError
from tie.app.session import Session
from tie.assets.bundle import Bundle
from tie.assets.sample import make_sample_bundle
from tie.assets.tokenizer import Tokenizer, load_tokenizer
from tie.daemon import config as node_config
from tie.daemon import frames, rpc, socket_path
from tie.daemon.triton import service_pb2, service_pb2_grpc
from tie.proto import app_pb2, request_pb2, runtime_pb2

DEADLINE_S = 20.0  # of every wait of these tests: far beyond what anything here takes
_APP = Path(sysconfig.get_path("scripts")) / "tie-cloud-app"
# What the service manager does: the connection as descriptor 3, and whom it is for.
_LAUNCH = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.environ.update(LISTEN_FDS='1', LISTEN_PID=str(os.getpid())); "
    "os.execv(sys.argv[2], sys.argv[2:])"
)

Answer = Callable[[runtime_pb2.GenerateRequest], AsyncGenerator[runtime_pb2.GenerateEvent, None]]


@pytest.fixture(scope="session")
def bundle():
    directory = Path(tempfile.mkdtemp(prefix="tie-app-", dir="/tmp"))
    yield make_sample_bundle(directory / "bundle", context_tokens=256)
    shutil.rmtree(directory)


@pytest.fixture(scope="session")
def tokenizer(bundle: Bundle) -> Tokenizer:
    return load_tokenizer(bundle)


class FakeRuntime(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Speaks Triton's streaming protocol and kv.sock as the runtime does; what it answers is the test's."""

    def __init__(self, config: node_config.NodeConfig, bundle: Bundle) -> None:
        self.answer: Answer = self.echo
        self.requests: list[runtime_pb2.GenerateRequest] = []
        self.cancelled = asyncio.Event()
        self.streams = 0
        self.hello = runtime_pb2.KvHello(
            instance_id="fake", model=bundle.manifest.model, release=bundle.manifest.release
        )
        self._config = config
        self._clients: list[channel.Channel] = []

    async def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802 (generated name)
        del request, context
        return service_pb2.ModelReadyResponse(ready=True)

    async def ModelStreamInfer(  # noqa: N802 (generated name)
        self, requests: AsyncIterator[Any], context: Any
    ) -> AsyncIterator[Any]:
        del context
        self.streams += 1
        try:
            async for message in requests:
                request = runtime_pb2.GenerateRequest.FromString(message.raw_input_contents[0][4:])
                self.requests.append(request)
                async with contextlib.aclosing(self.answer(request)) as events:
                    async for event in events:
                        yield self._reply(event)
                end = service_pb2.ModelStreamInferResponse()
                end.infer_response.parameters["triton_final_response"].bool_param = True
                yield end
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    @staticmethod
    def _reply(event: runtime_pb2.GenerateEvent) -> Any:
        payload = event.SerializeToString()
        reply = service_pb2.ModelStreamInferResponse()
        reply.infer_response.raw_output_contents.append(payload)
        return reply

    @staticmethod
    def tokens(index: int, ids: list[int], hold_bytes: int = 0, logprobs: Any = ()) -> runtime_pb2.GenerateEvent:
        return runtime_pb2.GenerateEvent(
            tokens=runtime_pb2.Tokens(index=index, token_ids=ids, hold_bytes=hold_bytes, logprobs=logprobs)
        )

    @staticmethod
    def finished(index: int, reason: Any, **counts: int) -> runtime_pb2.GenerateEvent:
        return runtime_pb2.GenerateEvent(finished=runtime_pb2.Finished(index=index, reason=reason, **counts))

    @staticmethod
    def failed(code: Any, detail: str = "") -> runtime_pb2.GenerateEvent:
        return runtime_pb2.GenerateEvent(failed=runtime_pb2.Failed(code=code, detail=detail))

    async def echo(self, request: runtime_pb2.GenerateRequest) -> AsyncGenerator[runtime_pb2.GenerateEvent, None]:
        """Says the prompt again, token by token."""
        for index in range(request.n):
            said = request.token_ids[: request.max_tokens]
            for token_id in said:
                yield self.tokens(index, [token_id])
            yield self.finished(index, runtime_pb2.REASON_STOP_TOKEN, completion_tokens=len(said))

    @contextlib.asynccontextmanager
    async def live(self) -> AsyncIterator["FakeRuntime"]:
        """Both sockets, for the length of the block."""
        socket_path.prepare_directory(self._config.sockets.kv)
        listener = channel.listen(self._config.sockets.kv)
        listener.setblocking(False)
        # Not `sock_accept`: a task that is cancelled just after it has accepted loses the connection, unclosed.
        loop = asyncio.get_running_loop()
        loop.add_reader(listener, self._accept, listener)
        register = service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server
        try:
            async with rpc.serve(self._config.sockets.triton, lambda server: register(self, server), grace=0):
                yield self
        finally:
            loop.remove_reader(listener)
            listener.close()
            self.die()
            self._config.sockets.kv.unlink(missing_ok=True)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError, PeerDiedError):  # an app that a test has killed
            connection, _ = listener.accept()
            client = channel.Channel(connection)
            self._clients.append(client)
            client.send(self.hello.SerializeToString(), timeout=1)

    def die(self) -> None:
        """What every client sees of a killed backend: kv.sock ends, Triton stays silent."""
        for client in self._clients:
            client.close()
        self._clients.clear()


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


class Job:
    """The jobhelper's end, and the app's process."""

    def __init__(self, process: asyncio.subprocess.Process | None, connection: socket.socket) -> None:
        self.process = process
        self.connection = connection
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter
        self.sizes: list[int] = []

    async def connect(self) -> None:
        self.reader, self.writer = await asyncio.open_connection(sock=self.connection)

    async def send(self, message: app_pb2.AppIn) -> None:
        await frames.write_message(self.writer, message, timeout=DEADLINE_S)

    async def send_raw(self, data: bytes) -> None:
        self.writer.write(data)
        async with asyncio.timeout(DEADLINE_S):
            await self.writer.drain()

    async def receive(self) -> app_pb2.AppOut | None:
        payload = await frames.read_bytes(self.reader, limit=1 << 21, timeout=DEADLINE_S)
        if payload is None:
            return None
        assert len(payload) in node_config.DEFAULT_BUCKETS
        self.sizes.append(len(payload))
        return app_pb2.AppOut.FromString(payload)

    async def ready(self) -> None:
        message = await self.receive()
        assert message is not None
        assert message.WhichOneof("kind") == "ready", message

    async def open(self, **fields: Any) -> None:
        await self.send(
            app_pb2.AppIn(open=app_pb2.Open(**({"request_id": "r1", "dek": bytes(32), "model": "sample"} | fields)))
        )

    async def ask(self, request: request_pb2.InferenceRequest | bytes, piece: int = 100_000, **fields: Any) -> None:
        """Opens and sends the whole body."""
        await self.open(**fields)
        body = request if isinstance(request, bytes) else request.SerializeToString()
        for start in range(0, max(1, len(body)), piece):
            part = app_pb2.Body(data=body[start : start + piece], last=start + piece >= len(body))
            await self.send(app_pb2.AppIn(body=part))

    async def outcome(self) -> tuple[dict[int, str], app_pb2.Done]:
        """Texts by choice, and the one `done` after which the stream ends."""
        texts: dict[int, str] = {}
        while True:
            message = await self.receive()
            assert message is not None, "the stream ended without done"
            if message.WhichOneof("kind") == "done":
                break
            texts[message.delta.index] = texts.get(message.delta.index, "") + message.delta.text
        assert await self.receive() is None
        self.writer.close()
        return texts, message.done

    async def exit_code(self) -> int:
        async with asyncio.timeout(DEADLINE_S):
            return await self.process.wait()

    async def log(self) -> str:
        assert self.process.stderr is not None
        return (await self.process.stderr.read()).decode()


class Node:
    """A run directory, a configuration, a fake runtime, and apps started on demand."""

    def __init__(self, directory: Path, bundle: Bundle) -> None:
        self.directory = directory
        self.bundle = bundle
        self.jobs: list[Job] = []
        self.configure()

    def configure(self, **app: Any) -> None:
        """Writes node.toml; the options are those of its table `app`."""
        self.config = node_config.NodeConfig(
            run_dir=str(self.directory),
            model=node_config.ModelConfig(bundle=str(self.bundle.directory)),
            app=msgspec.structs.replace(node_config.AppConfig(tick_s=0.005), **app),
        )
        (self.directory / "node.toml").write_bytes(node_config.dump(self.config))
        self.runtime = FakeRuntime(self.config, self.bundle)

    async def start(self) -> Job:
        """A fresh app process on a fresh connection."""
        ours, theirs = socket.socketpair()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-c", _LAUNCH, str(theirs.fileno()),
            _APP, "--config", self.directory / "node.toml",
            pass_fds=[theirs.fileno()], stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        theirs.close()
        job = Job(process, ours)
        self.jobs.append(job)
        await job.connect()
        return job

    async def asked(self, request: request_pb2.InferenceRequest | bytes, **fields: Any) -> Job:
        """An app that was ready and has got this request."""
        job = await self.start()
        await job.ready()
        await job.ask(request, **fields)
        return job

    @contextlib.asynccontextmanager
    async def session_here(self) -> AsyncIterator[Job]:
        """A session on a thread of this process, for a test that looks at its insides: it has ended after the block."""
        ours, theirs = socket.socketpair()

        async def session() -> int:
            reader, writer = await asyncio.open_connection(sock=theirs)
            try:
                return await Session(self.config, reader, writer, asyncio.Event()).run()
            finally:
                await closed(writer)

        running = asyncio.create_task(asyncio.to_thread(asyncio.run, session()))
        job = Job(None, ours)
        await job.connect()
        try:
            yield job
        finally:
            await closed(job.writer)
            async with asyncio.timeout(DEADLINE_S):
                code = await running
        assert code == 0

    async def close(self) -> None:
        for job in self.jobs:
            job.writer.transport.abort()
            if job.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(job.process.pid, signal.SIGKILL)
            await job.process.wait()
            print(await job.log())  # shown where a test failed
            job.process._transport.close()
            with contextlib.suppress(ConnectionError):
                await job.writer.wait_closed()


@pytest_asyncio.fixture
async def node(bundle: Bundle):
    with tempfile.TemporaryDirectory(prefix="tie-app-", dir="/tmp") as directory:
        node = Node(Path(directory), bundle)
        try:
            yield node
        finally:
            await node.close()
