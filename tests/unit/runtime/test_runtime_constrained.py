"""The engine under grammars: forced tokens, late masks, dead ends, and how all this meets stops and ends."""

import itertools
import json
import threading
from concurrent.futures import Future

import pytest
import torch

from collecting import Collect
from tie.assets.manifest import TOKENIZER_FILE
from tie.assets.sample import make_sample_bundle
from tie.assets.tokenizer import load_tokenizer
from tie.proto import runtime_pb2 as pb
from tie.runtime import grammar as grammar_module
from tie.runtime import grammar_compiler
from tie.runtime.blocks import BlockPool
from tie.runtime.engine import Engine
from tie.runtime.grammar import Grammar
from tie.runtime.grammar_compiler import GrammarCompiler
from tie.runtime.request import Bounds, check
from tie.runtime.scheduler import Limits

VOCABULARY = 259
END = 258
WAIT_S = 20


class Counting:
    """Likes the token after the last one best, then the one after that, and so on."""

    def __init__(self):
        self.batches = []

    def forward(self, batch):
        self.batches.append(batch)
        rows = [token for part in batch.slices for token in part.tokens[len(part.tokens) - part.logits :]]
        likes = [-(torch.arange(VOCABULARY) - last - 1).remainder(VOCABULARY).float() for last in rows]
        return torch.stack(likes) if likes else torch.empty(0, VOCABULARY)


class Matcher:
    """A llguidance matcher whose masks can be held up, or be empty."""

    def __init__(self, inner):
        self.inner = inner
        self.gate = threading.Event()
        self.gate.set()
        self.dead = False

    def unsafe_compute_mask_ptr(self, *arguments):
        assert self.gate.wait(WAIT_S)
        if not self.dead:
            self.inner.unsafe_compute_mask_ptr(*arguments)

    def deep_copy(self):
        return self  # one choice each in these tests

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Compiler:
    """Hands out grammars around a `Matcher`."""

    def __init__(self, real):
        self.real = real
        self.matchers = []

    def compile(self, text):
        real = self.real.compile(text).result(WAIT_S)
        matcher = Matcher(real._matcher)
        self.matchers.append(matcher)
        done = Future()
        done.set_result(Grammar(matcher, VOCABULARY, real._workers, may_force=True))
        return done


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return make_sample_bundle(tmp_path_factory.mktemp("constrained") / "bundle")


@pytest.fixture(scope="module")
def real(bundle):
    compiler = GrammarCompiler(bundle.read(TOKENIZER_FILE).decode(), VOCABULARY, (END,))
    with pytest.MonkeyPatch.context() as patch:
        # These are short, whatever they are written in.
        patch.setattr(grammar_compiler, "forces_briefly", lambda *_: True)
        yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def tokenizer(bundle):
    return load_tokenizer(bundle)


def engine_with(compiler, tokenizer, blocks=40, executor=None):
    return Engine(
        executor or Counting(),
        BlockPool(blocks, 8),
        Limits(step_tokens=16, max_running=4, max_waiting=8),
        Bounds(VOCABULARY, 64),
        tokenizer=tokenizer,
        end_ids=frozenset({END}),
        grammars=compiler,
        on_failure=lambda: None,
    )


@pytest.fixture
def engine(real, tokenizer):
    engine = engine_with(real, tokenizer)
    engine.start()
    yield engine
    assert engine.stop(WAIT_S)


@pytest.fixture
def compiler(real):
    compiler = Compiler(real)
    yield compiler
    for matcher in compiler.matchers:
        matcher.gate.set()


def submit(engine, **fields):
    sink = Collect(WAIT_S)
    engine.submit(check(pb.GenerateRequest(**({"token_ids": [97], "max_tokens": 20} | fields)), engine.bounds), sink)
    return sink


def answered(engine, tokenizer, **fields):
    """What it says, and how it ended."""
    sink = submit(engine, **fields)
    end = sink.all()[-1]
    assert end.HasField("finished"), end
    return tokenizer.decode(sink.tokens()), end.finished


