"""gpuhealthd as a process of its own, with a fake driver library where one is wanted."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tie.daemon import config as node_config
from tie.daemon import rpc
from tie.daemon.config import ControllerConfig, GpuHealthConfig, NodeConfig
from tie.proto import gpuhealth_pb2, gpuhealth_pb2_grpc

DEADLINE_S = 30.0


def compiled(directory: Path, *options: str) -> Path:
    """A directory with `libnvidia-ml.so.1`, compiled from C."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    source = Path(__file__).parents[2] / "fixtures" / "fake_nvml.c"
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", *options]
    subprocess.run([*command, "-o", directory / "libnvidia-ml.so.1", source], check=True, timeout=120)
    return directory


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake driver."""
    return compiled(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="session")
def old_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that lacks what came with newer drivers."""
    return compiled(tmp_path_factory.mktemp("old"), "-DOLD_DRIVER")


class Daemon:
    """One gpuhealthd and a client to it."""

    def __init__(self, run_dir: Path, library: Path | None, provider: str, **settings: Any) -> None:
        defaults: dict[str, Any] = {"poll_interval_s": 0.1, "stale_after_s": 1.0, "recover_after_polls": 3}
        self.config = NodeConfig(
            run_dir=str(run_dir),
            gpuhealth=GpuHealthConfig(  # type: ignore[arg-type]
                provider=provider, kernel_log=str(run_dir / "kmsg"), **{**defaults, **settings}
            ),
            controller=ControllerConfig(heartbeat_s=0.5),
        )
        run_dir.mkdir(parents=True)
        self.path = run_dir / "node.toml"
        self.path.write_bytes(node_config.dump(self.config))
        self.kernel_log = run_dir / "kmsg"
        self.kernel_log.touch()
        self.driver = run_dir / "driver"
        self.driver.touch()
        self._environment = {**os.environ, "FAKE_NVML": str(self.driver), "TIE_DUMPABLE": "1"}
        if library is not None:
            self._environment["LD_LIBRARY_PATH"] = str(library)
        self.process: asyncio.subprocess.Process | None = None
        self.stub: Any = None
        self._stack = AsyncExitStack()

    def play(self, values: Mapping[str, int] = MappingProxyType({}), /, **more: int) -> None:
        """Sets what the fake driver answers from now on."""
        new = self.driver.with_suffix(".new")
        new.write_text("".join(f"{key}={value}\n" for key, value in {**values, **more}.items()))
        new.replace(self.driver)

    def log(self, number: int, text: str) -> None:
        """Adds a record to what stands for the kernel's log."""
        with self.kernel_log.open("a") as file:
            file.write(f"4,{number},1000,-;{text}\n SUBSYSTEM=pci\n")

    async def start(self) -> None:
        self._stack = AsyncExitStack()
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gpuhealthd.main", "--config", str(self.path), env=self._environment
        )
        self.channel = await self._stack.enter_async_context(rpc.connect(self.config.sockets.gpuhealth))
        await rpc.wait_ready(self.channel, DEADLINE_S)
        self.stub = gpuhealth_pb2_grpc.GpuHealthStub(self.channel)

    async def stop(self, number: int = signal.SIGTERM) -> int:
        await self._stack.aclose()
        if self.process is None:
            return 0
        if self.process.returncode is None:
            self.process.send_signal(number)
        async with asyncio.timeout(DEADLINE_S):
            return await self.process.wait()

    async def verdict(self) -> gpuhealth_pb2.NodeVerdict:
        return await self.stub.GetVerdict(gpuhealth_pb2.GetVerdictRequest(), timeout=2.0)

    async def until(self, condition: Callable[[gpuhealth_pb2.NodeVerdict], bool]) -> gpuhealth_pb2.NodeVerdict:
        """The first verdict of the watch for which `condition` holds."""
        call = self.stub.Watch(gpuhealth_pb2.WatchRequest(), timeout=DEADLINE_S)
        try:
            async for verdict in call:
                if condition(verdict):
                    return verdict
        finally:
            call.cancel()
        raise AssertionError("the watch ended")

    async def until_reason(self, reason: str) -> gpuhealth_pb2.NodeVerdict:
        return await self.until(lambda verdict: reason in verdict.reasons)

    async def until_healthy(self) -> gpuhealth_pb2.NodeVerdict:
        return await self.until(lambda verdict: verdict.verdict == gpuhealth_pb2.VERDICT_HEALTHY)

    async def next_look(self) -> gpuhealth_pb2.NodeVerdict:
        """The verdict after one more complete look than there is now."""
        async with asyncio.timeout(DEADLINE_S):
            before = await self.verdict()
            while (verdict := await self.verdict()).age_s >= before.age_s:
                before = verdict
                await asyncio.sleep(0.01)
        return verdict

    async def run(self) -> int:
        """Starts it and waits for its end; its exit code."""
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gpuhealthd.main", "--config", str(self.path), env=self._environment
        )
        async with asyncio.timeout(DEADLINE_S):
            return await self.process.wait()

    def children(self) -> list[int]:
        """Process numbers of its children."""
        assert self.process is not None
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    def child(self) -> int:
        """Its only child."""
        (child,) = self.children()
        return child


@pytest.fixture
async def make_daemon() -> AsyncIterator[Callable[..., Daemon]]:
    """Builds daemons in a directory with a short path, and ends them."""
    daemons: list[Daemon] = []
    run_dir = Path(tempfile.mkdtemp(prefix="gh-", dir="/tmp"))

    def make(library: Path | None = None, provider: str = "nvml", **settings: Any) -> Daemon:
        daemons.append(Daemon(run_dir / str(len(daemons)), library, provider, **settings))
        return daemons[-1]

    yield make
    for daemon in daemons:
        await daemon.stop()
    shutil.rmtree(run_dir)


@pytest.fixture
async def gpu(make_daemon: Callable[..., Daemon], fake_driver: Path) -> Daemon:
    """A daemon with one healthy fake GPU."""
    daemon = make_daemon(fake_driver)
    await daemon.start()
    await daemon.until_healthy()
    return daemon
