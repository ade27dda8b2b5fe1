"""Throughput beside a neighbour that takes half of one core, against the machine alone, by the choice of threads.

python tests/bench/bench_neighbour.py [--bundle DIR] [--streams 1 8] [--rounds 5]

The neighbour works for 5 ms and sleeps for 5 ms, as a daemon that serves requests does. Rounds with and without it take
turns. `threads=0` is the default: the executor chooses.
"""

import argparse
import asyncio
import multiprocessing
import multiprocessing.synchronize
import random
import statistics
import time
from pathlib import Path

from engine_target import EngineTarget, running

from tie.cli.assets import demo_bundle
from tie.cli.settings import cache_dir
from tie.proto import runtime_pb2

_HALF_S = 0.005


def neighbour(working: multiprocessing.synchronize.Event) -> None:
    while True:
        working.wait()
        until = time.perf_counter() + _HALF_S
        while time.perf_counter() < until:
            pass
        time.sleep(_HALF_S)


def measured(
    bundle: Path, threads: int, arguments: argparse.Namespace, working: multiprocessing.synchronize.Event
) -> dict[int, tuple[list[float], list[float]]]:
    """Tokens a second without and with the neighbour, by number of streams."""
    source = random.Random(0)  # noqa: S311 (no secret)
    found = {}
    with running(bundle, [f"runtime.threads={threads}", "runtime.speculation=off"]) as (service, _):
        target = EngineTarget(service.engine)

        async def generate(streams: int) -> None:
            requests = [
                runtime_pb2.GenerateRequest(
                    token_ids=source.choices(range(1000, 40000), k=32), max_tokens=arguments.tokens, ignore_eos=True
                )
                for _ in range(streams)
            ]
            await asyncio.gather(*(target.generate(request, lambda _at, _count: None) for request in requests))

        def speed(streams: int) -> float:
            begun = time.perf_counter()
            asyncio.run(generate(streams))
            return streams * arguments.tokens / (time.perf_counter() - begun)

        for streams in arguments.streams:
            alone, beside = [], []
            speed(streams)
            for _ in range(arguments.rounds):
                alone.append(speed(streams))
                working.set()
                beside.append(speed(streams))
                working.clear()
            found[streams] = (alone, beside)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--threads", type=int, nargs="+", default=[0, 2, 1])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    bundle = arguments.bundle or demo_bundle(cache_dir() / "demo-bundle").directory
    working = multiprocessing.Event()
    process = multiprocessing.Process(target=neighbour, args=(working,), daemon=True)
    process.start()
    print(f"{'threads':>8} {'streams':>8} {'alone':>24} {'beside':>24} {'kept':>6}")
    for threads in arguments.threads:
        for streams, (alone, beside) in measured(bundle, threads, arguments, working).items():
            middles = statistics.median(alone), statistics.median(beside)
            texts = [
                f"{middle:.0f} ({min(values):.0f} to {max(values):.0f})"
                for middle, values in zip(middles, (alone, beside), strict=True)
            ]
            print(f"{threads:8} {streams:8} {texts[0]:>24} {texts[1]:>24} {middles[1] / middles[0]:6.2f}", flush=True)


if __name__ == "__main__":
    main()
