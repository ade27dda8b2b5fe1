"""Compiling grammars: bombs end in their trial, however many there are, and others are served meanwhile."""

import json
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tie.app import schemas
from tie.assets.manifest import TOKENIZER_FILE
from tie.assets.sample import make_sample_bundle
from tie.runtime import grammar_compiler
from tie.runtime import trials as trials_module
from tie.runtime.grammar import GrammarError
from tie.runtime.grammar_compiler import MAX_GRAMMAR_BYTES, GrammarCompiler
from tie.runtime.grammar_trial import Verdict
from tie.runtime.trials import Trials
from waiting import wait_for

WAIT_S = 60


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory):
    return make_sample_bundle(tmp_path_factory.mktemp("compiler") / "bundle").read(TOKENIZER_FILE).decode()


@pytest.fixture
def trials(tokenizer_json):
    trials = Trials(tokenizer_json, 300, (258,))
    yield trials
    trials.close()


@pytest.fixture
def compiler(tokenizer_json):
    compiler = GrammarCompiler(tokenizer_json, 300, (258,))
    yield compiler
    compiler.close()


def schema(value) -> str:
    return json.dumps({"grammars": [{"json_schema": value}]})


GOOD = schema({"type": "object", "properties": {"a": {"type": "integer"}}})
# Six seconds of work from a few hundred bytes.
BUSY = schema({"allOf": [{"type": "number", "multipleOf": p} for p in (1e-9, 7, 11, 13, 17, 19, 23, 29, 31, 37)]})
# Overflows any stack that a thread is given by default, and the one of a trial.
DEEP = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(60_000)) + '\nr60000: "a"'


def test_a_trial_tells_what_compiles(trials):
    assert trials.passes(GOOD) is Verdict.GOOD
    assert trials.passes('start: "a"') is Verdict.GOOD
    assert trials.passes("start: (((") is Verdict.REFUSED
    assert trials.passes("") is Verdict.REFUSED
    assert trials.passes("\ud800") is Verdict.REFUSED
    assert trials.passes(schema({"not": {"pattern": "a"}})) is Verdict.REFUSED


def test_what_takes_too_long_or_too_much_stack_ends_its_trial_only(trials):
    assert trials.passes(BUSY) is Verdict.OVERDUE
    assert trials.passes(DEEP) is Verdict.OVERDUE
    process = trials.helper._process
    assert trials.passes(GOOD) is Verdict.GOOD
    assert trials.helper._process is process


def test_a_trial_process_that_died_is_replaced(trials):
    assert trials.passes(GOOD) is Verdict.GOOD
    trials.helper._process.kill()
    trials.helper._process.wait(WAIT_S)
    assert trials.passes(GOOD) is Verdict.GOOD


def test_a_trial_process_that_dies_over_a_question_is_replaced_and_asked_again(trials):
    trials.start()
    stopped = trials.helper._process
    for pid in [*children(stopped.pid), stopped.pid]:  # its forks answer for it
        os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        verdict = pool.submit(trials.passes, GOOD)
        with pytest.raises(TimeoutError):
            verdict.result(0.2)
        os.kill(stopped.pid, signal.SIGKILL)
        assert verdict.result(WAIT_S) is Verdict.GOOD
    assert trials.helper._process is not stopped


@pytest.mark.parametrize("says", [b"?", b""], ids=["nonsense", "end of file"])
def test_a_trial_process_that_is_none_is_not_believed(trials, says):
    trials.start()
    real, (trials.helper._socket, impostor) = trials.helper._socket, socket.socketpair()
    impostor.sendall(says)
    impostor.shutdown(socket.SHUT_WR)
    doubtful = trials.helper._process
    assert trials.passes(GOOD) is Verdict.GOOD
    assert trials.helper._process is not doubtful
    impostor.close()
    real.close()


