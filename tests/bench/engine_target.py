"""The engine in this process, on the weights of a model owner of its own: the same code below Triton and the app.

`with running(config) as service:` and then `EngineTarget(service.engine, template)` wherever `tie.cli.bench_load` takes
a target. Nothing here reads a clock more often than the engine's own step, so it is what the layers above are held to.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tie.assets.bundle import open_bundle
from tie.assets.chat import ChatTemplate
from tie.cli import settings
from tie.cli.bench_load import Call, Heard, Usage
from tie.cli.bench_triton import generate_request, take
from tie.daemon import config as node_config
from tie.daemon.config import NodeConfig
from tie.proto import runtime_pb2
from tie.runtime.engine import Engine
from tie.runtime.launch import LIBRARY_CACHES
from tie.runtime.request import check
from tie.runtime.service import RuntimeService

_STOP_S = 10.0


class Sink:
    """Notes each event with its time; the event loop hears of the last one only."""

    def __init__(self) -> None:
        self.events: list[tuple[float, runtime_pb2.GenerateEvent]] = []
        self.over = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def emit(self, event: runtime_pb2.GenerateEvent, *, last: bool) -> None:
        self.events.append((time.monotonic(), event))
        if last:
            self._loop.call_soon_threadsafe(self.over.set)


class EngineTarget:
    """See `tie.cli.bench_load.Target`. Without a template it takes ready-made requests only."""

    def __init__(self, engine: Engine, template: ChatTemplate | None = None) -> None:
        self._engine = engine
        self._template = template

    async def ask(self, call: Call, heard: Heard) -> Usage:
        assert self._template is not None
        return await self.generate(generate_request(call, self._template), heard)

    async def generate(self, request: runtime_pb2.GenerateRequest, heard: Heard) -> Usage:
        """The same for a request that is made already."""
        sink = Sink()
        job = self._engine.submit(check(request, self._engine.bounds), sink)
        try:
            await sink.over.wait()
        finally:
            self._engine.cancel(job)  # nothing, once it has ended
        tokens = sum(take(event, at, heard) for at, event in sink.events)
        return Usage(len(request.token_ids), tokens)


@contextmanager
def running(bundle: Path, overrides: Sequence[str] = ()) -> Iterator[tuple[RuntimeService, NodeConfig]]:
    """The runtime without Triton, and its model owner as a process of its own.

    Args:
        bundle: the model.
        overrides: of the node's configuration, as for `tie up --set`.
    """
    os.environ.update(LIBRARY_CACHES)  # read when the first product is computed
    with tempfile.TemporaryDirectory(prefix="tie-", dir="/tmp") as folder:
        config = settings.effective(None, overrides, run_dir=folder, model__bundle=str(bundle.absolute()))
        toml = settings.node_toml(Path(folder))
        toml.write_bytes(node_config.dump(config))
        owner = subprocess.Popen(
            [sys.executable, "-m", "model_owner.main", "--config", str(toml)],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            service = RuntimeService(config, "bench", on_failure=lambda: None)
            try:
                yield service, config
            finally:
                service.close(drain_s=0)
        finally:
            owner.terminate()
            owner.wait(_STOP_S)


def template(config: NodeConfig) -> ChatTemplate:
    """The chat template of the bundle that the configuration names."""
    return ChatTemplate.load(open_bundle(Path(config.model.bundle)))
