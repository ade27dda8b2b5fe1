"""Chaos on a real node: something happens to one of its daemons, and the node has to come back by itself.

    python tests/chaos/rounds.py                            # 200 rounds
    python tests/chaos/rounds.py --rounds 1 --seed 4711     # that round again

Each round draws from its own seed: which daemon, and whether it is killed (SIGKILL), stopped for 5 to 15 seconds
(SIGSTOP), loses its socket's file, or finds the run directory's disk full for 5 to 15 seconds (as root only: the run
directory then is a memory file system of its own). Users ask all the while. A round is good when the node is available
within the bound afterwards and answers a question. One JSON line for each; exit code 1 when a round was not good.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import psutil
from users import Users

from tie.cli import asking
from tie.cli.assets import demo_bundle
from tie.cli.local_node import LocalNode
from tie.cli.settings import cache_dir
from tie.daemon.errors import PeerError, TieError
from tie.device.async_client import AsyncClient
from tie.proto import control_pb2

START_S = 240.0
BACK_S = 150.0  # what the node promises here: noticing, one recycle with its drain, a start on a busy machine
DISK_BYTES = 64 * 1024 * 1024
PROGRAMS = {
    "gpuhealthd": "bin/gpuhealthd ",
    "controller": "bin/tie-controllerd ",
    "kps": "bin/tie-kps ",
    "store": "bin/tie-cache-stored ",
    "owner": "bin/tie-model-owner ",
    "cloudboard": "bin/tie-cloudboard ",
    "supervisord": "supervisor.supervisord ",
    "guard": "tie.runtime.container guard",
    "watch": "tie.runtime.container watch",
    "serve": "tie.runtime.container serve",
    "triton": "bin/tritonserver ",
    "engine": "triton_python_backend_stub ",
    "probe": "status_probe.main ",
}
SOCKETS = (
    "gpuhealth", "control", "kps", "store", "store_control", "owner", "owner_control", "node", "probe", "kv", "engine",
    "triton", "app", "jobhelper",
)  # fmt: skip
OVERRIDES = ("runtime.dtype=f32", "controller.recycle_interval_s=100000")


class Round:
    """One round, drawn from its seed."""

    def __init__(self, seed: int, *, disk: bool) -> None:
        draw = random.Random(seed)  # noqa: S311 (replayable)
        self.seed = seed
        self.kind = draw.choices(("kill", "stop", "socket", "disk"), (5, 3, 2, 1 if disk else 0))[0]
        self.victim = draw.choice(SOCKETS if self.kind == "socket" else tuple(PROGRAMS))
        self.seconds = round(draw.uniform(5.0, 15.0), 1)
        self.moment = draw.uniform(0.0, 2.0)

    async def happen(self, node: LocalNode) -> None:
        """Does it."""
        await asyncio.sleep(self.moment)
        match self.kind:
            case "kill":
                self._send(node, signal.SIGKILL)
            case "stop":
                self._send(node, signal.SIGSTOP)
                await asyncio.sleep(self.seconds)
                self._send(node, signal.SIGCONT)
            case "socket":
                path: Path = getattr(node.config.sockets, self.victim)
                path.unlink(missing_ok=True)
                await asyncio.sleep(2.5)  # what looks once a second has looked
            case "disk":
                self.victim = ""
                await self._fill(node)

    def _send(self, node: LocalNode, number: int) -> None:
        for process in node.processes():
            with contextlib.suppress(psutil.Error):
                if PROGRAMS[self.victim] in " ".join(process.cmdline()) + " ":
                    process.send_signal(number)

    async def _fill(self, node: LocalNode) -> None:
        path = node.run_dir / "ballast"
        try:
            with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(b"\0" * 65536)
            await asyncio.sleep(self.seconds)
        finally:
            path.unlink(missing_ok=True)


async def back(node: LocalNode, client: AsyncClient, model: str) -> tuple[float, str]:
    """Seconds until the node is available and answers; what was wrong when it does not, within the bound."""
    began, trouble = time.monotonic(), "?"
    while time.monotonic() - began < BACK_S:
        try:
            status = await node.status()
            trouble = ",".join(status.reasons) or control_pb2.State.Name(status.state)
            if status.state == control_pb2.STATE_AVAILABLE:
                answer = await client.chat([{"role": "user", "content": "Hello"}], model=model, max_tokens=2)
                await answer.result()
                return time.monotonic() - began, ""
        except (PeerError, TieError) as error:
            trouble = f"{type(error).__name__} {getattr(error, 'status', '')}"
        await asyncio.sleep(0.2)
    return time.monotonic() - began, trouble


async def main_run(node: LocalNode, arguments: argparse.Namespace, *, disk: bool) -> int:
    """All rounds."""
    await node.wait_for(control_pb2.STATE_AVAILABLE, START_S)
    whom = asking.target(node.run_dir, None, None, None)
    results: list[dict[str, Any]] = []
    ends = time.monotonic() + 60 * arguments.minutes
    async with AsyncClient(whom.url, whom.statement_key) as client:
        users = Users(client, whom.model, arguments.users, arguments.seed)
        asking_task = asyncio.create_task(users.run())
        for number in range(arguments.rounds):
            if time.monotonic() > ends:
                break
            round_ = Round(arguments.seed + number, disk=disk)
            await round_.happen(node)
            seconds, trouble = await back(node, client, whom.model)
            results.append(
                {"seed": round_.seed, "kind": round_.kind, "victim": round_.victim, "for_s": round_.seconds}
                | {"back_s": round(seconds, 1), "trouble": trouble}
            )
            print(json.dumps(results[-1]), flush=True)
            if trouble:
                print("\n".join(node.log_lines()[-60:]), flush=True)
                break
        users.stopping.set()
        await asking_task
    bad = [result for result in results if result["trouble"]]
    for kind in ("kill", "stop", "socket", "disk"):
        times = [result["back_s"] for result in results if result["kind"] == kind]
        if times:
            print(
                f"{kind}: {len(times)} rounds, back after {statistics.median(times):.1f} s (median), {max(times):.1f} s"
            )
    print(f"{len(results)} rounds from seed {arguments.seed}, {len(bad)} not good; requests: {users.counts()}")
    return 1 if bad or not results else 0


@contextlib.contextmanager
def disk_of_its_own(node_dir: Path) -> Any:
    """A small memory file system at the run directory; False where that is not ours to do."""
    node_dir.mkdir(parents=True, exist_ok=True)
    options = ["-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0750", "tmpfs", str(node_dir)]
    mounted = (
        os.geteuid() == 0 and subprocess.run(["mount", *options], check=False, capture_output=True).returncode == 0
    )
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(node_dir)], check=False)
            shutil.rmtree(node_dir.parent, ignore_errors=True)


def main() -> int:
    """The script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--users", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=180.0, help="at most; then the figures of what was done")
    parser.add_argument("--bundle", type=Path)
    arguments = parser.parse_args()
    bundle = arguments.bundle or demo_bundle(cache_dir() / "demo-bundle").directory
    with contextlib.ExitStack() as stack:
        disks: list[bool] = []
        node = LocalNode(
            bundle=bundle,
            overrides=OVERRIDES,
            prepare=lambda run_dir: disks.append(stack.enter_context(disk_of_its_own(run_dir))),
        )
        try:
            return asyncio.run(main_run(node, arguments, disk=disks[0]))
        finally:
            left = node.stop()
            print(f"left running: {', '.join(left) or 'nothing'}")


if __name__ == "__main__":
    sys.exit(main())