def test_a_trial_process_that_is_stuck_is_replaced(trials, monkeypatch):
    trials.start()
    monkeypatch.setattr(trials_module, "WALL_S", 0.1)
    monkeypatch.setattr(trials_module, "_GRACE_S", 0.1)
    for pid in [*children(trials.helper._process.pid), trials.helper._process.pid]:
        os.kill(pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        trials.passes("x" * (MAX_GRAMMAR_BYTES - 1))  # more than the kernel buffers
    assert trials.helper._process is None
    monkeypatch.undo()
    assert trials.passes(GOOD) is Verdict.GOOD


def test_no_trial_outlives_its_parent(trials):
    trials.start()
    left = [trials.helper._process.pid, *children(trials.helper._process.pid)]
    assert len(left) == 2
    trials.close()
    wait_for(lambda: not any(map(psutil.pid_exists, left)), "the trial's processes to end")


def children(pid: int) -> list[int]:
    """Those of a trial process: the fork that waits for the next grammar."""
    return [child.pid for child in wait_for(psutil.Process(pid).children, "the trial to fork")]


@pytest.mark.parametrize("text", [BUSY, "start: (((", "x" * (MAX_GRAMMAR_BYTES + 1)], ids=["busy", "broken", "large"])
def test_a_refusal_does_not_quote_the_grammar(compiler, text):
    with pytest.raises(GrammarError) as caught:
        compiler.compile(text).result(WAIT_S)
    assert text not in str(caught.value)


def test_the_largest_text_that_may_be_compiled_does_not_end_this_process(compiler):
    rules = next(n for n in range(8000, 12_000, 10) if len(chain(n + 10)) > MAX_GRAMMAR_BYTES)
    # As if it had passed its trial, which it does where nothing else keeps the processor busy.
    assert compiler._workers.submit(compiler._build, chain(rules)).result(WAIT_S).mask().any()


def chain(rules: int) -> str:
    return "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(rules)) + f'\nr{rules}: "a"'


def test_a_hundred_bombs_end_and_leave_nothing_behind(compiler):
    began = time.monotonic()
    bombs = [compiler.compile(BUSY) for _ in range(100)]
    behind = compiler.compile(GOOD)  # more than may wait: refused at once rather than late
    with pytest.raises(GrammarError, match="too many"):
        behind.result(0)
    assert time.monotonic() - began < 5
    for bomb in bombs[10:]:
        bomb.cancel()  # as the engine does when a request's time is over
    assert compiler.compile(GOOD).result(WAIT_S).mask().any()
    for bomb in bombs[:10]:
        with pytest.raises(GrammarError):
            bomb.result(WAIT_S)
    # All places are free again.
    good = [compiler.compile(GOOD) for _ in range(grammar_compiler._MAX_QUEUED)]
    assert all(future.result(WAIT_S) for future in good)


def test_without_trials_grammars_are_refused_and_the_canary_is_not(compiler, monkeypatch):
    monkeypatch.setattr(Trials, "passes", lambda _self, _text: (_ for _ in ()).throw(OSError()))
    with pytest.raises(GrammarError, match="now"):
        compiler.compile(GOOD).result(WAIT_S)
    assert compiler.compile("").result(WAIT_S).mask().any()


def test_closing_ends_the_trial_processes(tokenizer_json):
    compiler = GrammarCompiler(tokenizer_json, 300, (258,))
    compiler.compile(GOOD).result(WAIT_S)
    processes = [trials.helper._process for trials in compiler._trials]
    compiler.close()
    assert all(process is None or process.returncode is not None for process in processes)


FREE = schemas.OPTIONS


@pytest.mark.parametrize(
    ("text", "brief"),
    [
        (schema({"const": "hello", "x-guidance": FREE}), True),
        (schema({"properties": {"a": {"type": "string"}}, "required": ["a"], "x-guidance": FREE}), True),
        (schema({"const": "hello"}), False),
        (schema({"const": "hello" * 2000, "x-guidance": FREE}), False),
        (schema({"items": {"pattern": "a{1000000}"}, "x-guidance": FREE}), False),
        (schema({"const": ["hello"], "x-guidance": {"whitespace_flexible": False}}), False),
        (schema({"const": ["hello"], "x-guidance": {**FREE, "whitespace_pattern": "x"}}), False),
        (schema(True), False),
        ('{"grammars": []}', False),
        ('{"grammars": [{"lark_grammar": "start: /a{1000000}/"}]}', False),
        ('{"grammars": [{"json_schema": {"x-guidance": {"whitespace_flexible": true}}}, {"lark_grammar": ""}]}', False),
        ("start: /a{1000000}/", False),
        ("[" * 5000, False),
        ("7", False),
    ],
)
def test_only_what_forces_little_is_looked_through_for_it(text, brief):
    assert grammar_compiler.forces_briefly(text, grammar_compiler.json_schema(text)) is brief


def test_a_grammar_is_parsed_once(compiler, monkeypatch):
    parsed = []
    loads = json.loads
    monkeypatch.setattr(grammar_compiler.json, "loads", lambda text: (parsed.append(text), loads(text))[1])
    text = schema({"const": "hello", "x-guidance": FREE})
    assert compiler.compile(text).result(WAIT_S)
    assert parsed == [text]


def test_what_is_forced_in_json_is_found(compiler, tokenizer_json):
    grammar = compiler.compile(schema({"const": "hello there", "x-guidance": FREE})).result(WAIT_S)
    grammar.forces = True
    assert len(grammar.forced()) > 5
    assert grammar.mask() is None
    for token in grammar.forced():
        grammar.accept(token)
    assert grammar.complete
