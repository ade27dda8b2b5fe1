"""The transfers of this runtime: tickets, buffers, threads, and what is let go of when something ends.

An import is received whole, on a thread of its own, before its sequence is queued; the step thread then copies blocks
that are mapped and checked. An export holds references to a finished sequence's blocks and copies them, on a thread of
its own, when the app asks. Whatever goes wrong costs the request its reuse and nothing else: nobody's answer waits for
a transfer longer than its deadline.
"""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from kvxfer import doorbell, transfer
from kvxfer.channel import Channel
from kvxfer.errors import AbortReason, KvxferError
from kvxfer.header import buffer_bytes
from kvxfer.pool import BufferPool
from kvxfer.tickets import Tickets
from tie.daemon import log
from tie.runtime.kv_blocks import BlockMemory, Format, Kept, Restored, receive, send

_WORKERS: Final = 32


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the transfers.

    Attributes:
        sequence_blocks: the longest sequence.
        total_bytes: of all buffers at once.
        import_s: seconds for an import, from the arrival of its request.
        request_s: seconds in which an app may ask for an export, from the end of its answer.
        export_s: seconds for an export, once it was asked for.
    """

    sequence_blocks: int
    total_bytes: int
    import_s: float
    request_s: float
    export_s: float


@dataclass(eq=False, slots=True)
class _Promise:
    """What a ticket stands for: this end of a transfer's channel and, for an import, the buffer."""

    channel: Channel
    descriptor: int | None = None
    size: int = 0

    def close(self) -> None:
        self.channel.close()
        if self.descriptor is not None:
            os.close(self.descriptor)


@dataclass(frozen=True, slots=True)
class Grant:
    """A ticket, and the descriptors that its owner gets; the granter closes them once they are sent."""

    ticket: bytes
    descriptors: tuple[int, ...]
    close: Callable[[], None]


class OverloadedError(Exception):
    """Too much is under way, or asked for."""


class Transfers:
    """All transfers of this runtime. For any thread.

    Args:
        format: of its blocks.
        memory: of its blocks.
        limits: the bounds.
        pool: of buffers.
    """

    def __init__(self, format: Format, memory: BlockMemory, limits: Limits, pool: BufferPool) -> None:  # noqa: A002
        self._format = format
        self._memory = memory
        self._limits = limits
        self._pool = pool
        self._imports: Tickets[_Promise] = Tickets()
        self._exports: Tickets[_Promise] = Tickets()
        self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="kv-transfer")
        self._lock = threading.Lock()
        self._bytes = 0

    @property
    def in_flight(self) -> int:
        """Bytes of all buffers now."""
        return self._bytes

    def prepare_import(self, connection: object, block_count: int) -> Grant:
        """A buffer for `block_count` blocks, and the channel to announce them on.

        Raises:
            OverloadedError: more than a sequence can have, or no room.
        """
        size = buffer_bytes(self._format.block_bytes, block_count)
        if not 0 < block_count <= self._limits.sequence_blocks or self._imports.count(connection):
            raise OverloadedError
        self._reserve(size)
        try:
            descriptor = self._pool.take(size)
        except OSError:
            self._unreserve(size)
            raise OverloadedError from None
        return self._grant(self._imports, connection, descriptor, size)

    def prepare_export(self, connection: object) -> Grant:
        """The channel on which blocks may be asked for.

        Raises:
            OverloadedError: this connection has one already.
        """
        if self._exports.count(connection):
            raise OverloadedError
        return self._grant(self._exports, connection, None, 0)

    def end(self, connection: object) -> None:
        """Ends the tickets of a connection that are not claimed."""
        for promise in (*self._imports.end(connection), *self._exports.end(connection)):
            self._let_go(promise)

    def restore(self, ticket: bytes, prompt_tokens: int) -> "Future[Restored | None]":
        """Receives the blocks of an import ticket. None: without them, for whatever reason.

        Args:
            ticket: from the request.
            prompt_tokens: the prompt's length; at least the last token of it is always computed.
        """
        promise = self._imports.claim(ticket)
        deadline = time.monotonic() + self._limits.import_s
        if promise is None or promise.descriptor is None:
            log.event("kv.import-refused", reason="no-such-ticket")
            nothing: Future[Restored | None] = Future()
            nothing.set_result(None)
            return nothing
        return self._workers.submit(self._receive, promise, promise.descriptor, prompt_tokens, deadline)

    def keeper(self, ticket: bytes) -> Callable[[Kept | None], None] | None:
        """Claims an export ticket; None when there is no such one.

        Whoever gets the keeper calls it once: with the blocks, or with None where there are none.
        """
        promise = self._exports.claim(ticket)
        if promise is None:
            log.event("kv.export-refused", reason="no-such-ticket")
            return None

        def keep(kept: Kept | None) -> None:
            if kept is None:
                doorbell.abort(promise.channel, AbortReason.CANCELLED)
                self._let_go(promise)
            else:
                self._workers.submit(self._send, promise, kept)

        return keep

    def close(self) -> None:
        """Ends the threads once what is under way has ended; each has its deadline."""
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._pool.close()

    # --- on a thread of the transfer's own ---

    def _receive(self, promise: _Promise, descriptor: int, prompt_tokens: int, deadline: float) -> Restored | None:
        consumer = None
        try:
            consumer = receive(
                promise.channel,
                descriptor,
                promise.size,
                self._format,
                prompt_tokens=prompt_tokens,
                deadline=deadline,
            )
        except KvxferError as error:
            log.failure("kv.import-failed", error)
        if consumer is None:
            self._let_go(promise)
            return None
        return Restored(consumer, lambda: self._let_go(promise))

    def _send(self, promise: _Promise, kept: Kept) -> None:
        try:
            if self._sent(promise, kept):
                # The app is still sealing what it got: the next buffer is not made until it has let go of this one.
                with suppress(KvxferError):
                    doorbell.receive(promise.channel, time.monotonic() + self._limits.export_s)
        finally:
            self._let_go(promise)

    def _sent(self, promise: _Promise, kept: Kept) -> bool:
        try:
            first = transfer.await_request(promise.channel, timeout=self._limits.request_s)
            if first >= len(kept.blocks):
                doorbell.abort(promise.channel, AbortReason.CANCELLED)  # nothing that the app has not
                return False
            header = self._format.header(first, len(kept.blocks) - first)
            self._reserve(header.buffer_bytes)
            promise.size = header.buffer_bytes
            promise.descriptor = self._pool.take(promise.size)
            send(
                promise.channel,
                promise.descriptor,
                header,
                self._memory,
                kept.blocks[first:],
                timeout=self._limits.export_s,
            )
        except (KvxferError, OverloadedError, OSError) as error:
            log.failure("kv.export-failed", error)
            return False
        finally:
            kept.release()
        return True

    # --- accounting ---

    def _grant(self, tickets: Tickets[_Promise], connection: object, descriptor: int | None, size: int) -> Grant:
        ours, theirs = Channel.pair()
        ticket = tickets.issue(connection, _Promise(ours, descriptor, size))
        descriptors = (theirs.fileno(),) if descriptor is None else (theirs.fileno(), descriptor)
        return Grant(ticket, descriptors, theirs.close)

    def _reserve(self, size: int) -> None:
        with self._lock:
            if self._bytes + size > self._limits.total_bytes:
                raise OverloadedError
            self._bytes += size

    def _unreserve(self, size: int) -> None:
        with self._lock:
            self._bytes -= size
            idle = self._bytes == 0
        if idle:
            self._pool.refill()

    def _let_go(self, promise: _Promise) -> None:
        promise.close()
        self._unreserve(promise.size)
