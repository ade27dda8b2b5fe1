"""What the node says of itself: the controller's `Attach` stream, and how many requests are in flight.

Only a live stream makes the node available. The ingress counts its requests here without an `await` between the look at
the state and the count, so that an acknowledged `busy` never misses one.
"""

import asyncio
from typing import Any, Final

import grpc
import grpc.aio

from tie.daemon import log
from tie.proto import cloudboard_pb2, cloudboard_pb2_grpc

_MAX_TEXT: Final = 1024


class Registry:
    """The state of one node.

    Attributes:
        report: the report now in force, or None while no controller is attached.
        in_flight: requests between their admission and the end of their answer.
        keys: whether the key service answers; unspecified until it is known.
        key_id: the key that devices seal to, in hexadecimal; empty while unknown.
    """

    def __init__(self, node_id: str, max_in_flight: int) -> None:
        self.report: cloudboard_pb2.NodeReport | None = None
        self.in_flight = 0
        self.keys: cloudboard_pb2.KeyService.ValueType = cloudboard_pb2.KEY_SERVICE_UNSPECIFIED
        self.key_id = ""
        self._node_id = node_id
        self._max_in_flight = max_in_flight
        self._session: object = None
        self._listeners: set[asyncio.Event] = set()

    def takes_requests(self) -> bool:
        """Whether the node is available."""
        return self.report is not None and self.report.state == cloudboard_pb2.STATE_AVAILABLE

    @property
    def node_id(self) -> str:
        """Whom this CloudBoard serves."""
        return self._node_id

    def has_room(self) -> bool:
        """Whether a request would be admitted now."""
        return self.takes_requests() and self.in_flight < self._max_in_flight

    def begin(self) -> bool:
        """Admits one request and counts it; False when the node takes none now."""
        if not self.has_room():
            return False
        self.in_flight += 1
        self._wake()
        return True

    def end(self) -> None:
        """One admitted request is over."""
        self.in_flight -= 1
        self._wake()

    def tell_keys(self, keys: "cloudboard_pb2.KeyService.ValueType", key_id: str) -> None:
        """What became of the last look at the key service."""
        if (keys, key_id) != (self.keys, self.key_id):
            self.keys, self.key_id = keys, key_id
            self._wake()

    def listen(self) -> asyncio.Event:
        """An event that is set at every change; the listener clears it."""
        event = asyncio.Event()
        self._listeners.add(event)
        return event

    def unlisten(self, event: asyncio.Event) -> None:
        """Ends `listen`."""
        self._listeners.discard(event)

    def attach(self, session: object) -> None:
        """A controller's stream begins and takes the place of an older one."""
        self._session = session
        self._set(None)

    def holds(self, session: object) -> bool:
        """Whether `session` is still the one that counts."""
        return self._session is session

    def put(self, session: object, report: cloudboard_pb2.NodeReport) -> None:
        """Puts a report in force."""
        if self.holds(session):
            self._set(report)

    def detach(self, session: object) -> None:
        """A stream ended: the node is withdrawn, unless a newer stream speaks for it."""
        if self.holds(session):
            self._session = None
            self._set(None)

    def _set(self, report: cloudboard_pb2.NodeReport | None) -> None:
        before, after = _state_name(self.report), _state_name(report)
        self.report = report
        if before != after:
            log.event("registry.state", from_state=before, to_state=after, in_flight=self.in_flight)
        self._wake()

    def _wake(self) -> None:
        for event in self._listeners:
            event.set()


