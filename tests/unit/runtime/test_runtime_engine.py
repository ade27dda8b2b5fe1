"""The engine's loop over a tiny executor whose next token is the last one plus one."""

import threading

import pytest
import torch

from collecting import Collect
from tie.assets.manifest import TOKENIZER_FILE
from tie.assets.sample import make_sample_bundle
from tie.assets.tokenizer import load_tokenizer
from tie.proto import engine_pb2
from tie.proto import runtime_pb2 as pb
from tie.runtime.blocks import BlockPool
from tie.runtime.engine import Engine
from tie.runtime.grammar_compiler import GrammarCompiler
from tie.runtime.request import Bounds, check
from tie.runtime.scheduler import Limits

VOCABULARY = 259
MAX_LENGTH = 64
WAIT_S = 20


class Counting:
    """Next token = last token + 1. Can be held in a step, and broken."""

    def __init__(self):
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.batches = []
        self.error = None

    def forward(self, batch):
        self.entered.set()
        assert self.gate.wait(WAIT_S)
        if self.error:
            raise self.error
        self.batches.append(batch)
        rows = [token for part in batch.slices for token in part.tokens[len(part.tokens) - part.logits :]]
        logits = torch.zeros(len(rows), VOCABULARY)
        for index, last in enumerate(rows):
            logits[index, (last + 1) % VOCABULARY] = 10.0
        return logits


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return make_sample_bundle(tmp_path_factory.mktemp("engine") / "bundle")


@pytest.fixture(scope="module")
def compiler(bundle):
    compiler = GrammarCompiler(bundle.read(TOKENIZER_FILE).decode(), VOCABULARY, (258,))
    yield compiler
    compiler.close()


@pytest.fixture
def node(bundle, compiler):
    """(engine, executor, died): an engine that runs."""
    executor, died = Counting(), threading.Event()
    engine = Engine(
        executor,
        BlockPool(12, 8),
        Limits(step_tokens=16, max_running=4, max_waiting=2),
        Bounds(VOCABULARY, MAX_LENGTH),
        tokenizer=load_tokenizer(bundle),
        end_ids=frozenset({258}),
        grammars=compiler,
        on_failure=died.set,
    )
    engine.start()
    yield engine, executor, died
    executor.gate.set()
    assert engine.stop(WAIT_S)


def submit(engine, **fields):
    message = pb.GenerateRequest(**({"token_ids": [97], "max_tokens": 3} | fields))
    sink = Collect(WAIT_S)
    return engine.submit(check(message, engine.bounds), sink), sink


def test_generates_until_max_tokens(node):
    engine, _, _ = node
    _, sink = submit(engine)
    *_, end = sink.all()
    assert sink.tokens() == [98, 99, 100]
    assert end.finished.reason == pb.REASON_LENGTH
    assert (end.finished.prompt_tokens, end.finished.completion_tokens) == (1, 3)


def test_the_end_token_ends_and_is_not_sent(node):
    engine, _, _ = node
    _, sink = submit(engine, token_ids=[255], max_tokens=10)
    *_, end = sink.all()
    assert sink.tokens() == [256, 257]
    assert end.finished.reason == pb.REASON_STOP_TOKEN


def test_the_end_token_is_ignored_when_asked(node):
    engine, _, _ = node
    _, sink = submit(engine, token_ids=[256], max_tokens=4, ignore_eos=True)
    sink.all()
    assert sink.tokens() == [257, 258, 0, 1]


def test_an_answer_does_not_end_before_min_tokens(node):
    engine, _, _ = node
    _, sink = submit(engine, token_ids=[257], min_tokens=2, max_tokens=4)
    *_, end = sink.all()
    assert end.finished.completion_tokens >= 2
    assert 258 not in sink.tokens()[:2]


def test_a_stop_string_ends_across_tokens_and_says_how_much_to_drop(node, bundle):
    engine, _, _ = node
    letters = load_tokenizer(bundle).encode("abcde")
    _, sink = submit(engine, token_ids=letters[:1], stop=["de"], max_tokens=20)
    *_, end = sink.all()
    assert sink.tokens() == letters[1:]
    assert end.finished.reason == pb.REASON_STOP_STRING
    assert end.finished.drop_bytes == 2
    assert [event.tokens.hold_bytes for event in sink.seen[:3]] == [0, 0, 1]


def test_a_grammar_binds_and_completes(node, bundle):
    engine, _, _ = node
    _, sink = submit(engine, grammar="start: /[xyz]{2}/", max_tokens=10)
    *_, end = sink.all()
    text = load_tokenizer(bundle).decode(sink.tokens())
    assert len(text) == 2
    assert set(text) <= set("xyz")
    assert end.finished.reason == pb.REASON_STOP_TOKEN


def test_a_grammar_that_leaves_no_token_fails_only_its_request(node):
    engine, executor, _ = node
    executor.gate.clear()
    _, good = submit(engine, max_tokens=5)
    _, bad = submit(engine, grammar="start: /x/", sampling=pb.Sampling(allowed_token_ids=[98]))
    executor.gate.set()
    assert bad.all()[-1].failed.code == pb.CODE_INVALID
    assert good.all()[-1].finished.reason == pb.REASON_LENGTH


