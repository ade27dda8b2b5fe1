"""Jobhelpers connected ahead of time, each to a ready app: what a request does not have to wait for."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from tie.cloudboard.registry import Registry
from tie.daemon import ahead, frames, log
from tie.daemon.errors import PeerError
from tie.envelope.stream import Direction
from tie.proto import envelope_pb2

READY_S: Final = 65.0  # a little more than the jobhelper gives its app
WRITE_S: Final = 30.0
_BREATH_S: Final = 1.0  # from a request's start until the pool is filled up: they often come in bursts
_BACKOFF_S: Final = (0.2, 5.0)  # first and longest pause after a jobhelper that did not become ready


class NoJobhelperError(PeerError):
    """No jobhelper with a ready app is to be had now."""


class Jobhelper:
    """The connection to one jobhelper process."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._watch: asyncio.Task[bytes] | None = None

    @classmethod
    async def connect(cls, path: Path, *, standby: bool) -> "Jobhelper":
        """Starts one by connecting, and waits until it is ready.

        Args:
            path: of the jobhelpers' socket.
            standby: nobody waits for it yet, so that it may stand back while it starts.

        Raises:
            NoJobhelperError: it ended, said otherwise, or took too long.
        """
        try:
            async with asyncio.timeout(READY_S):
                jobhelper = cls(*await ahead.connect(path, ahead=standby))
        except (OSError, TimeoutError) as error:
            raise NoJobhelperError("cannot connect to a jobhelper") from error
        try:
            message = await jobhelper.receive(READY_S)
        except PeerError as error:
            jobhelper.close()
            raise NoJobhelperError("the jobhelper did not become ready") from error
        except asyncio.CancelledError:
            jobhelper.close()
            raise
        if message is None or message.WhichOneof("kind") != "ready":
            jobhelper.close()
            raise NoJobhelperError("the jobhelper did not become ready")
        return jobhelper

    async def send(self, message: envelope_pb2.JobIn) -> None:
        """Sends one message. Raises as `frames.write_message`."""
        await frames.write_message(self._writer, message, timeout=WRITE_S)

    async def send_frames(self, data: bytes) -> None:
        """Sends a piece of messages that are frames already. Raises as `send`."""
        await frames.write_frames(self._writer, data, timeout=WRITE_S)

    async def receive(self, timeout: float) -> envelope_pb2.JobOut | None:
        """The next message, or None at the end. Raises as `frames.read_message`."""
        return await frames.read_message(
            self._reader, envelope_pb2.JobOut, limit=Direction.RESPONSE.max_frame_bytes, timeout=timeout
        )

    def close(self) -> None:
        """Closes the connection; the jobhelper stops its app."""
        if self._watch is not None:
            self._watch.cancel()
        self._writer.transport.abort()  # what it has not read yet, it need not read any more

    def watch(self, gone: asyncio.Event) -> None:
        """While it stands by: sets `gone` as soon as it has ended."""
        # It has nothing to say before it is asked, so a byte is as bad as the end.
        self._watch = asyncio.create_task(self._reader.read(1))
        self._watch.add_done_callback(lambda _: gone.set())

    def lost(self) -> bool:
        """Whether `watch` saw it end."""
        return self._watch is not None and self._watch.done()

    async def unwatch(self) -> bool:
        """Ends the watch. Whether it is still there."""
        if self._watch is None or self.lost():
            return False
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)
        return self._watch.cancelled()


class StandbyPool:
    """Keeps `size` jobhelpers ready while the node is available, and none while it is not."""

    def __init__(self, path: Path, size: int, registry: Registry) -> None:
        self._path = path
        self._size = size
        self._registry = registry
        self._idle: deque[Jobhelper] = deque()
        # One event for each of the two loops: either may be waiting for something else when it is set.
        self._dirty = registry.listen()
        self._room = registry.listen()

    def __len__(self) -> int:
        return len(self._idle)

    async def take(self) -> Jobhelper:
        """A ready jobhelper: one that stood by, else a new one.

        Raises:
            NoJobhelperError: there is none.
        """
        while self._idle:
            jobhelper = self._idle.popleft()
            self._room.set()
            there = False
            try:
                there = await jobhelper.unwatch()
            finally:
                if not there:
                    jobhelper.close()
            if there:
                return jobhelper
        return await self.new()

    async def new(self) -> Jobhelper:
        """A new jobhelper for a user who waits. Raises as `take`."""
        return await Jobhelper.connect(self._path, standby=False)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Fills the pool for the length of the block."""
        tasks = [asyncio.create_task(self._fill()), asyncio.create_task(self._discard())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._registry.unlisten(self._dirty)
            self._registry.unlisten(self._room)
            self._dismiss(list(self._idle))

    async def _fill(self) -> None:
        pause = _BACKOFF_S[0]
        while True:
            self._room.clear()
            full = len(self._idle) >= self._size
            if full or not self._registry.takes_requests():
                await self._room.wait()
                if full:
                    # Filling up is no hurry: the requests that begin now need the cores more. One at a time, therefore.
                    await asyncio.sleep(_BREATH_S)
                continue
            try:
                jobhelper = await Jobhelper.connect(self._path, standby=True)
            except NoJobhelperError as error:
                log.failure("standby.failed", error)
                await asyncio.sleep(pause)
                pause = min(pause * 2, _BACKOFF_S[1])
                continue
            pause = _BACKOFF_S[0]
            if self._registry.takes_requests():
                jobhelper.watch(self._dirty)
                self._idle.append(jobhelper)
            else:
                jobhelper.close()

    async def _discard(self) -> None:
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            leaving = [jobhelper for jobhelper in self._idle if jobhelper.lost() or not self._registry.takes_requests()]
            if leaving:
                self._dismiss(leaving)
                self._room.set()

    def _dismiss(self, leaving: list[Jobhelper]) -> None:
        for jobhelper in leaving:
            self._idle.remove(jobhelper)
            jobhelper.close()
