"""Where a decode step's time goes: drafts, plan, forward pass (and in it the gathering of keys and values), choosing.

python tests/bench/bench_engine.py [--streams 16] [--context 128] [--steps 150] [--threads 1] [--set KEY=VALUE]

By the clock, and by the step thread's processor time, which other programs on the machine disturb less (with one thread
the forward pass is all on it). What Triton and the app cost on top is measured by bench_node.py.
"""

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from engine_target import running

from tie.cli.assets import demo_bundle
from tie.cli.settings import cache_dir
from tie.proto import runtime_pb2
from tie.runtime import chooser
from tie.runtime.engine import Engine
from tie.runtime.plan import Plan
from tie.runtime.request import check

WAIT_S = 600.0


class Clock:
    """Seconds spent in functions, by the clock and of this thread's processor time, in the steps that count."""

    def __init__(self, streams: int) -> None:
        self._streams = streams
        self._now: dict[str, list[float]] = {}
        self.steps: list[dict[str, list[float]]] = []

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            wall, busy = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                entry = self._now.setdefault(name, [0.0, 0.0])
                entry[0] += time.perf_counter() - wall
                entry[1] += time.thread_time() - busy

        return timed

    def step(self, function: Callable[[Plan], None]) -> Callable[[Plan], None]:
        """A step counts when every stream decodes in it. What came since the last one, planning too, is its own."""
        timed = self.around("step", function)

        def counted(plan: Plan) -> None:
            timed(plan)
            if len(plan.slices) == self._streams and all(part.logits for part in plan.slices):
                self.steps.append(self._now)
            self._now = {}

        return counted

    def median(self, name: str, kind: int) -> float:
        return statistics.median(step.get(name, [0.0, 0.0])[kind] for step in self.steps)


class Sink:
    def __init__(self) -> None:
        self.tokens = 0
        self.over = threading.Event()

    def emit(self, event: runtime_pb2.GenerateEvent, *, last: bool) -> None:
        self.tokens += len(event.tokens.token_ids)
        if last:
            self.over.set()


# What each phase is part of; the first three make up a step.
PHASES = {
    "draft": "step", "plan": "step", "run": "step", "forward": "run", "lay out": "forward", "attend": "forward",
    "gather": "attend", "choose": "run", "sample": "choose", "text": "choose", "events": "choose",
}  # fmt: skip


@contextmanager
def measured(engine: Engine, clock: Clock) -> Iterator[None]:
    """Times the engine's phases from within; white-box, like a profiler."""
    executor, attention = engine._executor, getattr(engine._executor, "_attention", None)
    kept = chooser.sample, chooser.Choice.accept
    engine._speculation.draft = clock.around("draft", engine._speculation.draft)
    engine._scheduler.plan = clock.around("plan", engine._scheduler.plan)
    engine._step = clock.step(engine._step)
    executor.forward = clock.around("forward", executor.forward)
    if attention:  # the native executor's is no Python
        attention.plan = clock.around("lay out", attention.plan)
        attention.attend = clock.around("attend", attention.attend)
        attention.gather = clock.around("gather", attention.gather)
    engine._chooser.choose = clock.around("choose", engine._chooser.choose)
    engine._jobs.deliver = clock.around("events", engine._jobs.deliver)
    chooser.sample = clock.around("sample", chooser.sample)
    chooser.Choice.accept = clock.around("text", chooser.Choice.accept)
    try:
        yield
    finally:
        chooser.sample, chooser.Choice.accept = kept


def load(engine: Engine, streams: int, context: int, tokens: int, sampling: runtime_pb2.Sampling) -> list[Sink]:
    """Streams of random text, all at once, to their ends."""
    dice = np.random.default_rng(0)
    sinks = [Sink() for _ in range(streams)]
    for sink in sinks:
        ids = dice.integers(0, engine.bounds.vocab_size, context).tolist()
        message = runtime_pb2.GenerateRequest(token_ids=ids, max_tokens=tokens, ignore_eos=True, sampling=sampling)
        engine.submit(check(message, engine.bounds), sink)
    for sink in sinks:
        assert sink.over.wait(WAIT_S)
    return sinks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, help="model bundle [default: the demo model's]")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--greedy", action="store_true", help="else temperature 0.8 and top-p 0.95")
    parser.add_argument("--speculation", action="store_true")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    bundle = options.bundle or demo_bundle(cache_dir() / "demo-bundle").directory
    overrides = [f"runtime.threads={options.threads}", f"runtime.max_running={max(32, options.streams)}"]
    overrides += [f"runtime.speculation={'auto' if options.speculation else 'off'}", *options.overrides]
    sampling = runtime_pb2.Sampling() if options.greedy else runtime_pb2.Sampling(temperature=0.8, top_p=0.95)
    clock = Clock(options.streams)
    with running(bundle, overrides) as (service, _):
        load(service.engine, options.streams, options.context, 4, sampling)
        with measured(service.engine, clock):
            load(service.engine, options.streams, options.context, options.steps, sampling)
    report(clock, options)


def report(clock: Clock, options: argparse.Namespace) -> None:
    """Medians over the steps; shares of a step."""
    whole = [sum(clock.median(name, kind) for name in ("draft", "plan", "step")) for kind in (0, 1)]
    print(f"{options.streams} streams, context {options.context} and up, {options.threads} threads: ", end="")
    print(f"{len(clock.steps)} steps, {options.streams / whole[0]:.1f} tok/s")
    print(f"{'':24} {'clock':>10} {'':8} {'processor':>12}")
    for name, parent in {"step": "", **PHASES}.items():
        depth = 0
        ancestor = parent
        while ancestor:
            depth, ancestor = depth + 1, PHASES.get(ancestor, "")
        times = whole if name == "step" else [clock.median("step" if name == "run" else name, kind) for kind in (0, 1)]
        label = "  " * depth + name
        print(f"{label:24} " + " ".join(f"{t * 1e3:8.2f} ms {t / w:6.1%}  " for t, w in zip(times, whole, strict=True)))
    beside = [(w - clock.median("forward", kind) + clock.median("gather", kind)) / w for kind, w in enumerate(whole)]
    print(f"all but the forward pass, and gathering: {beside[0]:.1%} by the clock, {beside[1]:.1%} of processor time")


if __name__ == "__main__":
    main()
