"""Long-lived watchers of the probe, gpuhealthd and the model owner.

Each keeps a connection up, reconnects after any failure, and holds the last good message with its monotonic age. A
peer counts as connected from its first good message until the stream breaks, a heartbeat stays away, or it says
something impossible.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from controllerd.signals import Watching
from tie.daemon import log, rpc
from tie.daemon.errors import PeerDiedError, PeerError, PeerTimeoutError, ProtocolError
from tie.proto import (
    gpuhealth_pb2,
    gpuhealth_pb2_grpc,
    metrics_pb2,
    metrics_pb2_grpc,
    owner_pb2,
    owner_pb2_grpc,
    probe_pb2,
    probe_pb2_grpc,
)

M = TypeVar("M")
F = TypeVar("F")

_MISSED_HEARTBEATS = 3
_PAUSE_S = 0.2


@asynccontextmanager
async def translated() -> AsyncIterator[None]:
    """Turns gRPC's errors into the suite's.

    Raises:
        PeerTimeoutError: a deadline passed.
        PeerDiedError: any other failure of the call.
    """
    try:
        yield
    except TimeoutError:
        raise PeerTimeoutError("the peer stayed silent") from None
    except asyncio.InvalidStateError:  # gRPC's answer to a write on a call that has just ended
        raise PeerDiedError("the call has ended") from None
    except grpc.aio.AioRpcError as error:
        # The text of a status comes from the other process: only its code is kept.
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise PeerTimeoutError("the peer did not answer in time") from None
        raise PeerDiedError(f"call failed: {error.code().name}") from None


def manner(error: PeerError) -> str:
    """How a peer was lost: it hangs, talks nonsense, or its connection broke."""
    match error:
        case PeerTimeoutError():
            return "silent"
        case ProtocolError():
            return "garbled"
        case _:
            return "gone"


class Peer(ABC, Generic[M, F]):
    """One watched process.

    Args:
        name: for the log and for reasons.
        path: its socket.
        check: reduces a message to facts; raises ProtocolError for an impossible one.
        watching: what all watchers share.

    Attributes:
        message: the last good message, kept when the peer goes.
        lost: how it was lost last: "gone", "silent", "garbled"; or empty.
        facts: the last message's facts; None while the peer is not connected.
    """

    def __init__(self, name: str, path: Path, check: Callable[[M], F], watching: Watching) -> None:
        self.name = name
        self.lost = ""
        self.message: M | None = None
        self.facts: F | None = None
        self._path = path
        self._silence_s = watching.heartbeat_s * _MISSED_HEARTBEATS
        self._check = check
        self._bell = watching.bell
        self._wake = watching.wake
        self._heard: float | None = None
        self._channel: grpc.aio.Channel | None = None

    @property
    def connected(self) -> bool:
        """Whether the peer can be reached and makes sense."""
        return self.facts is not None

    @property
    def age_s(self) -> float:
        """Seconds since the last good message; -1 before the first."""
        return -1.0 if self._heard is None else time.monotonic() - self._heard

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel, for calls beside the watch.

        Raises:
            PeerDiedError: the watcher does not run.
        """
        if self._channel is None:
            raise PeerDiedError("not connected")
        return self._channel

    async def run(self) -> None:
        """Watches for ever; cancel to end."""
        async with rpc.connect(self._path) as channel:
            self._channel = channel
            try:
                while True:
                    try:
                        async with translated():
                            await self._watch(channel)
                    except PeerError as error:
                        if not self._wake.excuses(self._silence_s):
                            self._lose(error)
                    await asyncio.sleep(_PAUSE_S)
            finally:
                self._channel = None
                self.facts = None

    @abstractmethod
    async def _watch(self, channel: grpc.aio.Channel) -> None:
        """One connection's life; ends by raising."""

    def _hear(self, message: M) -> None:
        facts = self._check(message)
        if self.facts is None:
            log.event("peer.connected", peer=self.name)
        self.facts, self.message, self._heard = facts, message, time.monotonic()
        self._bell.ring()

    def _lose(self, error: PeerError) -> None:
        if self.facts is None:
            return
        self.facts, self.lost = None, manner(error)
        log.failure("peer.lost", error, peer=self.name)
        self._bell.ring()

    async def _stream(self, call: Any, kind: type[M]) -> None:
        """Reads a stream whose every message must come within the silence limit."""
        try:
            while True:
                async with asyncio.timeout(self._silence_s):
                    message = await call.read()
                if not isinstance(message, kind):  # gRPC's end-of-stream marker
                    raise PeerDiedError("the stream ended")
                self._hear(message)
        finally:
            call.cancel()