def test_a_grammar_that_does_not_compile_is_refused(node):
    engine, _, _ = node
    _, sink = submit(engine, grammar="start: (((")
    assert sink.all()[-1].failed.code == pb.CODE_GRAMMAR


def test_several_requests_share_a_step(node):
    engine, executor, _ = node
    executor.gate.clear()
    sinks = [submit(engine, token_ids=[start], max_tokens=4)[1] for start in (1, 50, 90)]
    executor.gate.set()
    for sink, start in zip(sinks, (1, 50, 90), strict=True):
        sink.all()
        assert sink.tokens() == [start + 1, start + 2, start + 3, start + 4]
    assert max(len(batch.slices) for batch in executor.batches) == 3
    assert engine.status().max_batch_seen == 3


def test_n_choices_end_one_by_one(node):
    engine, _, _ = node
    _, sink = submit(engine, n=3)
    sink.all()
    assert sorted(event.finished.index for event in sink.seen if event.HasField("finished")) == [0, 1, 2]
    assert all(sink.tokens(index) == [98, 99, 100] for index in range(3))


def test_more_than_may_wait_are_busy_and_a_canary_is_not(node):
    engine, executor, _ = node
    executor.gate.clear()
    sinks = [submit(engine)[1] for _ in range(6)]
    _, refused = submit(engine)
    _, canary = submit(engine, max_tokens=1, canary=True, grammar="")
    executor.gate.set()
    assert refused.all()[-1].failed.code == pb.CODE_BUSY
    assert canary.all()[-1].finished.completion_tokens == 1
    for sink in sinks:
        assert sink.all()[-1].HasField("finished")


def test_cancel_ends_within_a_step(node):
    engine, executor, _ = node
    executor.gate.clear()
    job, sink = submit(engine, max_tokens=60, ignore_eos=True)
    assert executor.entered.wait(WAIT_S)
    engine.cancel(job)
    executor.gate.set()
    assert sink.all()[-1].finished.reason == pb.REASON_CANCELLED
    engine.cancel(job)  # again: nothing happens
    assert idle(engine)


def test_a_deadline_ends_a_request(node):
    engine, executor, _ = node
    executor.gate.clear()
    _, sink = submit(engine, max_tokens=60, deadline_ms=1)
    executor.gate.set()
    assert sink.all()[-1].failed.code == pb.CODE_DEADLINE


def test_draining_refuses_and_finishes(node):
    engine, executor, _ = node
    executor.gate.clear()
    _, running = submit(engine, max_tokens=3)
    assert executor.entered.wait(WAIT_S)
    engine.drain(WAIT_S)
    _, late = submit(engine)
    assert engine.status().state == engine_pb2.STATE_DRAINING
    executor.gate.set()
    assert running.all()[-1].finished.reason == pb.REASON_LENGTH
    assert late.all()[-1].failed.code == pb.CODE_DRAINING


def test_a_drain_deadline_cuts_what_is_left_and_says_why(node):
    engine, executor, _ = node
    executor.gate.clear()
    _, sink = submit(engine, max_tokens=60, ignore_eos=True)
    assert executor.entered.wait(WAIT_S)
    engine.drain(0.0)
    executor.gate.set()
    failed = sink.all()[-1].failed
    assert (failed.code, failed.detail) == (pb.CODE_REPLACED, "the node had to restart: send it again")
    assert idle(engine)


def test_too_little_memory_still_gives_the_same_tokens(node):
    engine, _, _ = node  # 96 positions where 4 times 50 are wanted
    sinks = [submit(engine, token_ids=[start], max_tokens=49, ignore_eos=True)[1] for start in (0, 50, 100, 150)]
    for sink, start in zip(sinks, (0, 50, 100, 150), strict=True):
        sink.all()
        assert sink.tokens() == list(range(start + 1, start + 50))
    assert "tie_runtime_preemptions_total 0.0" not in engine.metrics.text()
    assert idle(engine)


def test_a_broken_executor_fails_every_request_and_says_so(node):
    engine, executor, died = node
    executor.error = RuntimeError("a secret in a traceback")
    _, sink = submit(engine)
    assert sink.all()[-1].failed.code == pb.CODE_INTERNAL
    assert died.wait(WAIT_S)
    assert engine.status().state == engine_pb2.STATE_FAILED


def test_the_log_of_a_failure_holds_no_message(node, capfd):
    engine, executor, died = node
    executor.error = RuntimeError("a secret in a traceback")
    _, sink = submit(engine)
    sink.all()
    assert died.wait(WAIT_S)
    logged = capfd.readouterr().err
    assert "engine.failed" in logged
    assert "secret" not in logged


def idle(engine) -> bool:
    """Whether everything has ended; a request's last event comes just before the count goes down."""
    waiting = threading.Event()
    for _ in range(int(WAIT_S / 0.01)):
        status = engine.status()
        if status.running + status.waiting == 0:
            return True
        waiting.wait(0.01)
    return False
