"""store.sock: requests of many clients, one reply each (store.proto).

What a client sends, however wrong, costs it its connection and nobody else more than a turn of the event loop. What a
client was writing when its connection ends is gone with it.
"""

import array
import asyncio
import contextlib
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvxfer import channel
from kvxfer.errors import SealError
from kvxfer.pool import BufferPool
from tie.daemon import frames, log, socket_path
from tie.daemon.errors import ProtocolError
from tie.proto import store_pb2
from tie.store import memory
from tie.store.entries import Entries, Entry, EntryTooLargeError, StoreFullError

INDEX_BYTES: Final = 32
MAX_REQUEST: Final = 1024
_SWEEP_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What one client may do.

    Attributes:
        connections: how many there may be.
        written_bytes: bytes that one may write in its life.
        written_entries: entries that one may write in its life.
        write_s: seconds from `new` to `put`.
    """

    connections: int
    written_bytes: int
    written_entries: int
    write_s: float


@dataclass(slots=True)
class _Pending:
    """An entry that a client is writing."""

    descriptor: int
    size: int
    cost: int
    transient: bool


class _Client:
    """One connection: its requests, one after another."""

    def __init__(
        self,
        connection: socket.socket,
        entries: Entries,
        limits: ConnectionLimits,
        reaper: memory.Reaper,
        spares: BufferPool,
    ) -> None:
        self._connection = connection
        self._entries = entries
        self._limits = limits
        self._reaper = reaper
        self._spares = spares
        self._pending: _Pending | None = None
        self._transient: dict[bytes, Entry] = {}
        self._bytes = 0
        self._count = 0

    async def converse(self, outcomes: "Counter[tuple[str, str]]") -> None:
        """Serves the client until it leaves or breaks the protocol."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                async with asyncio.timeout(self._limits.write_s if self._pending else None):
                    # Plain recv: the kernel closes descriptors that a client sends along.
                    data = await loop.sock_recv(self._connection, MAX_REQUEST + 1)
                if not data:
                    return
                kind, outcome, answer = await self._answer(data)
                outcomes[kind, store_pb2.Outcome.Name(outcome).removeprefix("OUTCOME_").lower()] += 1
                self._reply(outcome, answer)
                if kind == "put":
                    self._refill()  # not sooner: its thread is not to hold up the reply
                if outcome == store_pb2.OUTCOME_INVALID:
                    return
                await asyncio.sleep(0)  # sock_recv does not yield while there is data: a flood must not keep the loop
        finally:
            self.end()

    def end(self) -> None:
        """Lets go of what ends with the connection: what it was writing, and what it filed for its own time only."""
        self._forget_pending()
        for index, entry in self._transient.items():
            self._entries.end(index, entry)
        self._transient = {}

    async def _answer(self, data: bytes) -> tuple[str, "store_pb2.Outcome.ValueType", Entry | _Pending | None]:
        try:
            request = frames.parse(data, store_pb2.StoreRequest) if len(data) <= MAX_REQUEST else None
        except ProtocolError:
            request = None
        kind = (request.WhichOneof("kind") if request else None) or "none"
        if request is None or kind == "none":
            return "none", store_pb2.OUTCOME_INVALID, None
        if kind == "new":
            return kind, *await self._new(request.new)
        asked = getattr(request, kind)
        if len(asked.index) != INDEX_BYTES:
            return kind, store_pb2.OUTCOME_INVALID, None
        match kind:
            case "put":
                return kind, self._put(asked), None
            case "get":
                entry = self._entries.get(asked.index)
                return kind, _found(entry), entry
            case "drop":
                return kind, _found(self._entries.drop(asked.index)), None
            case _:
                return kind, _found(self._entries.renew(asked.index, asked.ttl_ms / 1000)), None

    async def _new(self, new: store_pb2.New) -> tuple["store_pb2.Outcome.ValueType", _Pending | None]:
        self._forget_pending()
        size = new.size
        if self._count >= self._limits.written_entries or self._bytes + size > self._limits.written_bytes:
            return store_pb2.OUTCOME_FULL, None
        try:
            cost = self._entries.reserve(size, evicting=not new.transient)
        except EntryTooLargeError:
            return store_pb2.OUTCOME_TOO_LARGE, None
        except StoreFullError:
            return store_pb2.OUTCOME_FULL, None
        self._count += 1
        self._bytes += size
        try:
            descriptor = await memory.make(size, self._spares)
        except OSError as error:
            # No memory, or no descriptor: the client does without, and the others keep what they have.
            self._entries.release(cost)
            log.failure("store.no-memory", error)
            return store_pb2.OUTCOME_FULL, None
        except asyncio.CancelledError:
            self._entries.release(cost)
            raise
        self._pending = _Pending(descriptor, size, cost, new.transient)
        return store_pb2.OUTCOME_DONE, self._pending

    def _put(self, put: store_pb2.Put) -> "store_pb2.Outcome.ValueType":
        pending = self._pending
        if pending is None:
            return store_pb2.OUTCOME_INVALID
        try:
            sealed = memory.seal(pending.descriptor)
        except SealError:
            return store_pb2.OUTCOME_BUSY
        except OSError as error:
            self._forget_pending()
            log.failure("store.no-memory", error)
            return store_pb2.OUTCOME_FULL
        self._pending = None
        entry = Entry(sealed, pending.size, pending.cost, self._entries.expiry(put.ttl_ms / 1000))
        self._entries.file(put.index, entry)
        if pending.transient:
            self._transient[put.index] = entry
        return store_pb2.OUTCOME_DONE

    def _reply(self, outcome: "store_pb2.Outcome.ValueType", answer: Entry | _Pending | None) -> None:
        """Sends without waiting: a client that leaves its queue full is dropped (BlockingIOError ends it)."""
        reply = store_pb2.StoreReply(outcome=outcome, size=answer.size if answer else 0)
        descriptors = array.array("i", [answer.descriptor] if answer else [])
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)] if answer else []
        self._connection.sendmsg([reply.SerializeToString()], rights, socket.MSG_NOSIGNAL)

    def _forget_pending(self) -> None:
        if self._pending:
            self._entries.release(self._pending.cost)
            self._reaper.close(self._pending.descriptor, self._pending.size)
            self._pending = None
            self._refill()

    def _refill(self) -> None:
        if not self._entries.reserved:
            self._spares.refill()  # nobody is writing: nobody is held up by it


