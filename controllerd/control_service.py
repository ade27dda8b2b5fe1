"""NodeControl: what operators may ask of the node, on control.sock."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from controllerd import triggers
from controllerd.controller import Controller
from controllerd.journal import MAX_WORD, messages
from controllerd.recycle import RecycleRecord
from controllerd.states import State
from controllerd.status import STATES, essence, node_status
from tie.daemon.errors import PeerError, PeerTimeoutError
from tie.proto import cloudboard_pb2, control_pb2_grpc
from tie.proto import control_pb2 as pb

_LONGEST_DRAIN_S = 3600.0
_ANNOUNCE_S = 5.0  # until CloudBoard acknowledges what it was told
_CODES = frozenset({"", triggers.OPERATOR, triggers.ASSET})  # reasons that are codes; all else is an operator's words


class NodeControl(control_pb2_grpc.NodeControlServicer):
    """The gRPC face of the controller."""

    def __init__(self, controller: Controller, heartbeat_s: float) -> None:
        self._controller = controller
        self._heartbeat_s = heartbeat_s

    async def GetStatus(  # noqa: N802 (generated name)
        self, request: pb.GetStatusRequest, context: Any
    ) -> pb.NodeStatus:
        """The node's status."""
        del request, context
        return node_status(self._controller)

    async def Watch(  # noqa: N802 (generated name)
        self, request: pb.WatchRequest, context: Any
    ) -> AsyncIterator[pb.NodeStatus]:
        """The status now, at every change, and at least once a heartbeat."""
        del request, context
        loop = asyncio.get_running_loop()
        shown: tuple[Any, ...] | None = None
        due = loop.time()
        while True:
            status = node_status(self._controller)
            if essence(status) != shown or loop.time() >= due:
                shown, due = essence(status), loop.time() + self._heartbeat_s
                yield status
            else:
                await self._controller.bell.wait(due - loop.time())

    async def Recycle(  # noqa: N802 (generated name)
        self, request: pb.RecycleRequest, context: Any
    ) -> AsyncIterator[pb.RecycleProgress]:
        """Starts a recycle, or joins the one under way, and tells how it goes. It goes on when the caller leaves."""
        reason, word = await _wanted(request.reason, triggers.OPERATOR, context)
        drain_s = min(request.drain_deadline_ms / 1000, _LONGEST_DRAIN_S) if request.drain_deadline_ms else None
        recycle = self._controller.request_recycle(reason, drain_s, word)
        shown: tuple[Any, ...] | None = None
        while True:
            progress = self._progress(recycle)
            now = (progress.state, progress.in_flight, progress.old_instance_id, progress.finished)
            if progress.finished:
                # Who hears "finished" may ask the node at once: CloudBoard has to know by then.
                await self._controller.bell.until(self._announced, _ANNOUNCE_S)
            if now != shown:
                shown = now
                yield progress
            if progress.finished:  # as it was told, not as it may have become meanwhile
                return
            await self._controller.bell.wait(self._heartbeat_s)

    async def SetMaintenance(  # noqa: N802 (generated name)
        self, request: pb.SetMaintenanceRequest, context: Any
    ) -> pb.NodeStatus:
        """Withdraws the node, or lets it return. Answered at once: watch the status for the state "maintenance"."""
        reason, word = await _wanted(request.reason, triggers.MAINTENANCE, context)
        self._controller.set_maintenance(on=request.on, reason=reason, word=word)
        return node_status(self._controller)

    async def Warm(  # noqa: N802 (generated name)
        self, request: pb.WarmRequest, context: Any
    ) -> pb.NodeStatus:
        """Warms the prefix pool again; answered when done."""
        del request
        try:
            await self._controller.warm_now(context.time_remaining())
        except PeerTimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "warming did not finish in time")
        except PeerError:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no runtime to warm")
        return node_status(self._controller)

    async def GetEvents(  # noqa: N802 (generated name)
        self, request: pb.GetEventsRequest, context: Any
    ) -> pb.Happenings:
        """What happened to the node lately, and why."""
        del context
        return messages(list(self._controller.journal.entries)[-request.last :], self._controller.clock())

    def _announced(self) -> bool:
        controller = self._controller
        return (
            controller.mind.state is not State.AVAILABLE
            or not controller.cloudboard.attached
            or controller.cloudboard.in_force == cloudboard_pb2.STATE_AVAILABLE
        )

    def _progress(self, recycle: RecycleRecord) -> pb.RecycleProgress:
        controller = self._controller
        return pb.RecycleProgress(
            state=STATES[controller.mind.state],
            old_instance_id=recycle.old_instance,
            new_instance_id=recycle.new_instance,
            elapsed_s=recycle.elapsed_s(controller.clock()),
            in_flight=controller.cloudboard.in_flight,
            finished=recycle.finished,
            error=recycle.error,
            cut=recycle.cut,
        )


async def _wanted(reason: str, otherwise: str, context: Any) -> tuple[str, str]:
    """The code for what an operator gave as a reason, and the words, if it is words. What is no reason is refused."""
    if reason in _CODES:
        return (reason if reason == triggers.ASSET else otherwise), ""
    if len(reason) > MAX_WORD or not reason.isprintable():
        text = f"a reason is one printable line of {MAX_WORD} characters at most"
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
    return otherwise, reason
