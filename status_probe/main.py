"""tie-status-probe: the gRPC service StatusProbe (probe.proto) on probe.sock."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from status_probe.probe import Probe, instance_from_environment
from tie.assets.bundle import open_bundle
from tie.daemon import log, rpc, service
from tie.daemon.config import NodeConfig
from tie.daemon.errors import ConfigError, PeerError
from tie.proto import probe_pb2, probe_pb2_grpc

_MAX_DRAIN_S = 3600.0


class StatusProbeServicer(probe_pb2_grpc.StatusProbeServicer):
    """Answers the controller.

    Args:
        probe: what it speaks for.
        heartbeat_s: the longest silence of a watch.
    """

    def __init__(self, probe: Probe, heartbeat_s: float) -> None:
        self._probe = probe
        self._heartbeat_s = heartbeat_s

    async def GetStatus(  # noqa: N802 (generated name)
        self, request: probe_pb2.GetStatusRequest, context: Any
    ) -> probe_pb2.RuntimeStatus:
        """The status now."""
        del request, context
        return self._probe.status()

    async def Watch(  # noqa: N802 (generated name)
        self, request: probe_pb2.WatchRequest, context: Any
    ) -> AsyncIterator[probe_pb2.RuntimeStatus]:
        """The status now, at every change, and at least once a heartbeat."""
        del request, context
        async for status in self._probe.changes(self._heartbeat_s):
            yield status

    async def Warm(  # noqa: N802 (generated name)
        self, request: probe_pb2.WarmRequest, context: Any
    ) -> AsyncIterator[probe_pb2.WarmProgress]:
        """Computes the registered system prompts."""
        del request
        try:
            async with contextlib.aclosing(self._probe.warm()) as steps:
                async for progress in steps:
                    yield progress
        except PeerError as error:
            log.failure("warm.failed", error)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the engine could not be warmed")

    async def Recycle(  # noqa: N802 (generated name)
        self, request: probe_pb2.RecycleRequest, context: Any
    ) -> probe_pb2.RecycleReply:
        """Drains and ends the container; answered when draining has begun."""
        drain_s = request.drain_deadline_ms / 1000
        if drain_s > _MAX_DRAIN_S:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "drain_deadline_ms: at most one hour")
        log.event("recycle.begin", reason=request.reason)
        in_flight = await self._probe.recycle(drain_s)
        return probe_pb2.RecycleReply(instance_id=self._probe.status().instance_id, in_flight=in_flight)


async def run_probe(config: NodeConfig, lifetime: service.Lifetime) -> None:
    """The daemon: serves until a recycle or a signal ends it.

    Raises:
        ConfigError: it was not started by the container's launcher.
    """
    instance_id = instance_from_environment()
    if not instance_id:
        raise ConfigError("TIE_INSTANCE_ID is not set", hint="tie-afm-runtime starts the probe")
    probe = Probe(config, open_bundle(Path(config.model.bundle)), instance_id, lifetime.stop)
    servicer = StatusProbeServicer(probe, config.controller.heartbeat_s)

    def register(server: grpc.aio.Server) -> None:
        probe_pb2_grpc.add_StatusProbeServicer_to_server(servicer, server)

    async with rpc.serve(config.sockets.probe, register, metrics=probe.metrics):
        lifetime.ready(config.sockets.probe)
        watching = asyncio.create_task(probe.run())
        stopping = asyncio.create_task(lifetime.stopping.wait())
        try:
            await asyncio.wait({watching, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()  # raises: it never ends by itself
        finally:
            for task in (watching, stopping):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task


def main() -> None:
    """The console script."""
    service.run("tie-status-probe", "Health and recycle interface of the AFM Runtime.", run_probe)


if __name__ == "__main__":
    main()
