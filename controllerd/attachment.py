"""The node's stream to CloudBoard: numbered reports out, acknowledgements in.

A report goes out at every change and once a heartbeat. Numbers start at 1 with each stream. The node counts as attached
from the first acknowledgement until the stream breaks or an acknowledgement stays away for three heartbeats.
"""

import asyncio
import contextlib
import re
import time
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from controllerd.peers import manner, translated
from controllerd.signals import Watching
from tie.daemon import log, rpc
from tie.daemon.errors import PeerDiedError, PeerError, PeerTimeoutError, ProtocolError
from tie.proto import cloudboard_pb2 as pb
from tie.proto import cloudboard_pb2_grpc

_MISSED_HEARTBEATS = 3
_PAUSE_S = 0.2
_KEY_ID = re.compile(r"[0-9a-f]{0,64}")

_KEYS = {pb.KEY_SERVICE_ANSWERS: "answers", pb.KEY_SERVICE_SILENT: "silent"}


@dataclass(frozen=True, slots=True)
class Report:
    """What CloudBoard should know; `state` is a value of cloudboard.proto's State."""

    state: "pb.State.ValueType"
    model: str = ""
    release: str = ""
    summary: str = ""


class Attachment:
    """Keeps the node attached.

    Attributes:
        attached: an acknowledgement has come on the running stream.
        in_force: the state that CloudBoard has acknowledged last; None while not attached.
        in_flight: requests that CloudBoard still has on this node.
        keys: what CloudBoard says of its key service: "answers", "silent", or nothing.
        key_id: the key that devices seal to, in hexadecimal; the last that was heard of.
        lost: how it was lost last: "gone", "silent", "garbled"; or empty.
    """

    def __init__(self, path: Path, node_id: str, watching: Watching) -> None:
        self.attached = False
        self.in_force: int | None = None
        self.in_flight = 0
        self.keys = self.key_id = self.lost = ""
        self._path = path
        self._node_id = node_id
        self._heartbeat_s = watching.heartbeat_s
        self._silence_s = watching.heartbeat_s * _MISSED_HEARTBEATS
        self._bell = watching.bell
        self._wake = watching.wake
        self._report = Report(pb.STATE_INITIALIZING)
        self._dirty = asyncio.Event()
        self._heard: float | None = None

    @property
    def connected(self) -> bool:
        """Whether the node is attached."""
        return self.attached

    @property
    def age_s(self) -> float:
        """Seconds since the last acknowledgement; -1 before the first."""
        return -1.0 if self._heard is None else time.monotonic() - self._heard

    def report(self, report: Report) -> None:
        """Says what CloudBoard should know from now on."""
        if report != self._report:
            self._report = report
            self._dirty.set()

    async def run(self) -> None:
        """Stays attached for ever; cancel to end."""
        async with rpc.connect(self._path) as channel:
            stub = cloudboard_pb2_grpc.CloudBoardStub(channel)
            while True:
                try:
                    async with translated():
                        await self._session(stub)
                except PeerError as error:
                    self.in_force = None
                    if not self._wake.excuses(self._silence_s):
                        self._detach(error)
                await asyncio.sleep(_PAUSE_S)

    async def _session(self, stub: "cloudboard_pb2_grpc.CloudBoardAsyncStub") -> None:
        call = stub.Attach(wait_for_ready=True)  # type: ignore[call-arg]  # without an iterator: reports are written
        stream = _Stream()
        reader = asyncio.create_task(self._read(call, stream))
        try:
            while True:
                self._dirty.clear()
                number = stream.send(self._report.state)
                async with asyncio.timeout(self._silence_s):
                    await call.write(self._message(number))
                await self._pause(reader, stream)
        finally:
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError, PeerError, grpc.aio.AioRpcError):
                await reader
            call.cancel()

    async def _pause(self, reader: "asyncio.Task[None]", stream: "_Stream") -> None:
        """Until the next report is due."""
        dirty = asyncio.create_task(self._dirty.wait())
        try:
            await asyncio.wait({reader, dirty}, timeout=self._heartbeat_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            dirty.cancel()
        if reader.done():
            reader.result()
            raise PeerDiedError("the stream ended")
        if stream.oldest_wait() > self._silence_s:
            raise PeerTimeoutError("no acknowledgement")

    def _message(self, number: int) -> pb.NodeReport:
        report = self._report
        return pb.NodeReport(
            number=number,
            node_id=self._node_id,
            state=report.state,
            model=report.model,
            release=report.release,
            summary=report.summary,
        )

    async def _read(self, call: "grpc.aio.StreamStreamCall[pb.NodeReport, pb.NodeAck]", stream: "_Stream") -> None:
        while True:
            ack = await call.read()
            if not isinstance(ack, pb.NodeAck):
                return
            state = stream.acknowledge(ack.number)
            if not _KEY_ID.fullmatch(ack.key_id):
                raise ProtocolError("impossible key id")
            if not self.attached:
                log.event("cloudboard.attached", node_id=self._node_id)
            self.attached, self.in_force, self.in_flight = True, state, ack.in_flight
            self.keys, self.key_id = _KEYS.get(ack.keys, ""), ack.key_id or self.key_id
            self._heard = time.monotonic()
            self._bell.ring()

    def _detach(self, error: PeerError) -> None:
        if self.attached:
            log.failure("cloudboard.detached", error, node_id=self._node_id)
            self.lost = manner(error)
        self.attached, self.in_force, self.in_flight, self.keys = False, None, 0, ""
        self._bell.ring()


class _Stream:
    """The numbers of one stream."""

    def __init__(self) -> None:
        self._sent = 0
        self._acknowledged = 0
        self._states: dict[int, tuple[int, float]] = {}

    def send(self, state: int) -> int:
        self._sent += 1
        self._states[self._sent] = (state, time.monotonic())
        return self._sent

    def acknowledge(self, number: int) -> int:
        """The state that `number` reported.

        Raises:
            ProtocolError: a number that was never sent, or one before the last.
        """
        if number not in self._states or number < self._acknowledged:
            raise ProtocolError("acknowledgement out of order")
        self._acknowledged = number
        for older in [key for key in self._states if key < number]:
            del self._states[older]
        return self._states[number][0]

    def oldest_wait(self) -> float:
        """Seconds that the oldest report has waited for its acknowledgement."""
        waiting = [sent for number, (_, sent) in self._states.items() if number > self._acknowledged]
        return time.monotonic() - min(waiting) if waiting else 0.0
