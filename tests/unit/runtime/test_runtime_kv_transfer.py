"""Imports and exports of KV blocks: what is believed, what is refused, what is let go of."""

import contextlib
import dataclasses
import threading
import time

import pytest

from kv_memory import CONTENTS, FORMAT, TOKENS, WAIT_S, fill, promised
from kvxfer import doorbell, transfer
from kvxfer.errors import AbortReason, KvxferError, PeerDiedError, PeerTimeoutError, TransferAbortedError
from kvxfer.pool import BufferPool
from kvxfer.tickets import TICKET_BYTES
from kvxfer.transfer import Consumer, Producer
from tie.runtime.kv_blocks import Kept
from tie.runtime.kv_transfer import OverloadedError, Transfers
from tie.runtime.sequence import Sequence


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
    # Its buffer stays until the app, which seals more slowly than blocks are copied, has left.
    assert transfers.in_flight == FORMAT.header(1, 3).buffer_bytes
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


def test_the_client_hears_nothing_of_a_buffer_that_is_not_announced(transfers):
    promise = promised(transfers.prepare_import("app", 3))
    with pytest.raises(PeerTimeoutError):
        promise.channel.receive(timeout=0.01)
    transfers.end("app")
    promise.close()
