"""Restored blocks in an engine: the same answers for less work, whatever an import is worth."""

import queue
import threading
import time

import pytest

from collecting import Collect
from kv_memory import BLOCKS, BYTES, CONTENTS, FORMAT, TOKENS, VOCABULARY, WAIT_S, fill, promised
from kvxfer import doorbell, transfer
from kvxfer.errors import TransferAbortedError
from kvxfer.transfer import Consumer
from tie.assets.manifest import TOKENIZER_FILE
from tie.assets.sample import make_sample_bundle
from tie.assets.tokenizer import load_tokenizer
from tie.proto import runtime_pb2 as pb
from tie.runtime.blocks import BlockPool
from tie.runtime.engine import Engine
from tie.runtime.grammar_compiler import GrammarCompiler
from tie.runtime.prefix_trie import PrefixTrie
from tie.runtime.request import Bounds, check
from tie.runtime.scheduler import Limits as SchedulerLimits
from waiting import wait_for


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return make_sample_bundle(tmp_path_factory.mktemp("transfer") / "bundle")


@pytest.fixture
def engine(bundle, memory):
    compiler = GrammarCompiler(bundle.read(TOKENIZER_FILE).decode(), VOCABULARY, (258,))
    engine = Engine(
        memory,
        BlockPool(BLOCKS, TOKENS),
        SchedulerLimits(step_tokens=16, max_running=4, max_waiting=8),
        Bounds(VOCABULARY, 64),
        tokenizer=load_tokenizer(bundle),
        end_ids=frozenset({258}),
        grammars=compiler,
        on_failure=lambda: None,
        speculation=False,
    )
    engine.start()
    yield engine
    assert engine.stop(WAIT_S)
    assert engine._pool.statistics().used == 0
    compiler.close()


def ask(engine, prompt, *, restoring=None, keep=None, **fields):
    message = pb.GenerateRequest(token_ids=prompt, max_tokens=6, **fields)
    sink = Collect(WAIT_S)
    engine.submit(check(message, engine.bounds), sink, restoring=restoring, keep=keep)
    events = sink.all()
    tokens = [token for event in events if event.HasField("tokens") for token in event.tokens.token_ids]
    return tokens, events[-1].finished


def export(transfers, promise, first=0):
    transfer.request(promise.channel, first, timeout=WAIT_S)
    with Consumer(promise.channel, max_bytes=1 << 20, timeout=WAIT_S) as consumer:
        consumer.wait(consumer.header.block_count, timeout=WAIT_S)
        consumer.finish(timeout=WAIT_S)
        contents = []
        for index in range(consumer.header.block_count):
            with consumer.block(index) as view:
                contents.append(bytes(view))
    promise.close()
    return contents


def exported(engine, transfers, prompt):
    """The answer to a prompt, and the blocks of both: all whole ones of the prompt, and what the answer has filled."""
    promise = promised(transfers.prepare_export("app"))
    tokens, end = ask(engine, prompt, keep=transfers.keeper(promise.ticket))
    assert end.cached_tokens == 0
    return tokens, export(transfers, promise)


def test_a_restored_prompt_gives_the_same_answer_with_less_work(engine, transfers, memory):
    prompt = list(range(40, 61))
    expected, contents = exported(engine, transfers, prompt)
    assert len(contents) == (len(prompt) + 5) // TOKENS  # the last sampled token has no keys and values
    assert memory.computed == len(prompt) + 5
    wait_for(lambda: engine._pool.statistics().used == 0)
    memory.data[:] = bytes(len(memory.data))  # nothing may come from what happens to lie there
    longer = [*prompt, *expected, 77, 78]
    plain, _ = ask(engine, longer)
    memory.data[:] = bytes(len(memory.data))
    before = memory.computed
    promise = promised(transfers.prepare_import("app", 6))
    restoring = transfers.restore(promise.ticket, len(longer))
    fill(promise, FORMAT.header(0, 6), contents)
    promise.close()
    restored, end = ask(engine, longer, restoring=restoring)
    assert restored == plain
    assert end.cached_tokens == 24
    assert memory.computed - before == len(longer) - 24 + 5


