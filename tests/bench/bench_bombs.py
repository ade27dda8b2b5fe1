"""What hostile schemas cost: how long until each is refused or compiled, and the gaps of who is served meanwhile.

python tests/bench/bench_bombs.py [--streams 8] [--threads 1]

The schemas are those of tests/unit/app/test_app_compiling.py, straight to the engine: the app, which tries each one out
in its own process first, is left aside.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

from bench_mixed import Bench, Sink, p99, wait_for
from engine_target import running

from tie.app.schemas import enforceable
from tie.cli.assets import demo_bundle
from tie.cli.settings import cache_dir
from tie.proto import runtime_pb2
from tie.runtime.request import check

sys.path.append(str(Path(__file__).parents[1] / "unit" / "app"))
from test_app_compiling import BOMBS

WAIT_S = 60.0
GOAL_S = 0.2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, help="model bundle [default: the demo model's]")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    bundle = options.bundle or demo_bundle(cache_dir() / "demo-bundle").directory
    with running(bundle, [f"runtime.threads={options.threads}", "runtime.speculation=off"]) as (service, _):
        bench = Bench(service.engine, time.perf_counter)
        took: dict[str, tuple[float, str]] = {}

        def bombs(_: list[Sink]) -> None:
            for name, schema in BOMBS.items():
                took[name] = explode(bench, schema)

        bench.while_written(options.streams, lambda sinks: wait_for(sinks, 8))  # warm
        alone = {name: explode(bench, schema) for name, schema in BOMBS.items()}
        calm = bench.while_written(options.streams, lambda sinks: wait_for(sinks, 60))
        gaps = bench.while_written(options.streams, bombs)
    for name in BOMBS:
        (idle, how), (busy, _) = alone[name], took[name]
        print(f"{name:24} {how:10} {idle * 1e3:7.0f} ms alone, {busy * 1e3:7.0f} ms beside {options.streams} streams")
    late = [name for name, (seconds, _) in alone.items() if seconds > GOAL_S]
    print(f"{len(BOMBS)} schemas, {len(late)} took longer than {GOAL_S} s alone: {', '.join(late) or 'none'}")
    for name, seen in (("undisturbed", calm), ("beside them", gaps)):
        numbers = [value * 1e3 for value in (statistics.median(seen), p99(seen), max(seen))]
        print("gaps {}: p50 {:.1f} ms, p99 {:.1f} ms, max {:.1f} ms".format(name, *numbers))


def explode(bench: Bench, schema: object) -> tuple[float, str]:
    """Seconds until a schema was refused or its first token came, and which."""
    message = runtime_pb2.GenerateRequest(
        token_ids=[1, 2, 3],
        max_tokens=1,
        grammar=json.dumps({"grammars": [{"json_schema": enforceable(schema)}]}),
        sampling=runtime_pb2.Sampling(),
    )
    sink = Sink(time.perf_counter)
    began = time.perf_counter()
    bench.engine.submit(check(message, bench.engine.bounds), sink)
    assert sink.over.wait(WAIT_S)
    return time.perf_counter() - began, "refused" if sink.failed else "compiled"


if __name__ == "__main__":
    main()
