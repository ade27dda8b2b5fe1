"""Recycles in a row on a real node under load: nothing may be lost, taken while busy, or left behind.

    python tests/chaos/recycles.py                     # 50 recycles under 8 users
    python tests/chaos/recycles.py --recycles 5 --users 2

After each recycle the node's processes, their memory and descriptors, the files of its run directory and what lies in
/dev/shm are counted. Exit code 1 when a request was lost, cut or taken while the node was not available, or when
something grew.
"""

import argparse
import asyncio
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import psutil
from users import Users

from tie.cli import asking, control
from tie.cli.assets import demo_bundle
from tie.cli.local_node import LocalNode
from tie.cli.settings import cache_dir
from tie.device.async_client import AsyncClient
from tie.proto import control_pb2

START_S = 240.0
RECYCLE_S = 240.0
SLACK_S = 0.3  # from a state of the controller to its watcher
GROWTH_BYTES = 32 * 1024 * 1024  # of all daemons that live on, from the fifth recycle to the last
PASSING = ("tie-cloud-app", "cb_jobhelper", "tie_app", "cb_job")  # come and go with requests


@dataclass(frozen=True)
class Moment:
    """What the node uses after a recycle."""

    processes: int
    memory: int
    descriptors: int
    files: int
    shm: int


def look(node: LocalNode) -> Moment:
    """Counts, without the processes of requests and without the runtime, which is fresh each time."""
    lasting = []
    for process in node.processes():
        try:
            command = " ".join(process.cmdline())
            if command and not any(word in command for word in PASSING):
                lasting.append(process)
        except psutil.Error:
            continue
    memory = descriptors = 0
    for process in lasting:
        try:
            descriptors += process.num_fds()
            if any(name in " ".join(process.cmdline()) for name in ("tie-", "gpuhealthd", "tie.cli")):
                memory += process.memory_info().rss if "afm-runtime" not in " ".join(process.cmdline()) else 0
        except psutil.Error:
            continue
    shm = sum(path.name.startswith("tie-") for path in Path("/dev/shm").iterdir())
    return Moment(len(lasting), memory, descriptors, sum(1 for _ in node.run_dir.rglob("*")), shm)


async def recycle(node: LocalNode) -> tuple[float, float, float]:
    """One recycle; when draining and when available again was seen, and how long it took."""
    draining, took = 0.0, 0.0
    async with control.connected(node.run_dir) as connection:
        request = control_pb2.RecycleRequest(reason="operator")
        async for progress in connection.node.Recycle(request, timeout=RECYCLE_S):
            if progress.state == control_pb2.STATE_DRAINING and not draining:
                draining = time.monotonic()
            if progress.finished:
                if progress.error:
                    raise SystemExit(f"the recycle failed: {progress.error}")
                took = progress.elapsed_s
    return draining, time.monotonic(), took


async def main_run(node: LocalNode, arguments: argparse.Namespace) -> int:
    """The whole."""
    await node.wait_for(control_pb2.STATE_AVAILABLE, START_S)
    whom = asking.target(node.run_dir, None, None, None)
    times, windows, moments = [], [], []
    async with AsyncClient(whom.url, whom.statement_key) as client:
        users = Users(client, whom.model, arguments.users, arguments.seed)
        asking_task = asyncio.create_task(users.run())
        ends = time.monotonic() + 60 * arguments.minutes
        for number in range(arguments.recycles):
            if time.monotonic() > ends:
                break
            await asyncio.sleep(arguments.between)
            draining, back, took = await recycle(node)
            await node.wait_for(control_pb2.STATE_AVAILABLE, START_S)
            windows.append((draining, back))
            times.append(took)
            moments.append(look(node))
            print(f"{number + 1:3d}: {took:5.1f} s  {moments[-1]}  {users.counts()}", flush=True)
        users.stopping.set()
        await asking_task
    return judge(users, times, windows, moments)


def judge(users: Users, times: list[float], windows: list[tuple[float, float]], moments: list[Moment]) -> int:
    """Prints the figures; the exit code."""
    counts = users.counts()
    bad = {outcome: count for outcome, count in counts.items() if outcome not in {"ok", "busy"}}
    taken = [
        request
        for request in users.requests
        for begin, end in windows
        if request.accepted and request.sent > begin + SLACK_S and request.accepted < end - SLACK_S
    ]
    first, last = moments[min(4, len(moments) - 1)], moments[-1]
    print(f"{len(times)} recycles: {min(times):.1f} to {max(times):.1f} s, median {statistics.median(times):.1f} s")
    print(f"requests: {counts}; lost or cut: {sum(bad.values())}; taken while not available: {len(taken)}")
    print(f"after recycle {min(5, len(moments))}: {first}\nafter the last: {last}")
    grown = [
        name
        for name, slack in (("processes", 3), ("descriptors", 40), ("files", 3), ("shm", 0), ("memory", GROWTH_BYTES))
        if getattr(last, name) > getattr(first, name) + slack
    ]
    print(f"grown: {', '.join(grown) or 'nothing'}")
    return 1 if bad or taken or grown else 0


def main() -> int:
    """The script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recycles", type=int, default=50)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--between", type=float, default=1.0, help="seconds of service between two recycles")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60.0, help="at most; then the figures of what was done")
    parser.add_argument("--bundle", type=Path)
    arguments = parser.parse_args()
    bundle = arguments.bundle or demo_bundle(cache_dir() / "demo-bundle").directory
    node = LocalNode(bundle=bundle, overrides=("runtime.dtype=f32", "controller.recycle_interval_s=100000"))
    try:
        return asyncio.run(main_run(node, arguments))
    finally:
        left = node.stop()
        print(f"left running: {', '.join(left) or 'nothing'}")


if __name__ == "__main__":
    sys.exit(main())