class ProbePeer(Peer[probe_pb2.RuntimeStatus, F]):
    """The status probe: watched, and asked to warm and to recycle."""

    async def _watch(self, channel: grpc.aio.Channel) -> None:
        call = probe_pb2_grpc.StatusProbeStub(channel).Watch(probe_pb2.WatchRequest(), wait_for_ready=True)
        await self._stream(call, probe_pb2.RuntimeStatus)

    async def recycle(self, reason: str, drain_s: float, timeout: float) -> None:
        """Asks the runtime to drain and go; returns when draining has begun.

        Raises:
            PeerError: it could not be asked.
        """
        request = probe_pb2.RecycleRequest(reason=reason, drain_deadline_ms=int(drain_s * 1000))
        async with translated():
            await probe_pb2_grpc.StatusProbeStub(self.channel).Recycle(request, timeout=timeout)

    async def warm(self, timeout: float) -> None:
        """Has the registered system prompts prefilled; returns when all are.

        Raises:
            PeerError: it could not be asked, or did not finish.
        """
        async with translated():
            call = probe_pb2_grpc.StatusProbeStub(self.channel).Warm(probe_pb2.WarmRequest(), timeout=timeout)
            try:
                while isinstance(await call.read(), probe_pb2.WarmProgress):
                    pass
                if await call.code() is not grpc.StatusCode.OK:
                    raise PeerDiedError("warming ended early")
            finally:
                call.cancel()


class GpuPeer(Peer[gpuhealth_pb2.NodeVerdict, F]):
    """gpuhealthd, watched."""

    async def _watch(self, channel: grpc.aio.Channel) -> None:
        call = gpuhealth_pb2_grpc.GpuHealthStub(channel).Watch(gpuhealth_pb2.WatchRequest(), wait_for_ready=True)
        await self._stream(call, gpuhealth_pb2.NodeVerdict)


class OwnerPeer(Peer[owner_pb2.OwnerStatus, F]):
    """The model owner, asked twice a heartbeat: its contract has no stream."""

    async def shut_down(self, timeout: float) -> None:
        """Asks it to end: a fresh one loads the weights anew.

        Raises:
            PeerError: it could not be asked.
        """
        async with translated():
            request = owner_pb2.ShutdownRequest(reason="error")
            await owner_pb2_grpc.ModelOwnerStub(self.channel).Shutdown(request, timeout=timeout)

    async def _watch(self, channel: grpc.aio.Channel) -> None:
        stub = owner_pb2_grpc.ModelOwnerStub(channel)
        period = self._silence_s / _MISSED_HEARTBEATS / 2
        while True:
            status = await stub.GetStatus(
                owner_pb2.GetStatusRequest(), timeout=self._silence_s, wait_for_ready=not self.connected
            )
            self._hear(status)
            await asyncio.sleep(period)


class StorePeer(Peer[metrics_pb2.ScrapeReply, F]):
    """The cache store: its metrics tell since when it has held entries."""

    async def _watch(self, channel: grpc.aio.Channel) -> None:
        stub = metrics_pb2_grpc.MetricsStub(channel)
        period = self._silence_s / _MISSED_HEARTBEATS / 2
        while True:
            reply = await stub.Scrape(
                metrics_pb2.ScrapeRequest(), timeout=self._silence_s, wait_for_ready=not self.connected
            )
            self._hear(reply)
            await asyncio.sleep(period)