def _with_prefix(engine, memory, registered, contents, on_load=lambda: None):
    """Opens a prefix pool of one registered prompt, whose blocks are the first of `contents`."""

    class Sealed:
        @staticmethod
        def block(number):
            on_load()
            return memoryview(contents[number])

    engine._prefix.open(PrefixTrie([registered], TOKENS), Sealed(), memory)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_blocks_follow_a_registered_prefix(first, engine, transfers, memory):
    """The prefix has two blocks; an import begins before, inside or after it, and never changes what is shared."""
    prompt = list(range(40, 61))
    plain, contents = exported(engine, transfers, prompt)
    _with_prefix(engine, memory, prompt[:8], contents)
    promise = promised(transfers.prepare_import("app", 5 - first))
    restoring = transfers.restore(promise.ticket, len(prompt))
    # What lies where the prefix is must not be taken from an import.
    spoilt = [bytes(BYTES) if number < 2 else block for number, block in enumerate(contents[:5])]
    fill(promise, FORMAT.header(first, 5 - first), spoilt[first:])
    promise.close()
    before = memory.computed
    tokens, end = ask(engine, prompt, restoring=restoring)
    assert (tokens, end.cached_tokens) == (plain, 20)
    assert memory.computed - before == 1 + 5
    again, end = ask(engine, prompt)
    assert (again, end.cached_tokens) == (plain, 8)


@pytest.mark.parametrize("registered", [None, [1] * 8, list(range(40, 44))])
def test_blocks_that_follow_a_prefix_that_is_not_there_are_left_aside(registered, engine, transfers, memory):
    prompt = list(range(40, 61))
    plain, contents = exported(engine, transfers, prompt)
    if registered:
        _with_prefix(engine, memory, registered, contents)
    promise = promised(transfers.prepare_import("app", 3))
    restoring = transfers.restore(promise.ticket, len(prompt))
    fill(promise, FORMAT.header(2, 3), contents[2:5])
    promise.close()
    memory.data[:] = bytes(len(memory.data))
    tokens, end = ask(engine, prompt, restoring=restoring)
    assert (tokens, end.cached_tokens) == (plain, 4 if registered == prompt[:4] else 0)


def observed(engine, memory) -> tuple[list[str], threading.Event]:
    """Notes each step's answers; the second step waits for the event. On the engine's clock everything is slow."""
    did: list[str] = []
    both = threading.Event()
    forward = memory.forward

    def step(batch):
        did.append(f"step of {len(batch.slices)}")
        assert len(did) == 1 or both.wait(WAIT_S)
        return forward(batch)

    memory.forward = step
    clock = iter(range(1 << 20))
    engine._clock = lambda: float(next(clock))  # every look at it a second later
    return did, both


def test_copying_what_was_restored_holds_an_answer_up_for_a_moment_only(engine, transfers, memory):
    """Beside an answer that streams, a step copies one block where that takes long, and no more."""
    prompt = list(range(40, 61))
    expected, contents = exported(engine, transfers, prompt)
    wait_for(lambda: engine._pool.statistics().used == 0)
    did, both = observed(engine, memory)
    streaming, restored = Collect(WAIT_S), Collect(WAIT_S)
    engine.submit(check(pb.GenerateRequest(token_ids=[1, 2, 3], max_tokens=40), engine.bounds), streaming)
    promise = promised(transfers.prepare_import("app", 5))
    restoring = transfers.restore(promise.ticket, len(prompt))
    fill(promise, FORMAT.header(0, 5), contents[:5])
    promise.close()
    blocks = restoring.result(WAIT_S)
    copy = blocks.copy_into
    blocks.copy_into = lambda *of: (did.append("copy"), copy(*of))[1]
    streaming.events.get(timeout=WAIT_S)
    engine.submit(
        check(pb.GenerateRequest(token_ids=prompt, max_tokens=6), engine.bounds), restored, restoring=restoring
    )
    both.set()
    events = restored.all()
    assert [token for event in events for token in event.tokens.token_ids] == expected
    assert events[-1].finished.cached_tokens == 20
    streaming.all()
    first = did.index("copy")
    assert did[first : first + 10] == ["copy", "step of 1"] * 4 + ["copy", "step of 2"], did


