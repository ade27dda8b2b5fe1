"""What a schema costs: tokens per second of the whole engine with one and without, as a ratio within one run.

python tests/bench/bench_grammar.py [--streams 8] [--tokens 32] [--rounds 30] [--threads 1] [--set KEY=VALUE]

All answers have the same length: without a schema the end token is ignored, and the schema allows no end that early.
Rounds are short and in random order, and each is compared with the plain one beside it. On a machine that is busy with
other things, look at the last column: the processor time of the step thread, which with one thread does all but the
masks.
"""

import argparse
import json
import queue
import random
import statistics
import time
from pathlib import Path

from engine_target import running

from tie.app.schemas import enforceable
from tie.assets.bundle import open_bundle
from tie.assets.tokenizer import load_tokenizer
from tie.cli.assets import demo_bundle
from tie.cli.settings import cache_dir
from tie.proto import runtime_pb2 as pb
from tie.runtime.engine import Engine
from tie.runtime.request import check

WAIT_S = 600
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "birthday": {"type": "string", "format": "date"},
        "role": {"enum": ["author", "editor", "reader"]},
        "scores": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 100}, "maxItems": 5},
        "address": {"type": "object", "properties": {"city": {"type": "string"}, "zip": {"type": "string"}}},
    },
    "required": ["name", "birthday", "role", "scores", "address"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": PERSON, "minItems": 1000}


class Times:
    """A sink that keeps when how many tokens came."""

    def __init__(self) -> None:
        self.tokens: list[tuple[float, float, int]] = []
        self.end: queue.SimpleQueue[pb.GenerateEvent] = queue.SimpleQueue()

    def emit(self, event: pb.GenerateEvent, *, last: bool) -> None:
        if event.HasField("tokens"):
            self.tokens.append((time.perf_counter(), time.thread_time(), len(event.tokens.token_ids)))
        if last:
            self.end.put(event)


def run(
    engine: Engine, prompt: list[int], streams: int, tokens: int, grammar: str | None
) -> tuple[float, float, float]:
    """Tokens per second, all streams together: from the request on; while all decode; the same by processor time."""
    sinks = [Times() for _ in range(streams)]
    began = time.perf_counter()
    for seed, sink in enumerate(sinks):
        message = pb.GenerateRequest(
            token_ids=prompt, max_tokens=tokens, ignore_eos=True, sampling=pb.Sampling(temperature=1, seed=seed)
        )
        if grammar:
            message.grammar = grammar
        engine.submit(check(message, engine.bounds), sink)
    for sink in sinks:
        event = sink.end.get(timeout=WAIT_S)
        if event.finished.completion_tokens != tokens:
            raise SystemExit(f"an answer ended early: {event}")
    seconds = time.perf_counter() - began
    first, last = max(sink.tokens[0] for sink in sinks), min(sink.tokens[-1] for sink in sinks)
    inside = sum(entry[2] for sink in sinks for entry in sink.tokens if first < entry <= last)
    return streams * tokens / seconds, inside / (last[0] - first[0]), inside / (last[1] - first[1])


def summary(values: list[tuple[float, float, float]], plain: list[tuple[float, float, float]], column: int) -> str:
    """The median rate, the median ratio to the plain run of the same round, and the ratio of the best."""
    mine, other = [value[column] for value in values], [value[column] for value in plain]
    ratio = statistics.median(map(float.__truediv__, mine, other))
    return f"{statistics.median(mine):10.1f}/s  {ratio:5.3f}  best {max(mine) / max(other):5.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, help="model bundle [default: the demo model's]")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    bundle = open_bundle(options.bundle) if options.bundle else demo_bundle(cache_dir() / "demo-bundle")
    prompt = load_tokenizer(bundle).encode("Invent people and list them as JSON.\n")
    schema = json.dumps({"grammars": [{"json_schema": enforceable(SCHEMA)}]})
    kinds = {"no grammar": None, "any text": "start: /(?s:.{4000,})/", "schema": schema}
    rates: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in kinds}
    overrides = [f"runtime.threads={options.threads}", "runtime.speculation=off", *options.overrides]
    with running(bundle.directory, overrides) as (service, _):
        for place in range(-1, options.rounds):  # the first to warm up
            for kind in random.sample(sorted(kinds), len(kinds)):
                rate = run(service.engine, prompt, options.streams, options.tokens, kinds[kind])
                if place >= 0:
                    rates[kind].append(rate)
    print(f"{'':12}{'from the request on':>34}{'while all decode':>34}{'by processor time':>34}")
    for kind, values in rates.items():
        print(f"{kind:12}" + "".join(summary(values, rates["no grammar"], column) for column in (0, 1, 2)))


if __name__ == "__main__":
    main()