class StoreServer:
    """Serves store.sock.

    Attributes:
        outcomes: (request, outcome) → how often.

    Args:
        entries: the table.
        limits: of each client.
        reaper: closes what a client does not finish.
        spares: memory for large entries, made ahead of need.
    """

    def __init__(self, entries: Entries, limits: ConnectionLimits, reaper: memory.Reaper, spares: BufferPool) -> None:
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self._entries = entries
        self._limits = limits
        self._reaper = reaper
        self._spares = spares
        self._clients: set[asyncio.Task[None]] = set()

    @property
    def connections(self) -> int:
        """Clients connected now."""
        return len(self._clients)

    @asynccontextmanager
    async def serve(self, path: Path) -> AsyncIterator[None]:
        """Listens on `path` for the length of the block.

        Raises:
            SocketInUseError: a live server holds the path.
        """
        lock = socket_path.claim(path)
        try:
            with _listening(path) as listener:
                tasks = [asyncio.create_task(self._accept(listener)), asyncio.create_task(self._sweep())]
                try:
                    yield
                finally:
                    await _cancel([*tasks, *self._clients])
        finally:
            self._entries.clear()
            os.close(lock)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                # Out of descriptors, or a client that left before it was accepted.
                log.failure("store.accept-failed", error)
                await asyncio.sleep(0.1)
                continue
            if len(self._clients) >= self._limits.connections:
                log.event("store.refused", reason="too-many-connections", count=len(self._clients))
                connection.close()
                continue
            connection.setblocking(False)
            task = asyncio.create_task(self._converse(connection))
            self._clients.add(task)
            task.add_done_callback(self._clients.discard)
            await asyncio.sleep(0)  # nor does sock_accept yield while somebody waits

    async def _converse(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, TimeoutError):
            await _Client(connection, self._entries, self._limits, self._reaper, self._spares).converse(self.outcomes)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self._entries.expire()


async def _cancel(tasks: Iterable["asyncio.Task[None]"]) -> None:
    waiting = list(tasks)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


def _found(what: object) -> "store_pb2.Outcome.ValueType":
    return store_pb2.OUTCOME_DONE if what else store_pb2.OUTCOME_MISS


@contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    with channel.listen(path) as listener:
        listener.setblocking(False)
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)
