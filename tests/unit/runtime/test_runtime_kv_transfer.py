"""Imports and exports of KV blocks: what is believed, what is refused, what is let go of."""

import contextlib
import dataclasses
import os
import queue
import threading
import time
from pathlib import Path

import pytest
import torch

from kvxfer import doorbell, transfer
from kvxfer.channel import Channel
from kvxfer.errors import AbortReason, KvxferError, PeerDiedError, PeerTimeoutError, TransferAbortedError
from kvxfer.pool import BufferPool
from kvxfer.tickets import TICKET_BYTES
from kvxfer.transfer import Consumer, Producer
from tie.assets.manifest import TOKENIZER_FILE
from tie.assets.sample import make_sample_bundle
from tie.assets.tokenizer import load_tokenizer
from tie.proto import runtime_pb2 as pb
from tie.runtime.blocks import BlockPool
from tie.runtime.engine import Engine
from tie.runtime.grammar_compiler import GrammarCompiler
from tie.runtime.keeping import Keeping
from tie.runtime.kv_blocks import Format, Kept
from tie.runtime.kv_transfer import Limits, OverloadedError, Transfers
from tie.runtime.prefix_trie import PrefixTrie
from tie.runtime.request import Bounds, check
from tie.runtime.scheduler import Limits as SchedulerLimits
from tie.runtime.sequence import Sequence

VOCABULARY = 259
TOKENS = 4
BYTES = 64
BLOCKS = 24
WAIT_S = 20
FORMAT = Format("model", "release", "layout", TOKENS, BYTES)


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


