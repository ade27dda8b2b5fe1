"""What a long prompt, and a flood of batch requests, do to those who read along: gaps between tokens, at the engine.

python tests/bench/bench_mixed.py [--streams 8] [--prompt 4096] [--flood 200] [--threads 1] [--processor]

Eight interactive streams write; the p99 of the gaps between their tokens is taken undisturbed, from the arrival of a
long prompt to its first token, and during a flood of batch requests, to its end. Ratios within one run.

A stream gets slower as it gets longer, whoever else is there: so that only the flood's doing counts, the streams are
replaced by new ones whenever they have written as much as the undisturbed ones did. The gaps in between do not count.

With --processor the gaps, and the costs by which the engine paces prompts, are processor time of the step thread (use
one thread): what the engine does, whatever else the machine does.
"""

import argparse
import itertools
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from engine_target import running

from tie.cli.assets import demo_bundle
from tie.cli.settings import cache_dir
from tie.proto import runtime_pb2
from tie.runtime.engine import Engine
from tie.runtime.jobs import Job
from tie.runtime.request import check

WAIT_S = 3600.0
GOAL = {"prompt": 3.0, "flood": 2.0}


class Sink:
    """Times of a request's tokens."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.times: list[float] = []
        self.first = threading.Event()
        self.over = threading.Event()
        self.failed = False

    def emit(self, event: runtime_pb2.GenerateEvent, *, last: bool) -> None:
        if event.HasField("tokens"):
            self.times.append(self._clock())
            self.first.set()
        self.failed = self.failed or event.HasField("failed")
        if last:
            self.over.set()

    def gaps(self, start: float, end: float) -> list[float]:
        inside = [at for at in self.times if start <= at <= end]
        return [after - before for before, after in itertools.pairwise(inside)]


class Bench:
    def __init__(self, engine: Engine, clock: Callable[[], float]) -> None:
        self.engine = engine
        self.clock = clock
        self.dice = np.random.default_rng(0)

    def ask(self, prompt: int, tokens: int, *, batch: bool = False) -> tuple[Job, Sink]:
        ids = self.dice.integers(0, self.engine.bounds.vocab_size, prompt).tolist()
        message = runtime_pb2.GenerateRequest(
            token_ids=ids, max_tokens=tokens, ignore_eos=True, batch_priority=batch, sampling=runtime_pb2.Sampling()
        )
        sink = Sink(self.clock)
        return self.engine.submit(check(message, self.engine.bounds), sink), sink

    def while_written(self, streams: int, disturb: Callable[[list[Sink]], None]) -> list[float]:
        """Gaps of so many streams between the two ends of `disturb`."""
        longest = self.engine.bounds.max_length - 64
        asked = [self.ask(64, longest) for _ in range(streams)]
        sinks = [sink for _, sink in asked]
        wait_for(sinks, 8)
        start = max(sink.times[-1] for sink in sinks)
        disturb(sinks)
        end = min(sink.times[-1] for sink in sinks)
        for job, _ in asked:
            self.engine.cancel(job)
        for sink in sinks:
            assert sink.over.wait(WAIT_S)
        return [gap for sink in sinks for gap in sink.gaps(start, end)]


def wait_for(sinks: list[Sink], more: int) -> None:
    """Until each has written so many tokens more."""
    goals = [len(sink.times) + more for sink in sinks]
    for sink, goal in zip(sinks, goals, strict=True):
        while len(sink.times) < goal:
            assert not sink.over.is_set(), "a stream ended too early"
            time.sleep(0.01)


def p99(gaps: list[float]) -> float:
    return statistics.quantiles(gaps, n=100, method="inclusive")[98]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, help="model bundle [default: the demo model's]")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--flood", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--undisturbed", type=int, default=100, help="tokens of each stream, also beside the flood")
    parser.add_argument("--processor", action="store_true")
    parser.add_argument("--speculation", action="store_true", help="else tokens come one by one")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    bundle = options.bundle or demo_bundle(cache_dir() / "demo-bundle").directory
    overrides = [f"runtime.threads={options.threads}", f"runtime.max_waiting={options.flood + 16}"]
    overrides += [f"runtime.speculation={'auto' if options.speculation else 'off'}", *options.overrides]
    with running(bundle, overrides) as (service, _):
        clock = time.thread_time if options.processor else time.perf_counter
        service.engine._clock = clock
        measure(Bench(service.engine, clock), options)


def measure(bench: Bench, options: argparse.Namespace) -> None:
    flood: list[Sink] = []

    def undisturbed(sinks: list[Sink]) -> None:
        wait_for(sinks, options.undisturbed)

    def long_prompt(_: list[Sink]) -> None:
        _, sink = bench.ask(options.prompt, 1)
        assert sink.first.wait(WAIT_S)

    def batch_flood(sinks: list[Sink]) -> None:
        if not flood:
            flood.extend(bench.ask(64, 32, batch=True)[1] for _ in range(options.flood))
        wait_for(sinks, options.undisturbed)

    bench.while_written(options.streams, lambda sinks: wait_for(sinks, 8))  # warm
    base = 0.0
    for name, disturb in (("undisturbed", undisturbed), ("prompt", long_prompt), ("flood", batch_flood)):
        began = time.perf_counter()
        gaps = bench.while_written(options.streams, disturb)
        while not all(sink.over.is_set() for sink in flood):
            gaps += bench.while_written(options.streams, disturb)
        value = p99(gaps)
        base = base or value
        print(
            f"{name:12} p50 {statistics.median(gaps) * 1e3:7.1f} ms  p99 {value * 1e3:7.1f} ms  max "
            f"{max(gaps) * 1e3:7.1f} ms  p99 ratio {value / base:5.2f} (goal {GOAL.get(name, 1.0)})  "
            f"{len(gaps)} gaps in {time.perf_counter() - began:.0f} s",
            flush=True,
        )
    print(f"the flood: {sum(sink.over.is_set() and not sink.failed for sink in flood)} of {options.flood} finished")


if __name__ == "__main__":
    main()
