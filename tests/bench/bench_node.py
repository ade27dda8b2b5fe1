"""What the layers above the engine cost: the same load on the engine alone, through Triton, and through the app.

python tests/bench/bench_node.py [--streams 16] [--max-tokens 192] [--rounds 3] [--set runtime.threads=1] [--json FILE]

Round by round and never two at once: the engine in a process of its own, then a node through Triton, then the same node
through the whole path; so what else the machine does meets all three. "full" is while all streams were busy, "all" the
whole answers over the whole time, first request to last end. Ratios are medians of the rounds' own ratios.

The node keeps as many apps standing by as there are streams; new ones start while the first answers run.
"""

import argparse
import asyncio
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from tie.cli import asking, bench_load, bench_report
from tie.cli.assets import demo_bundle
from tie.cli.bench_load import Load, Run, Target
from tie.cli.bench_prompts import random_prompts
from tie.cli.bench_report import Level
from tie.cli.bench_targets import node
from tie.cli.bench_triton import triton
from tie.cli.local_node import LocalNode
from tie.cli.settings import cache_dir
from tie.proto import control_pb2

START_S = 180.0
ENGINE_S = 900.0
LAYERS = ("engine", "triton", "app")
CANARY = "probe.canary_deadline_s=60"  # one that waits behind the load of a busy machine is no error


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, help="model bundle [default: the demo model's]")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--per-stream", type=int, default=1, help="answers of each stream in a round")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--standby", type=int, help="apps standing by [default: one for each stream]")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--engine-only", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


async def measured(target: Target, arguments: argparse.Namespace, seed: int) -> Level:
    """One round. Rounds differ in their prompts, layers do not."""
    load = Load(arguments.streams * arguments.per_stream, None, arguments.max_tokens, seed=seed)
    run = Run(arguments.streams, time.monotonic())
    await bench_load.run(target, random_prompts(arguments.prompt_tokens, seed), load, run, asyncio.Event())
    level = bench_report.level(run)
    if level.unanswered:
        raise SystemExit(f"requests were not answered: {level.errors}")
    return level


def engine_process(arguments: argparse.Namespace) -> None:
    """Measures a round for each seed that comes in as a line, and answers with a line of JSON."""
    from engine_target import EngineTarget, running, template  # torch: in the process that measures the engine only

    with running(arguments.bundle, arguments.overrides) as (service, config):
        for line in sys.stdin:
            level = asyncio.run(measured(EngineTarget(service.engine, template(config)), arguments, int(line)))
            print(json.dumps(dataclasses.asdict(level)), flush=True)


class EngineAlone:
    """The engine in a process of its own, idle but for its rounds."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--engine-only", *sys.argv[1:], "--bundle", str(arguments.bundle)]
        # A session of its own, as the node's daemons have: the kernel shares the processor out by session (sched(7)).
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    async def measured(self, seed: int) -> dict[str, object]:
        process = psutil.Process(self._process.pid)
        before = used(process)
        async with asyncio.timeout(ENGINE_S):
            level = await asyncio.to_thread(self._round, seed)
        return level | {"cpu_s": {"engine": round(used(process) - before, 2)}}

    def _round(self, seed: int) -> dict[str, object]:
        self._process.stdin.write(f"{seed}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the engine alone has failed: see above")
        return json.loads(line)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(30)


def layers(arguments: argparse.Namespace) -> dict[str, list[dict[str, object]]]:
    standby = arguments.standby if arguments.standby is not None else arguments.streams
    local = LocalNode(
        bundle=arguments.bundle, overrides=[CANARY, f"cloudboard.standby={standby}", *arguments.overrides]
    )
    alone = EngineAlone(arguments)
    try:
        asyncio.run(local.wait_for(control_pb2.STATE_AVAILABLE, START_S))
        figures = asyncio.run(rounds(alone, local, arguments, standby))
    finally:
        alone.close()
        left = local.stop()
    if left:
        raise SystemExit(f"left running, and ended now: {', '.join(left)}")
    return figures


async def rounds(alone: EngineAlone, local: LocalNode, arguments: argparse.Namespace, standby: int) -> dict[str, list]:
    figures: dict[str, list[dict[str, object]]] = {layer: [] for layer in LAYERS}
    whom = asking.target(local.run_dir, None, None, None)
    async with triton(local.run_dir) as below, node(whom) as above:
        await settled(local, standby)
        for seed in range(arguments.rounds + 1):
            engine = await alone.measured(seed)
            before = cpu(local)
            through = dataclasses.asdict(await measured(below, arguments, seed))
            through["cpu_s"] = spent(before, cpu(local))
            before = cpu(local)
            level = await measured(above, arguments, seed)
            await settled(local, standby)  # the apps that stand by for the next round are this round's cost
            app = dataclasses.asdict(level) | {"cpu_s": spent(before, cpu(local))}
            if seed:  # the first round warms up
                for layer, figure in zip(LAYERS, (engine, through, app), strict=True):
                    figures[layer].append(figure)
    return figures


async def settled(local: LocalNode, standby: int) -> None:
    """Waits until as many apps stand by as should, and no process of theirs starts any more."""
    await local.wait_for(control_pb2.STATE_AVAILABLE, START_S)
    async with asyncio.timeout(START_S):
        while True:
            found = [*local.find("tie-cloud-app"), *local.find("cb_jobhelper")]
            before = sum(map(used, found))
            await asyncio.sleep(1.0)
            if len(found) >= 2 * standby and sum(map(used, found)) - before < 0.05:
                return


def cpu(local: LocalNode) -> dict[str, float]:
    """CPU seconds so far, by part. Those of the processes of requests are `tie up`'s, once they have ended."""
    top = psutil.Process(local.process.pid).cpu_times()
    alive = {name: sum(map(used, local.find(name))) for name in ("tie-cloud-app", "cb_jobhelper")}
    names = ("tie-cloudboard", "tie-kps", "triton_python_backend_stub", "tritonserver")
    parts = {name: sum(map(used, local.find(name))) for name in names}
    return parts | {
        "apps and job helpers": top.children_user + top.children_system + sum(alive.values()),
        "this client": used(psutil.Process()),
    }