class Memory:
    """Blocks of an executor, and an executor: each position's bytes say which token it was computed for, after which.

    The next token depends on every position before it, through the bytes: a wrong block gives another answer.
    """

    def __init__(self) -> None:
        self.data = bytearray(BLOCKS * BYTES)
        self.computed = 0

    def block_view(self, block: int) -> memoryview:
        return memoryview(self.data)[block * BYTES : (block + 1) * BYTES]

    def forward(self, batch):
        rows = []
        for source, target in getattr(batch, "copies", ()):
            self.block_view(target)[:] = self.block_view(source)
        for part in batch.slices:
            self.computed += len(part.tokens)
            width = BYTES // TOKENS
            for offset, token in enumerate(part.tokens):
                position = part.start + offset
                before = self._at(part.blocks, position - 1) if position else 0
                value = (before * 31 + token + 7) % (1 << 32)
                view = self.block_view(part.blocks[position // TOKENS])
                start = position % TOKENS * width
                view[start : start + width] = value.to_bytes(4, "little") * (width // 4)
                if offset >= len(part.tokens) - part.logits:
                    rows.append(value % 255)
        logits = torch.zeros(len(rows), VOCABULARY)
        for index, token in enumerate(rows):
            logits[index, token] = 10.0
        return logits

    def _at(self, blocks, position):
        start = position % TOKENS * (BYTES // TOKENS)
        return int.from_bytes(self.block_view(blocks[position // TOKENS])[start : start + 4], "little")


class Collect:
    def __init__(self) -> None:
        self.events: queue.SimpleQueue = queue.SimpleQueue()

    def emit(self, event, *, last):
        self.events.put((event, last))

    def all(self):
        seen = []
        while True:
            event, last = self.events.get(timeout=WAIT_S)
            seen.append(event)
            if last:
                return seen


@pytest.fixture
def memory():
    return Memory()


@pytest.fixture
def transfers(memory, request):
    before = open_descriptors()
    transfers = Transfers(
        FORMAT,
        memory,
        Limits(sequence_blocks=16, total_bytes=1 << 20, import_s=5, request_s=1, export_s=5),
        BufferPool(1 << 16, spare=0),
    )
    yield transfers
    wait_for(lambda: transfers.in_flight == 0)
    transfers.close()
    if "engine" not in request.fixturenames:  # that one has a helper process that comes up when it likes
        wait_for(lambda: open_descriptors() == before)


def wait_for(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@dataclasses.dataclass
class Promised:
    ticket: bytes
    channel: Channel
    buffer: int | None = None

    def close(self) -> None:
        self.channel.close()
        if self.buffer is not None:
            os.close(self.buffer)


def promised(grant) -> Promised:
    """As if the descriptors had come over a socket."""
    descriptors = [os.dup(descriptor) for descriptor in grant.descriptors]
    grant.close()
    return Promised(grant.ticket, Channel.adopt(descriptors[0]), *descriptors[1:])


def fill(promise: Promised, header, contents) -> None:
    with Producer(promise.channel, promise.buffer, header, passing=False, timeout=WAIT_S) as producer:
        for index, content in enumerate(contents):
            with producer.block(index) as view:
                view[:] = content
            producer.commit(index + 1)
        producer.finish(timeout=WAIT_S)


CONTENTS = [bytes([number]) * BYTES for number in (1, 2, 3)]


def test_an_import_is_copied_where_it_belongs(transfers, memory):
    promise = promised(transfers.prepare_import("app", 3))
    assert len(promise.ticket) == TICKET_BYTES
    restoring = transfers.restore(promise.ticket, 13)
    fill(promise, FORMAT.header(0, 3), CONTENTS)
    restored = restoring.result(WAIT_S)
    assert restored.block_count == 3
    target = Sequence(prompt=tuple(range(13)), max_length=20, blocks=[5, 9, 2, 7])
    assert not restored.copy_into(memory, target, lambda: False)
    assert target.computed == TOKENS
    target.blocks, target.computed = [8, 3, 2, 7], 0  # it has lost them and got others
    assert restored.copy_into(memory, target, lambda: True)
    assert [bytes(memory.block_view(block)) for block in (8, 3, 2)] == CONTENTS
    assert target.computed == 3 * TOKENS
    restored.close()
    restored.close()
    promise.close()


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"release": "other"},
        {"layout": "other"},
        {"block_tokens": 2, "token_count": 6},
        {"block_bytes": 63},
        {"block_count": 2, "token_count": 8},
        {"first_token": 88},  # no token would be left to compute
        {"token_count": 11},
    ],
)
def test_an_import_that_does_not_fit_this_runtime_is_refused(transfers, change):
    promise = promised(transfers.prepare_import("app", 3))
    restoring = transfers.restore(promise.ticket, 100)
    header = dataclasses.replace(FORMAT.header(0, 3), **change)
    # The runtime may have hung up, and a buffer of another size is refused on this side already.
    with contextlib.suppress(KvxferError):
        fill(promise, header, [bytes(header.block_bytes)] * header.block_count)
    promise.close()
    assert restoring.result(WAIT_S) is None


def test_the_last_token_of_a_prompt_is_never_restored(transfers):
    for tokens, fits in ((12, False), (13, True)):
        promise = promised(transfers.prepare_import("app", 3))
        restoring = transfers.restore(promise.ticket, tokens)
        try:
            fill(promise, FORMAT.header(0, 3), CONTENTS)
        except (TransferAbortedError, PeerDiedError):
            assert not fits
        restored = restoring.result(WAIT_S)
        assert (restored is not None) == fits
        if restored:
            restored.close()
        promise.close()


def test_a_client_that_dies_gives_up_or_says_nothing(transfers, memory):
    promise = promised(transfers.prepare_import("app", 3))
    restoring = transfers.restore(promise.ticket, 13)
    promise.close()
    assert restoring.result(WAIT_S) is None
    promise = promised(transfers.prepare_import("app", 3))
    restoring = transfers.restore(promise.ticket, 13)
    with Producer(promise.channel, promise.buffer, FORMAT.header(0, 3), passing=False, timeout=1) as producer:
        producer.commit(2)
        producer.abort(AbortReason.CORRUPT)
    assert restoring.result(WAIT_S) is None
    promise.close()
    hasty = Transfers(
        FORMAT, memory, dataclasses.replace(transfers._limits, import_s=0.05), BufferPool(1 << 16, spare=0)
    )
    promise = promised(hasty.prepare_import("app", 3))
    assert hasty.restore(promise.ticket, 13).result(WAIT_S) is None
    promise.close()
    hasty.close()


def test_tickets_are_single_use_and_end_with_their_connection(transfers):
    assert transfers.restore(b"x" * TICKET_BYTES, 13).result(WAIT_S) is None
    assert transfers.keeper(b"x" * TICKET_BYTES) is None
    promise, export = promised(transfers.prepare_import("app", 3)), promised(transfers.prepare_export("app"))
    assert transfers.keeper(promise.ticket) is None
    assert transfers.restore(export.ticket, 13).result(WAIT_S) is None
    for prepare in (lambda: transfers.prepare_import("app", 1), lambda: transfers.prepare_export("app")):
        with pytest.raises(OverloadedError):
            prepare()
    transfers.end("app")
    assert transfers.restore(promise.ticket, 13).result(WAIT_S) is None
    assert transfers.keeper(export.ticket) is None
    for each in (promise, export):
        with pytest.raises(PeerDiedError):
            each.channel.receive(timeout=WAIT_S)
        each.close()


def test_more_than_there_is_room_for_is_refused(transfers):
    for count in (0, 17, 1 << 30):
        with pytest.raises(OverloadedError):
            transfers.prepare_import("app", count)
    fit = (1 << 20) // (4096 * 17)
    promises = [promised(transfers.prepare_import(number, 16)) for number in range(fit)]
    with pytest.raises(OverloadedError):
        transfers.prepare_import("one more", 16)
    for number, promise in enumerate(promises):
        transfers.end(number)
        promise.close()


def exporting(transfers, blocks):
    promise = promised(transfers.prepare_export("app"))
    released = threading.Event()
    transfers.keeper(promise.ticket)(Kept(tuple(blocks), released.set))
    return promise, released


def test_an_export_begins_where_the_app_asks(transfers, memory):
    memory.data[:] = bytes(number % 251 for number in range(len(memory.data)))
    promise, released = exporting(transfers, [4, 8, 1, 6])
    transfer.request(promise.channel, 1, timeout=WAIT_S)
    with Consumer(promise.channel, max_bytes=1 << 20, timeout=WAIT_S) as consumer:
        assert consumer.header == FORMAT.header(1, 3)
        consumer.wait(3, timeout=WAIT_S)
        consumer.finish(timeout=WAIT_S)
        for index, block in enumerate((8, 1, 6)):
            with consumer.block(index) as view:
                assert view == memory.block_view(block)
    assert released.wait(WAIT_S)
    promise.close()


def test_blocks_are_let_go_of_when_nobody_asks_or_wants_them(transfers):
    began = time.monotonic()
    promise, released = exporting(transfers, [1, 2])
    assert released.wait(WAIT_S)
    assert time.monotonic() - began < WAIT_S / 2
    promise.close()
    promise, released = exporting(transfers, [1, 2])
    promise.close()
    assert released.wait(WAIT_S)
    promise, released = exporting(transfers, [1, 2])
    transfer.request(promise.channel, 2, timeout=WAIT_S)
    with pytest.raises(TransferAbortedError):
        Consumer(promise.channel, max_bytes=1 << 20, timeout=WAIT_S)
    assert released.wait(WAIT_S)
    promise.close()
    promise = promised(transfers.prepare_export("app"))
    transfers.keeper(promise.ticket)(None)
    with pytest.raises(TransferAbortedError):
        doorbell.receive(promise.channel, time.monotonic() + WAIT_S)
    promise.close()


def test_no_more_than_half_of_the_pool_is_ever_kept():
    pool = BlockPool(8, TOKENS)
    notes = []
    keeping = Keeping(pool, notes.append)

    def sequence(count):
        return Sequence(tuple(range(count * TOKENS)), 100, computed=count * TOKENS, blocks=pool.allocate(count))

    first, second = sequence(3), sequence(3)
    kept = keeping.hold(first)
    pool.release(first.blocks)
    assert keeping.hold(second) is None
    pool.release(second.blocks)
    assert pool.free == 5
    kept.release()
    assert pool.free == 5, "released by the step thread, not by the one that asks"
    notes.pop()()
    assert pool.free == 8
    again = sequence(3)
    assert keeping.hold(again) is not None


def test_only_computed_whole_blocks_are_kept():
    pool = BlockPool(8, TOKENS)
    sequence = Sequence((1, 2, 3, 4, 5), 100, output=[6, 7, 8], computed=7, blocks=pool.allocate(2))
    assert Keeping(pool, lambda note: note()).hold(sequence).blocks == tuple(sequence.blocks[:1])


# --- through an engine ---


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
    sink = Collect()
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


def test_a_restored_prompt_gives_the_same_answer_with_less_work(engine, transfers, memory):
    prompt = list(range(40, 61))
    promise = promised(transfers.prepare_export("app"))
    expected, end = ask(engine, prompt, keep=transfers.keeper(promise.ticket))
    assert end.cached_tokens == 0
    contents = export(transfers, promise)
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
    promise = promised(transfers.prepare_export("app"))
    plain, _ = ask(engine, prompt, keep=transfers.keeper(promise.ticket))
    contents = export(transfers, promise)[:5]
    _with_prefix(engine, memory, prompt[:8], contents)
    promise = promised(transfers.prepare_import("app", 5 - first))
    restoring = transfers.restore(promise.ticket, len(prompt))
    # What lies where the prefix is must not be taken from an import.
    spoilt = [bytes(BYTES) if number < 2 else block for number, block in enumerate(contents)]
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
    promise = promised(transfers.prepare_export("app"))
    plain, _ = ask(engine, prompt, keep=transfers.keeper(promise.ticket))
    contents = export(transfers, promise)[:5]
    if registered:
        _with_prefix(engine, memory, registered, contents)
    promise = promised(transfers.prepare_import("app", 3))
    restoring = transfers.restore(promise.ticket, len(prompt))
    fill(promise, FORMAT.header(2, 3), contents[2:])
    promise.close()
    memory.data[:] = bytes(len(memory.data))
    tokens, end = ask(engine, prompt, restoring=restoring)
    assert (tokens, end.cached_tokens) == (plain, 4 if registered == prompt[:4] else 0)


def test_copying_what_was_restored_holds_an_answer_up_for_a_moment_only(engine, transfers, memory):
    """Beside an answer that streams, a step copies one block where that takes long, and no more."""
    prompt = list(range(40, 61))
    promise = promised(transfers.prepare_export("app"))
    expected, _ = ask(engine, prompt, keep=transfers.keeper(promise.ticket))
    contents = export(transfers, promise)[:5]
    wait_for(lambda: engine._pool.statistics().used == 0)
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
    streaming, restored = Collect(), Collect()
    engine.submit(check(pb.GenerateRequest(token_ids=[1, 2, 3], max_tokens=40), engine.bounds), streaming)
    promise = promised(transfers.prepare_import("app", 5))
    restoring = transfers.restore(promise.ticket, len(prompt))
    fill(promise, FORMAT.header(0, 5), contents)
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
    promise = promised(transfers.prepare_export("app"))
    expected, _ = ask(engine, prompt, keep=transfers.keeper(promise.ticket))
    contents = export(transfers, promise)[:5]
    wait_for(lambda: engine._pool.statistics().used == 0)
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
    streaming, first, second = Collect(), Collect(), Collect()
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
    promise = promised(transfers.prepare_export("app"))
    expected, _ = ask(engine, prompt, keep=transfers.keeper(promise.ticket))
    contents = export(transfers, promise)[:5]
    promise = promised(transfers.prepare_import("app", 5))
    restoring = transfers.restore(promise.ticket, len(prompt))
    fill(promise, FORMAT.header(0, 5), contents)
    promise.close()
    message = pb.GenerateRequest(token_ids=prompt, max_tokens=6, n=3)
    sink = Collect()
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
    sink = Collect()
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
    sink = Collect()
    waiting = check(pb.GenerateRequest(token_ids=list(range(40, 61)), max_tokens=6), engine.bounds)
    engine.submit(waiting, sink, restoring=transfers.restore(promise.ticket, 21))
    tokens, _ = ask(engine, [1, 2, 3])
    assert len(tokens) == 6
    with pytest.raises(queue.Empty):
        sink.events.get(timeout=0.05)
    promise.close()
    assert sink.all()[-1].finished.reason == pb.REASON_LENGTH


def test_the_client_hears_nothing_of_a_buffer_that_is_not_announced(transfers):
    promise = promised(transfers.prepare_import("app", 3))
    with pytest.raises(PeerTimeoutError):
        promise.channel.receive(timeout=0.01)
    transfers.end("app")
    promise.close()
