"""What guessing ahead brings where an answer repeats its prompt: tokens per second with and without, as a ratio.

python tests/bench/bench_speculation.py [--rounds 5] [--threads 2] [--streams 1]

Each task is to repeat a text or a program, some with edits, and is answered greedily to its natural end: what a model
writes beyond that repeats nothing. By turns with and without, in one process; rates from the first token to the last.
"""

import argparse
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from engine_target import running, template

from tie.assets.chat import ChatMessage
from tie.cli.assets import demo_bundle
from tie.cli.settings import cache_dir
from tie.proto import runtime_pb2
from tie.runtime.engine import Engine
from tie.runtime.request import check

WAIT_S = 300.0
TEXT = (
    "The harbour was quiet that morning. Two boats lay at the pier, and a dog slept on a coil of rope. An old man "
    "mended a net; his hands moved without his eyes. From the bakery came the smell of bread, and the church bell "
    "struck seven. Nobody spoke. The tide was going out, and the gulls walked on the wet sand like clerks on their way "
    "to an office."
)
PROGRAM = """```python
def total(orders, rate):
    result = 0
    for order in orders:
        if order.price < 0:
            raise ValueError("a price is negative")
        result += order.price * order.count
    return result + result * rate


def report(orders, rate):
    lines = []
    for order in orders:
        lines.append(f"{order.name}: {order.price * order.count}")
    lines.append(f"total: {total(orders, rate)}")
    return "\\n".join(lines)
```"""
TASKS = {
    "text": f"Repeat the following text exactly: {TEXT}",
    "text, a word replaced": f"Repeat the following text word for word, but write 'ship' instead of 'boat': {TEXT}",
    "program": f"Repeat this program exactly:\n{PROGRAM}",
    "program, a name replaced": f"Copy this program and rename `orders` to `items`:\n{PROGRAM}",
    "nothing to repeat": "Tell me a story about a lighthouse.",
}


class Sink:
    def __init__(self) -> None:
        self.times: list[tuple[float, int]] = []
        self.ids: list[int] = []
        self.over = threading.Event()

    def emit(self, event: runtime_pb2.GenerateEvent, *, last: bool) -> None:
        if event.HasField("tokens"):
            self.ids += event.tokens.token_ids
            self.times.append((time.perf_counter(), len(self.ids)))
        if last:
            self.over.set()


def rate(engine: Engine, prompt: Sequence[int], streams: int, *, guesses: bool) -> tuple[float, list[int]]:
    """Tokens per second, all streams together, and the first one's tokens."""
    engine._speculates = guesses
    sinks = [Sink() for _ in range(streams)]
    for sink in sinks:
        message = runtime_pb2.GenerateRequest(token_ids=prompt, max_tokens=200, sampling=runtime_pb2.Sampling())
        engine.submit(check(message, engine.bounds), sink)
    for sink in sinks:
        assert sink.over.wait(WAIT_S)
    began, ended = max(sink.times[0] for sink in sinks), max(sink.times[-1] for sink in sinks)
    return sum(len(sink.ids) - 1 for sink in sinks) / (ended[0] - began[0]), sinks[0].ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, help="model bundle [default: the demo model's]")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    bundle = options.bundle or demo_bundle(cache_dir() / "demo-bundle").directory
    overrides = [f"runtime.threads={options.threads}", "runtime.speculation=auto", *options.overrides]
    with running(bundle, overrides) as (service, config):
        chat = template(config)
        for name, text in TASKS.items():
            prompt = chat.encode([ChatMessage(role="user", content=text)])
            rates: dict[bool, list[float]] = {False: [], True: []}
            answers: dict[bool, list[int]] = {}
            for number in range(options.rounds + 1):  # the first warms up
                for guesses, values in rates.items():
                    value, answers[guesses] = rate(service.engine, prompt, options.streams, guesses=guesses)
                    if number:
                        values.append(value)
            plain, guessed = rates[False], rates[True]
            same = "same" if answers[False] == answers[True] else "other"
            ratios = [mine / other for mine, other in zip(guessed, plain, strict=True)]
            print(
                f"{name:26} {len(answers[False]):4} tokens  {statistics.median(plain):6.1f}/s  guessed "
                f"{statistics.median(guessed):6.1f}/s  ratio {statistics.median(ratios):5.2f} "
                f"({min(ratios):.2f}-{max(ratios):.2f})  {same} tokens",
                flush=True,
            )


if __name__ == "__main__":
    main()
