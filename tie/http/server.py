"""The HTTP server: accepts connections within limits, sweeps out the late ones, stops in order."""

import asyncio
import contextlib
import resource
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final

from tie.daemon import log
from tie.http.connection import Connection
from tie.http.exchange import Exchange
from tie.http.limits import Limits
from tie.http.reply import Replies, Reply
from tie.http.rooms import Room, Rooms

Handler = Callable[[Exchange], Awaitable[None]]

_BACKLOG: Final = 1024
_SWEEP_S: Final = 0.25
_FAREWELL_S: Final = 0.5
_SPARE_DESCRIPTORS: Final = 128  # for whatever the process has open beside connections


class Server:
    """Serves exchanges with `handler`; what is no HTTP gets one of `replies`.

    Attributes:
        limits: what is allowed.
        draining: whether the server stops.
        refused: connections that there was no room for.
        displaced: connections that made room for others.
    """

    def __init__(self, handler: Handler, limits: Limits, replies: Replies) -> None:
        self.limits = limits
        self.draining = False
        self.refused = self.displaced = 0
        self._handler = handler
        self._replies = replies
        self._streams = 0
        self._connections: set[Connection] = set()
        self._peers: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._rooms: Rooms[Connection] = Rooms(
            {Room.IDLE: limits.idle_s, Room.HEAD: limits.head_s, Room.LINGER: limits.linger_s}
        )
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._connections)

    async def serve(self, listening: socket.socket, stopping: asyncio.Event) -> None:
        """Accepts on `listening` until `stopping` is set, then lets the requests under way finish for a while."""
        loop = asyncio.get_running_loop()
        accepting = await loop.create_server(lambda: Connection(self), sock=listening, backlog=_BACKLOG)
        sweeping = asyncio.create_task(self._sweep())
        try:
            await stopping.wait()
        finally:
            accepting.close()
            sweeping.cancel()
            await self._drain()
            with contextlib.suppress(asyncio.CancelledError):
                await sweeping

    def opened(self, connection: Connection) -> bool:
        """A connection has come; False when there is no room for it."""
        over = 0 < self.limits.connections_per_peer <= self._peers[connection.peer]
        if len(self._connections) >= self.limits.connections and not over:
            other = self._rooms.first()
            if other is not None:
                self.displaced += 1
                other.abort()
                self.closed(other)
            over = other is None
        if over or self.draining:
            self.refused += 1
            return False
        self._connections.add(connection)
        self._peers[connection.peer] += 1
        self.settle(connection, Room.IDLE)
        return True

    def closed(self, connection: Connection) -> None:
        """A connection is over, or as good as."""
        if connection not in self._connections:
            return
        self._connections.remove(connection)
        self.settle(connection, None)
        self._peers[connection.peer] -= 1
        if not self._peers[connection.peer]:
            del self._peers[connection.peer]
        self._changed.set()

    def settle(self, connection: Connection, room: Room | None) -> None:
        """A connection waits from now on, or it does not."""
        if room is None or connection in self._connections:
            self._rooms.put(connection, room, asyncio.get_running_loop().time())

    def reply(self, code: str) -> Reply:
        """What is answered to what never became a request."""
        return self._replies(code)

    def count_streams(self, change: int) -> bool:
        """Counts HTTP/2 streams that begin or end; False, and nothing counted, when there are too many."""
        if change > 0 and self._streams + change > self.limits.all_streams:
            return False
        self._streams += change
        return True

    def serve_exchange(self, exchange: Exchange, done: Callable[[], None]) -> "asyncio.Task[None]":
        """Serves one request in a task, and calls `done` after it."""
        task = asyncio.create_task(self._run(exchange))
        self._tasks.add(task)

        def over(task: "asyncio.Task[None]") -> None:
            self._tasks.discard(task)
            self._changed.set()
            exchange.close()
            done()

        task.add_done_callback(over)
        return task

    async def _run(self, exchange: Exchange) -> None:
        try:
            await self._handler(exchange)
        except Exception as error:  # noqa: BLE001 (one exchange must not end the others' server)
            log.failure("http.exchange-failed", error)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            for connection in self._rooms.late(asyncio.get_running_loop().time()):
                try:
                    connection.late()
                except Exception as error:  # noqa: BLE001 (without the sweep nothing here would ever end)
                    log.failure("http.sweep-failed", error)
                    connection.abort()

    async def _drain(self) -> None:
        self.draining = True
        for connection in list(self._connections):
            connection.drain()
        await self._until(lambda: not self._tasks, self.limits.drain_s)
        for task in list(self._tasks):
            task.cancel()
        # What was said last is on its way, and clients close when they have read it.
        await self._until(lambda: not self._connections, _FAREWELL_S)
        for connection in list(self._connections):
            connection.abort()
        await self._until(lambda: not self._connections and not self._tasks, self.limits.drain_s)

    async def _until(self, condition: Callable[[], bool], deadline: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()


def affordable(connections: int, others: int) -> int:
    """How many connections this process can have open at once, beside `others` descriptors.

    Raises the process's own limit on descriptors as far as that is needed and allowed.
    """
    needed = connections + others + _SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < needed:
        wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(OSError, ValueError):  # a sandbox may not allow it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return max(1, min(connections, soft - others - _SPARE_DESCRIPTORS))
