"""A real owner and a real AFM Runtime (supervisord, Triton, engine, probe) on a small random model."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from status_probe.engine_client import ask
from tie.assets.sample import make_sample_bundle
from tie.daemon import config as node_config
from tie.daemon.hardening import die_with_parent
from tie.proto import engine_pb2
from tie.runtime.environment import shm_family
from waiting import wait_for

T = TypeVar("T")

START_S = 90.0  # importing torch on a busy machine
STOP_S = 30.0
ROLES = {
    "stub": "triton_python_backend_stub",
    "triton": "bin/tritonserver",
    "serve": "tie.runtime.container serve",
    "probe": "status_probe.main",
    "guard": "tie.runtime.container guard",
    "watch": "tie.runtime.container watch",
}


class Runtime:
    """One container, from tie-afm-runtime to the last of its processes."""

    def __init__(self, node: "RuntimeNode", **environment: str) -> None:
        self.node = node
        self.log = node.directory / f"runtime-{len(node.runtimes)}.log"
        self.began = time.monotonic()
        self.process = node.start("tie.runtime.launch", self.log, **environment)
        self.members: set[psutil.Process] = set()
        self.roles: dict[str, psutil.Process] = {}

    def events(self) -> list[dict]:
        lines = self.log.read_text(errors="replace").splitlines()
        return [json.loads(line) for line in lines if line.startswith('{"t":')]

    def has(self, event: str, **fields) -> bool:
        return any(entry["event"] == event and fields.items() <= entry.items() for entry in self.events())

    def wait_ready(self) -> "Runtime":
        def ready() -> bool:
            assert self.process.poll() is None, self.log.read_text(errors="replace")
            return self.has("probe.state", to_state="STATE_READY")

        wait_for(ready, "the runtime to be ready", START_S)
        self.ready_s = time.monotonic() - self.began
        self.identify()
        return self

    def identify(self) -> None:
        """Learns which process is which, once all have started.

        The engine may be ready while a program beside it is still between fork and exec.
        """
        self.roles = {}
        wait_for(self._found, "all programs of the container", START_S)

    def _found(self) -> bool:
        commands = self.of_each(lambda member: " ".join(member.cmdline()[:5]))
        found = {
            role: [entry for entry, command in commands.items() if pattern in command]
            for role, pattern in ROLES.items()
        }
        if any(len(entries) != 1 for entries in found.values()):
            return False
        self.members, self.roles = set(commands), {role: entries[0] for role, entries in found.items()}
        return True

    def of_each(self, what: Callable[[psutil.Process], T]) -> dict[psutil.Process, T]:
        """`what` of every process that is in the container now.

        Forks that try grammars out come and go: one that goes meanwhile is left out, one with a role must be there.
        """
        found = {}
        for member in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                found[member] = what(member)
        assert found.keys() >= set(self.roles.values())
        return found

    def member(self, role: str) -> psutil.Process:
        """One of the container's processes, by its key in `ROLES`."""
        return self.roles[role]

    def wait_gone(self) -> None:
        """Waits until no process of the container is left."""
        self.process.wait(STOP_S)
        _, alive = psutil.wait_procs(self.members, timeout=STOP_S)
        assert not alive

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.wait_gone()


class RuntimeNode:
    """A run directory with an owner; starts runtimes one after another."""

    def __init__(self, directory: Path, context_tokens: int, more: str = "") -> None:
        self.directory = directory
        self.runtimes: list[Runtime] = []
        prompts = {"default": "You are a test."}
        make_sample_bundle(directory / "bundle", context_tokens=context_tokens, system_prompts=prompts)
        self.file = directory / "node.toml"
        self.file.write_text(
            f'run_dir = "{directory}/run"\n[model]\nbundle = "{directory}/bundle"\n'
            '[runtime]\ndtype = "f32"\nthreads = 1\n'
            f"kv_tokens = {8 * context_tokens}\n"
            f"max_running = 8\nmax_waiting = 8\n{more}\n"
            "[probe]\ncanary_interval_s = 0.5\ncanary_deadline_s = 0.7\n"
        )
        self.config = node_config.load(self.file)
        self.sockets = self.config.sockets
        self.owner = self.start("model_owner.main", directory / "owner.log")

    def start(
        self, module: str, log: Path, config: Path | None = None, **environment: str
    ) -> "subprocess.Popen[bytes]":
        with log.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", module, "--config", str(config or self.file)],
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **environment},
                preexec_fn=lambda: die_with_parent(signal.SIGKILL),  # noqa: PLW1509
            )

    def begin(self, **environment: str) -> Runtime:
        """Starts a runtime and does not wait for it."""
        self.runtimes.append(Runtime(self, **environment))
        return self.runtimes[-1]

    def launch(self) -> Runtime:
        runtime = self.begin().wait_ready()
        assert self.shm_regions() == [], "Triton's shared memory has a name"
        return runtime

    async def engine(self, **kind) -> engine_pb2.EngineReply:
        return await ask(self.sockets.engine, engine_pb2.EngineRequest(**kind), timeout=10)

    def shm_regions(self) -> list[Path]:
        """Triton's shared memory of this node's runtimes."""
        family = shm_family(self.config.run_dir)
        return [path for path in Path("/dev/shm").iterdir() if path.name.startswith(family)]

    def close(self) -> None:
        for runtime in self.runtimes:
            with contextlib.suppress(psutil.NoSuchProcess):
                runtime.stop()
        self.owner.terminate()
        self.owner.wait(STOP_S)
        shutil.rmtree(self.directory)


@pytest.fixture(scope="module")
def node(request: pytest.FixtureRequest) -> Iterator[RuntimeNode]:
    """A node without a runtime; tests launch theirs."""
    # Short: a socket's path has at most 107 bytes.
    directory = Path(tempfile.mkdtemp(prefix="tie-rt-", dir="/tmp"))
    more = getattr(request, "param", "")  # of [runtime]
    node = RuntimeNode(directory, getattr(request.module, "CONTEXT_TOKENS", 1024), more)
    try:
        yield node
    finally:
        node.close()


@pytest.fixture(scope="module")
def runtime(node) -> Runtime:
    """A runtime that is ready, shared by a module's tests."""
    return node.launch()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Adds what the newest runtime said to the report of a test that failed."""
    report = yield
    node = getattr(item, "funcargs", {}).get("node")
    if report.failed and isinstance(node, RuntimeNode) and node.runtimes:
        report.sections.append(("the runtime's log", node.runtimes[-1].log.read_text(errors="replace")[-6000:]))
    return report