def used(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def spent(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: round(after[name] - value, 2) for name, value in before.items()}


def main() -> None:
    arguments = options()
    arguments.bundle = arguments.bundle or demo_bundle(cache_dir() / "demo-bundle").directory
    if arguments.engine_only:
        engine_process(arguments)
        return
    figures = layers(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    report(figures, arguments)


def report(figures: dict[str, list[dict]], arguments: argparse.Namespace) -> None:
    print(f"{arguments.streams} streams, {arguments.per_stream} answers each of {arguments.max_tokens} tokens")
    print("tokens/s: median (least to most of the rounds), share of the engine alone; first text: median")
    for layer in LAYERS:
        levels, engine = figures[layer], figures["engine"]
        shown = [
            f"{name} {spread(levels, key)} {ratio(levels, engine, key)}"
            for name, key in (("full", "full_tokens_per_s"), ("all", "tokens_per_s"))
        ]
        first = statistics.median(level["first_token_s"]["p50"] for level in levels)
        print(f"{layer:8} {'   '.join(shown)}   first text {first:.2f} s")
    print("processor time, ms per token (it says more than the clock where a machine is shared):")
    for layer in LAYERS:
        tokens = sum(level["completion_tokens"] for level in figures[layer])
        parts = {
            part: sum(level["cpu_s"][part] for level in figures[layer]) / tokens * 1e3
            for part in figures[layer][0]["cpu_s"]
        }
        shown = ", ".join(f"{part} {taken:.2f}" for part, taken in parts.items() if taken >= 0.005)
        print(f"{layer:8} {sum(parts.values()):6.2f}: {shown}")
    answers = sum(level["ok"] for level in figures["app"])
    starts = sum(level["cpu_s"]["apps and job helpers"] for level in figures["app"])
    print(f"apps and job helpers take {starts / answers * 1e3:.0f} ms an answer, most of it to start")


def spread(levels: Sequence[dict], key: str) -> str:
    """Median, least and most; rounds in which all streams were never busy at once have no "full"."""
    values = [level[key] for level in levels if level[key]]
    return f"{statistics.median(values):6.1f} ({min(values):.0f}-{max(values):.0f})" if values else "not measured"


def ratio(levels: Sequence[dict], engine: Sequence[dict], key: str) -> str:
    """The median of the rounds' own ratios: neighbours in time have the same machine."""
    pairs = zip(levels, engine, strict=True)
    ratios = [level[key] / alone[key] for level, alone in pairs if level[key] and alone[key]]
    return f"{statistics.median(ratios):6.1%}" if ratios else ""


if __name__ == "__main__":
    main()
