"""What a schema costs: tokens per second of the whole engine with one and without, as a ratio within one run.

python tests/bench/bench_grammar.py MODEL.gguf [--streams 8] [--tokens 128] [--rounds 5] [--dtype bf16] [--threads 2]

All answers have the same length: without a schema the end token is ignored, and the schema allows no end that early.
Rounds alternate, and each is compared with the one before: what else the machine does changes more slowly than that.
"""

import argparse
import json
import queue
import statistics
import tempfile
import time
from pathlib import Path

from bench_bones import load

from tie.app.schemas import enforceable
from tie.assets.build import create_bundle, read_source
from tie.assets.manifest import TOKENIZER_FILE
from tie.assets.tokenizer import load_tokenizer
from tie.bones.executor import Executor
from tie.proto import runtime_pb2 as pb
from tie.runtime.blocks import BlockPool
from tie.runtime.engine import Engine
from tie.runtime.grammar_compiler import GrammarCompiler
from tie.runtime.request import Bounds, check
from tie.runtime.scheduler import Limits

BLOCK = 16
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


class Last:
    """A sink that keeps the last event and counts the others."""

    def __init__(self) -> None:
        self.end: queue.SimpleQueue[pb.GenerateEvent] = queue.SimpleQueue()

    def emit(self, event: pb.GenerateEvent, *, last: bool) -> None:
        if last:
            self.end.put(event)


class Counted:
    """An executor that counts its forward passes."""

    def __init__(self, inner: Executor) -> None:
        self.inner, self.steps = inner, 0

    def forward(self, batch):
        self.steps += 1
        return self.inner.forward(batch)


def run(engine: Engine, prompt: list[int], streams: int, tokens: int, grammar: str | None) -> float:
    """Tokens per second, all streams together, prompt and compilation included."""
    sinks = [Last() for _ in range(streams)]
    began = time.perf_counter()
    for seed, sink in enumerate(sinks):
        message = pb.GenerateRequest(
            token_ids=prompt, max_tokens=tokens, ignore_eos=True, sampling=pb.Sampling(temperature=1, seed=seed)
        )
        if grammar:
            message.grammar = grammar
        engine.submit(check(message, engine.bounds), sink)
    counted = 0
    for sink in sinks:
        event = sink.end.get(timeout=WAIT_S)
        if event.finished.completion_tokens != tokens:
            raise SystemExit(f"an answer ended early: {event}")
        counted += event.finished.completion_tokens
    return counted / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "f32"))
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        bundle = create_bundle(read_source(options.model), Path(directory) / "bundle")
        tokenizer = load_tokenizer(bundle)
        end_ids = bundle.manifest.tokenizer.end_of_turn_ids
        vocab_size = bundle.manifest.architecture.vocab_size
        grammars = GrammarCompiler(bundle.read(TOKENIZER_FILE).decode(), vocab_size, end_ids)
    blocks = options.streams * (options.tokens // BLOCK + 4)
    executor = Counted(load(options.model, dtype=options.dtype, threads=options.threads, num_blocks=blocks))
    engine = Engine(
        executor,
        BlockPool(blocks, BLOCK),
        Limits(step_tokens=256, max_running=options.streams, max_waiting=options.streams),
        Bounds(vocab_size, blocks * BLOCK // options.streams),
        tokenizer=tokenizer,
        end_ids=frozenset(end_ids),
        grammars=grammars,
        on_failure=lambda: None,
    )
    engine.start()
    prompt = tokenizer.encode("Invent people and list them as JSON.\n")
    schema = json.dumps({"grammars": [{"json_schema": enforceable(SCHEMA)}]})
    kinds = {"no grammar": None, "any text": "start: /(?s:.{4000,})/", "schema": schema}
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    steps = dict.fromkeys(kinds, 0)
    for place in range(-1, options.rounds):  # the first to warm up
        for kind, grammar in kinds.items():
            before = executor.steps
            rate = run(engine, prompt, options.streams, options.tokens, grammar)
            if place >= 0:
                rates[kind].append(rate)
                steps[kind] += executor.steps - before
    for kind, values in rates.items():
        ratio = statistics.median(value / plain for value, plain in zip(values, rates["no grammar"], strict=True))
        print(
            f"{kind:11} {statistics.median(values):7.1f} tokens/s   ratio {ratio:.3f}"
            f"   {steps[kind] / options.rounds:6.1f} steps"
        )
    engine.stop(60)
    grammars.close()


if __name__ == "__main__":
    main()
