"""Where a step's time goes: forward pass, sampling, scheduler, and what is left, by number of streams.

python tests/bench/bench_step.py [--bundle DIR] [--set runtime.weights=q4] … [--streams 1 8 16]

The engine runs in this process, on a model owner of its own, below Triton; its parts are timed where it calls them.
"""

import argparse
import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_target import EngineTarget, running

from tie.cli.assets import demo_bundle
from tie.cli.settings import cache_dir
from tie.proto import runtime_pb2
from tie.runtime import chooser
from tie.runtime.engine import Engine


class Clock:
    """Seconds and calls by the name of a part."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def on(self, owner: Any, attribute: str, name: str) -> None:
        """Times every call of `owner.attribute` from now on."""
        original: Callable[..., Any] = getattr(owner, attribute)

        def timed(*arguments: Any, **named: Any) -> Any:
            begun = time.perf_counter()
            try:
                return original(*arguments, **named)
            finally:
                self.seconds[name] += time.perf_counter() - begun
                self.calls[name] += 1

        setattr(owner, attribute, timed)


def watch(engine: Engine) -> Clock:
    clock = Clock()
    clock.on(engine, "_step", "step")
    clock.on(engine._executor, "forward", "forward")
    clock.on(engine._scheduler, "plan", "scheduler")
    clock.on(chooser, "sample", "sampling")
    return clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--context", type=int, default=64)
    arguments = parser.parse_args()
    bundle = arguments.bundle or demo_bundle(cache_dir() / "demo-bundle").directory
    source = random.Random(0)  # noqa: S311 (no secret)
    with running(bundle, ["runtime.speculation=off", *arguments.overrides]) as (service, _):
        target = EngineTarget(service.engine)
        clock = watch(service.engine)
        print(f"{service.engine._executor.layout_id}; milliseconds a step, context {arguments.context} and on")
        print(f"{'streams':>8} {'tok/s':>8} {'whole':>8} {'forward':>8} {'sampling':>8} {'scheduler':>9} {'rest':>8}")

        async def generate(streams: int, tokens: int) -> None:
            prompts = [source.choices(range(1000, 40000), k=arguments.context) for _ in range(streams)]
            requests = [
                runtime_pb2.GenerateRequest(token_ids=prompt, max_tokens=tokens, ignore_eos=True) for prompt in prompts
            ]
            await asyncio.gather(*(target.generate(request, lambda _at, _count: None) for request in requests))

        for streams in arguments.streams:
            asyncio.run(generate(streams, 8))
            clock.seconds.clear()
            clock.calls.clear()
            begun = time.perf_counter()
            asyncio.run(generate(streams, arguments.tokens))
            passed = time.perf_counter() - begun
            steps = clock.calls["step"]
            parts = [1e3 * clock.seconds[name] / steps for name in ("forward", "sampling", "scheduler")]
            whole = 1e3 * passed / steps
            numbers = " ".join(f"{number:8.2f}" for number in (whole, *parts[:2]))
            speed = streams * arguments.tokens / passed
            print(f"{streams:8} {speed:8.1f} {numbers} {parts[2]:9.2f} {whole - sum(parts):8.2f}", flush=True)


if __name__ == "__main__":
    main()