# --- forced tokens ---

FORCED = 'start: "hello there" /[xyz]/ " and " /[0-9]/'


def test_forced_tokens_are_not_sampled_and_read_the_same(engine, tokenizer):
    text, end = answered(engine, tokenizer, grammar=FORCED)
    rows = sum(part.logits for batch in engine._executor.batches for part in batch.slices)
    assert text[:11] == "hello there"
    assert text[11] in "xyz"
    assert text[12:17] == " and "
    assert text[17] in "0123456789"
    assert len(text) == 18
    assert end.completion_tokens == 18
    assert end.reason == pb.REASON_STOP_TOKEN
    assert rows <= 5  # of 18 tokens
    longest = max(len(part.tokens) for batch in engine._executor.batches for part in batch.slices)
    assert longest >= 5  # a run of forced ones, in one step


@pytest.mark.parametrize(
    "fields",
    [{"logprobs": 0}, {"sampling": pb.Sampling(bad_token_ids=[0])}, {"min_tokens": 1}],
    ids=["logprobs", "bad_token_ids", "min_tokens"],
)
def test_what_needs_the_sampler_gets_it_and_reads_the_same(engine, tokenizer, fields):
    plain, _ = answered(engine, tokenizer, grammar=FORCED)
    before = len(engine._executor.batches)
    text, end = answered(engine, tokenizer, grammar=FORCED, **fields)
    assert text == plain
    assert len(engine._executor.batches) - before >= 18
    assert end.completion_tokens == 18


def test_every_token_has_its_logprob(engine):
    sink = submit(engine, grammar=FORCED, logprobs=1)
    parts = [event.tokens for event in sink.all() if event.HasField("tokens")]
    assert all(len(part.logprobs) == len(part.token_ids) for part in parts)


@pytest.mark.parametrize("most", range(1, 14))
def test_forced_tokens_stop_at_max_tokens(engine, tokenizer, most):
    text, end = answered(engine, tokenizer, grammar=FORCED, max_tokens=most)
    assert text[:11] == "hello there"[:most]
    assert (end.completion_tokens, end.reason) == (most, pb.REASON_LENGTH)


def test_a_stop_string_among_forced_tokens_ends_there(engine, tokenizer):
    text, end = answered(engine, tokenizer, grammar=FORCED, stop=["lo th"])
    assert text == "hello th"
    assert (end.reason, end.drop_bytes) == (pb.REASON_STOP_STRING, 5)


def test_a_stop_token_among_forced_tokens_ends_there(engine, tokenizer):
    (space,) = tokenizer.encode(" ")
    text, end = answered(engine, tokenizer, grammar=FORCED, stop_token_ids=[space])
    assert text == "hello"
    assert (end.reason, end.completion_tokens) == (pb.REASON_STOP_TOKEN, 6)


def test_too_little_memory_gives_the_same_text_under_a_grammar(compiler, tokenizer):
    grammar = "start: ITEM ITEM ITEM ITEM ITEM\nITEM: /hello there [a-z] /"
    texts = []
    for blocks in (64, 9):
        engine = engine_with(compiler, tokenizer, blocks)
        sinks = [submit(engine, token_ids=[start], grammar=grammar, max_tokens=50) for start in (97, 98, 99)]
        engine.start()
        assert all(sink.all()[-1].HasField("finished") for sink in sinks)
        texts.append([tokenizer.decode(sink.tokens()) for sink in sinks])
        assert engine.stop(WAIT_S)
        assert ("tie_runtime_preemptions_total 0.0" in engine.metrics.text()) == (blocks == 64)
    assert texts[0] == texts[1]


# --- several choices ---


