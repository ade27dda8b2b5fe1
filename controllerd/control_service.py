"""NodeControl: what operators may ask of the node, on control.sock."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from controllerd import triggers
from controllerd.controller import Controller
from controllerd.recycle import RecycleRecord
from controllerd.states import State
from controllerd.status import STATES, essence, happenings, node_status
from tie.daemon.errors import PeerError, PeerTimeoutError
from tie.proto import cloudboard_pb2, control_pb2_grpc
from tie.proto import control_pb2 as pb

_LONGEST_DRAIN_S = 3600.0
_ANNOUNCE_S = 5.0  # until CloudBoard acknowledges what it was told
_REASONS = frozenset({triggers.OPERATOR, triggers.ASSET})


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
        del context
        reason = request.reason if request.reason in _REASONS else triggers.OPERATOR
        drain_s = min(request.drain_deadline_ms / 1000, _LONGEST_DRAIN_S) if request.drain_deadline_ms else None
        recycle = self._controller.request_recycle(reason, drain_s)
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
        del context
        self._controller.set_maintenance(on=request.on)
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
        return happenings(self._controller, request.last)

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
        )