class Servicer(cloudboard_pb2_grpc.CloudBoardServicer):
    """CloudBoard's gRPC."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    # grpc.aio also takes a coroutine that reads and writes through the context; the stub's type knows generators only.
    async def Attach(  # type: ignore[override] # noqa: N802 (generated name)
        self, request_iterator: Any, context: Any
    ) -> None:
        """One controller's stream, for as long as it lasts."""
        del request_iterator  # read through the context, so that reading can wait beside other things
        registry, session = self._registry, object()
        registry.attach(session)
        changed = registry.listen()
        try:
            await _Conversation(registry, session, changed, context).run()
        finally:
            registry.unlisten(changed)
            registry.detach(session)

    async def GetRegistry(  # noqa: N802 (generated name)
        self, request: cloudboard_pb2.GetRegistryRequest, context: Any
    ) -> cloudboard_pb2.Registry:
        """The attached node, if any."""
        del request, context
        report = self._registry.report
        if report is None:
            return cloudboard_pb2.Registry()
        entry = cloudboard_pb2.NodeEntry(
            node_id=report.node_id,
            state=report.state,
            model=report.model,
            release=report.release,
            in_flight=self._registry.in_flight,
        )
        return cloudboard_pb2.Registry(nodes=[entry])


class _Conversation:
    """One `Attach`: acknowledges every good report; again when the keys change, and while busy what is in flight."""

    def __init__(self, registry: Registry, session: object, changed: asyncio.Event, context: Any) -> None:
        self._registry = registry
        self._session = session
        self._changed = changed
        self._context = context
        self._number = 0
        self._acknowledged: cloudboard_pb2.NodeAck | None = None

    async def run(self) -> None:
        """Returns at the stream's clean end; a stream that breaks the rules is aborted."""
        read = asyncio.ensure_future(self._context.read())
        change = asyncio.ensure_future(self._changed.wait())
        try:
            while True:
                await asyncio.wait({read, change}, return_when=asyncio.FIRST_COMPLETED)
                if not self._registry.holds(self._session):
                    await self._context.abort(grpc.StatusCode.ABORTED, "another controller has attached")
                if read.done():
                    report = read.result()
                    if report is grpc.aio.EOF:  # type: ignore[attr-defined] # missing in the stubs
                        return
                    await self._take(report)
                    read = asyncio.ensure_future(self._context.read())
                if change.done():
                    self._changed.clear()
                    await self._repeat()
                    change = asyncio.ensure_future(self._changed.wait())
        finally:
            read.cancel()
            change.cancel()

    async def _take(self, report: cloudboard_pb2.NodeReport) -> None:
        wrong = self._wrong(report)
        if wrong:
            log.event("registry.bad-report", reason=wrong)
            await self._context.abort(grpc.StatusCode.INVALID_ARGUMENT, wrong)
        self._number = report.number
        self._registry.put(self._session, report)
        await self._acknowledge()

    def _wrong(self, report: cloudboard_pb2.NodeReport) -> str:
        if report.number != self._number + 1:
            return "report-out-of-order"
        if report.node_id != self._registry.node_id:
            return "another-node"
        if report.state == cloudboard_pb2.STATE_UNSPECIFIED or report.state not in cloudboard_pb2.State.values():
            return "unknown-state"
        if max(len(report.model), len(report.release), len(report.summary)) > _MAX_TEXT:
            return "text-too-long"
        return ""

    async def _repeat(self) -> None:
        report, last, now = self._registry.report, self._acknowledged, self._acknowledgement()
        if report is None or last is None or now == last:
            return
        if report.state == cloudboard_pb2.STATE_BUSY or (now.keys, now.key_id) != (last.keys, last.key_id):
            await self._acknowledge()

    async def _acknowledge(self) -> None:
        self._acknowledged = self._acknowledgement()
        await self._context.write(self._acknowledged)

    def _acknowledgement(self) -> cloudboard_pb2.NodeAck:
        registry = self._registry
        return cloudboard_pb2.NodeAck(
            number=self._number, in_flight=registry.in_flight, keys=registry.keys, key_id=registry.key_id
        )


def _state_name(report: cloudboard_pb2.NodeReport | None) -> str:
    return "detached" if report is None else cloudboard_pb2.State.Name(report.state).removeprefix("STATE_").lower()