def test_each_of_n_choices_follows_the_grammar_on_its_own(engine, tokenizer):
    sink = submit(engine, grammar='start: "<" /[a-z]{3,6}/ ">"', n=4, sampling=pb.Sampling(temperature=1, seed=7))
    assert sink.all()[-1].HasField("finished")
    texts = [tokenizer.decode(sink.tokens(index)) for index in range(4)]
    assert all(text[0] == "<" and text[-1] == ">" and text[1:-1].isalpha() for text in texts)
    assert len(set(texts)) > 1


# --- ends ---


def test_a_grammar_may_go_on_and_may_end(engine, tokenizer):
    text, end = answered(engine, tokenizer, grammar="start: /[b-e]+/", max_tokens=10)
    # From "a" on: b, c, d, e, and then the end token is nearer than b.
    assert (text, end.reason) == ("bcde", pb.REASON_STOP_TOKEN)


def test_min_tokens_forbids_the_end_that_the_grammar_allows(engine, tokenizer):
    text, end = answered(engine, tokenizer, grammar="start: /[b-e]+/", min_tokens=6, max_tokens=10)
    assert text[:6] == "bcdebc"
    assert end.completion_tokens >= 6


def test_min_tokens_yields_to_a_grammar_that_is_complete(engine, tokenizer):
    text, end = answered(engine, tokenizer, grammar="start: /[xyz]{2}/", min_tokens=6, max_tokens=10)
    assert (len(text), end.reason) == (2, pb.REASON_STOP_TOKEN)


def test_where_only_the_end_is_left_and_forbidden_the_request_fails_alone(engine):
    sink = submit(engine, grammar="start: /[b-e]+/", sampling=pb.Sampling(allowed_token_ids=[300 % VOCABULARY, END]))
    assert sink.all()[-1].failed.code == pb.CODE_INVALID


def test_ignore_eos_does_not_outlive_the_grammar(engine, tokenizer):
    text, end = answered(engine, tokenizer, grammar="start: /[xyz]{2}/", ignore_eos=True, max_tokens=10)
    assert (len(text), end.reason) == (2, pb.REASON_STOP_TOKEN)


def test_the_canarys_grammar_lets_everything_through(engine):
    sink = submit(engine, grammar="", canary=True, max_tokens=1)
    assert sink.all()[-1].finished.completion_tokens == 1
    assert len(sink.tokens()) == 1


# --- late and dead ---


def test_nobody_waits_for_a_late_mask(compiler, tokenizer):
    engine = engine_with(compiler, tokenizer)
    late = submit(engine, grammar="start: /[b-z]{3}/")
    compiler.matchers[0].gate.clear()
    engine.start()
    others = [submit(engine, token_ids=[start], max_tokens=30) for start in (1, 50)]
    assert all(other.all()[-1].finished.completion_tokens == 30 for other in others)
    assert late.events.empty()
    compiler.matchers[0].gate.set()
    assert late.all()[-1].finished.reason == pb.REASON_STOP_TOKEN
    assert tokenizer.decode(late.tokens()) == "bcd"  # by the logits that it had to keep
    assert engine.stop(WAIT_S)