def test_a_registered_prompt_is_copied_block_by_block_beside_an_answer(engine, transfers, memory):
    """The first request with it waits, a block a step where a copy takes long; answers that stream do not."""
    prompt = list(range(40, 61))
    expected, contents = exported(engine, transfers, prompt)
    wait_for(lambda: engine._pool.statistics().used == 0)
    did, both = observed(engine, memory)
    streaming, first, second = Collect(WAIT_S), Collect(WAIT_S), Collect(WAIT_S)
    engine.submit(check(pb.GenerateRequest(token_ids=[1, 2, 3], max_tokens=40), engine.bounds), streaming)
    streaming.events.get(timeout=WAIT_S)
    _with_prefix(engine, memory, prompt, contents, lambda: did.append("copy"))
    for sink in (first, second):
        engine.submit(check(pb.GenerateRequest(token_ids=prompt, max_tokens=6), engine.bounds), sink)
    both.set()
    for sink in (first, second):
        events = sink.all()
        assert [token for event in events for token in event.tokens.token_ids] == expected
        assert events[-1].finished.cached_tokens == 20
    streaming.all()
    start = did.index("copy")
    assert did[start : start + 10] == ["copy", "step of 1"] * 4 + ["copy", "step of 2"], did
    assert did.count("copy") == 5, "each block once for both"
    assert "step of 3" in did


def test_wrong_blocks_would_give_another_answer(engine, transfers, memory):
    """That the test above can fail."""
    prompt = list(range(40, 61))
    plain, _ = ask(engine, prompt)
    promise = promised(transfers.prepare_import("app", 3))
    restoring = transfers.restore(promise.ticket, len(prompt))
    fill(promise, FORMAT.header(0, 3), CONTENTS)
    promise.close()
    other, _ = ask(engine, prompt, restoring=restoring)
    assert other != plain


def test_several_choices_share_what_was_restored(engine, transfers):
    prompt = list(range(40, 61))
    expected, contents = exported(engine, transfers, prompt)
    promise = promised(transfers.prepare_import("app", 5))
    restoring = transfers.restore(promise.ticket, len(prompt))
    fill(promise, FORMAT.header(0, 5), contents[:5])
    promise.close()
    message = pb.GenerateRequest(token_ids=prompt, max_tokens=6, n=3)
    sink = Collect(WAIT_S)
    engine.submit(check(message, engine.bounds), sink, restoring=restoring)
    answers: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for event in sink.all():
        if event.HasField("tokens"):
            answers[event.tokens.index] += event.tokens.token_ids
    assert answers == {0: expected, 1: expected, 2: expected}


def test_a_failed_import_costs_the_reuse_and_nothing_else(engine, transfers):
    prompt = list(range(40, 61))
    plain, _ = ask(engine, prompt)
    promise = promised(transfers.prepare_import("app", 3))
    restoring = transfers.restore(promise.ticket, len(prompt))
    promise.close()
    tokens, end = ask(engine, prompt, restoring=restoring)
    assert (tokens, end.cached_tokens) == (plain, 0)


def test_a_cancelled_request_exports_nothing_and_lets_go_of_what_it_was_to_restore(engine, transfers):
    prompt = list(range(40, 61))
    export_promise = promised(transfers.prepare_export("app"))
    promise = promised(transfers.prepare_import("app", 3))
    sink = Collect(WAIT_S)
    job = engine.submit(
        check(pb.GenerateRequest(token_ids=prompt, max_tokens=6), engine.bounds),
        sink,
        restoring=transfers.restore(promise.ticket, len(prompt)),
        keep=transfers.keeper(export_promise.ticket),
    )
    engine.cancel(job)
    assert sink.all()[-1].finished.reason == pb.REASON_CANCELLED
    with pytest.raises(TransferAbortedError):
        doorbell.receive(export_promise.channel, time.monotonic() + WAIT_S)
    export_promise.close()
    fill(promise, FORMAT.header(0, 3), CONTENTS)
    promise.close()
    wait_for(lambda: transfers.in_flight == 0)


def test_a_slow_import_holds_up_nobody_else(engine, transfers):
    promise = promised(transfers.prepare_import("app", 3))
    sink = Collect(WAIT_S)
    waiting = check(pb.GenerateRequest(token_ids=list(range(40, 61)), max_tokens=6), engine.bounds)
    engine.submit(waiting, sink, restoring=transfers.restore(promise.ticket, 21))
    tokens, _ = ask(engine, [1, 2, 3])
    assert len(tokens) == 6
    with pytest.raises(queue.Empty):
        sink.events.get(timeout=0.05)
    promise.close()
    assert sink.all()[-1].finished.reason == pb.REASON_LENGTH