def test_one_that_is_preempted_while_it_waits_for_its_mask_is_computed_anew(compiler, tokenizer):
    engine = engine_with(compiler, tokenizer, blocks=8)
    old = submit(engine, token_ids=[1], max_tokens=60, ignore_eos=True)  # takes all blocks in the end
    late = submit(engine, grammar="start: /[b-z]{3}/")
    compiler.matchers[0].gate.clear()
    engine.start()
    assert old.all()[-1].finished.reason == pb.REASON_LENGTH
    assert "tie_runtime_preemptions_total 0.0" not in engine.metrics.text()
    compiler.matchers[0].gate.set()
    late.all()
    assert tokenizer.decode(late.tokens()) == "bcd"
    assert engine.stop(WAIT_S)


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_one_that_ends_while_it_waits_for_its_mask_leaves_nothing(compiler, tokenizer, how):
    engine = engine_with(compiler, tokenizer)
    sink = Collect(WAIT_S)
    fields = {"token_ids": [97], "max_tokens": 5, "grammar": "start: /[b-z]{3}/"}
    fields |= {"deadline_ms": 50} if how == "deadline" else {}
    job = engine.submit(check(pb.GenerateRequest(**fields), engine.bounds), sink)
    compiler.matchers[0].gate.clear()
    engine.start()
    if how == "cancel":
        assert submit(engine, max_tokens=5).all()[-1].HasField("finished")
        engine.cancel(job)
        assert sink.all()[-1].finished.reason == pb.REASON_CANCELLED
    else:
        assert sink.all()[-1].failed.code == pb.CODE_DEADLINE
    assert submit(engine, max_tokens=5).all()[-1].HasField("finished")
    assert engine.stop(WAIT_S)
    assert len(engine._chooser) == 0
    assert engine._pool.free == engine._pool.total


def test_a_mask_that_takes_too_long_fails_its_request_alone(compiler, tokenizer, monkeypatch):
    monkeypatch.setattr(grammar_module, "MASK_DEADLINE_S", 0.1)
    engine = engine_with(compiler, tokenizer)
    late = submit(engine, grammar="start: /[b-z]{3}/")
    compiler.matchers[0].gate.clear()
    engine.start()
    good = submit(engine)
    failed = late.all()[-1].failed
    assert failed.code == pb.CODE_GRAMMAR
    assert "[b-z]" not in failed.detail
    assert good.all()[-1].HasField("finished")
    assert engine.stop(WAIT_S)


def test_a_dead_end_is_a_clear_error_of_its_request_alone(compiler, tokenizer):
    engine = engine_with(compiler, tokenizer)
    dead = submit(engine, grammar="start: /[b-z]{3}/")
    compiler.matchers[0].dead = True
    engine.start()
    good = submit(engine)
    assert dead.all()[-1].failed.code == pb.CODE_GRAMMAR
    assert dead.seen[-1].failed.detail == "grammar: the grammar allows no further token"
    assert good.all()[-1].HasField("finished")
    assert engine.stop(WAIT_S)


def test_a_hundred_bombs_at_once_leave_the_others_alone(engine, tokenizer):
    multiples = [{"type": "number", "multipleOf": p} for p in (1e-9, 7, 11, 13, 17, 19, 23, 29, 31, 37)]
    bomb = json.dumps({"grammars": [{"json_schema": {"allOf": multiples}}]})
    bombs = [submit(engine, grammar=bomb) for _ in range(100)]
    plain = [answered(engine, tokenizer, token_ids=[start], max_tokens=5)[1] for start in range(20)]
    assert all(end.completion_tokens == 5 for end in plain)
    codes = [sink.all()[-1].failed.code for sink in bombs]
    assert set(codes) == {pb.CODE_GRAMMAR, pb.CODE_BUSY}
    assert codes.index(pb.CODE_BUSY) >= 8  # so many fit the queue here; the others need not wait to be told
    assert answered(engine, tokenizer, grammar="start: /[b-z]{3}/")[0] == "bcd"


def test_answers_do_not_depend_on_who_else_is_there(engine, tokenizer):
    grammars = ["start: /[b-z]{3,9}/", FORCED, 'start: "a"+ "b"', None]
    fields = [
        {"token_ids": [start], "sampling": pb.Sampling(temperature=1, seed=start), "max_tokens": 12}
        | ({"grammar": grammar} if grammar else {})
        for start, grammar in zip((97, 98, 99, 100), grammars, strict=True)
    ]
    alone = [answered(engine, tokenizer, **field)[0] for field in fields]
    for order in itertools.islice(itertools.permutations(range(4)), 6):
        sinks = {index: submit(engine, **fields[index]) for index in order}
        for index, sink in sinks.items():
            sink.all()
            assert tokenizer.decode(sink.tokens()) == alone[index]
