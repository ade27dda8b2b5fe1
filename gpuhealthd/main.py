"""gpuhealthd: serves the verdict on this node's hardware on gpuhealth.sock.

`GetVerdict` answers at once from the newest assessment. `Watch` sends one now, one at every change and one at least
every heartbeat, so that the controller can tell a quiet daemon from a dead one.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from gpuhealthd import policy_file
from gpuhealthd.classify import Assessment
from gpuhealthd.history import Archive
from gpuhealthd.prober import Prober
from gpuhealthd.rules import Policy
from gpuhealthd.verdicts import Action, Verdict
from tie.daemon import log, rpc
from tie.daemon.config import NodeConfig
from tie.daemon.errors import ConfigError
from tie.daemon.service import Lifetime, run
from tie.proto import gpuhealth_pb2 as pb
from tie.proto import gpuhealth_pb2_grpc

_JUST_AFTER_S = 0.01
_VERDICTS = {
    Verdict.HEALTHY: pb.VERDICT_HEALTHY,
    Verdict.DEGRADED: pb.VERDICT_DEGRADED,
    Verdict.UNAVAILABLE: pb.VERDICT_UNAVAILABLE,
}
_ACTIONS = {
    Action.NONE: pb.ACTION_NONE,
    Action.RECYCLE_RUNTIME: pb.ACTION_RECYCLE_RUNTIME,
    Action.RESET_GPU: pb.ACTION_RESET_GPU,
    Action.REBOOT: pb.ACTION_REBOOT,
    Action.SERVICE: pb.ACTION_SERVICE,
}


class GpuHealth(gpuhealth_pb2_grpc.GpuHealthServicer):
    """The gRPC face of a prober."""

    def __init__(self, prober: Prober, heartbeat_s: float) -> None:
        self._prober = prober
        self._heartbeat_s = heartbeat_s
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """Wakes every watcher."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def GetVerdict(  # noqa: N802 (generated name)
        self, request: pb.GetVerdictRequest, context: Any
    ) -> pb.NodeVerdict:
        """The verdict in force, with the age of the data behind it."""
        del request, context
        return verdict_message(self._prober)

    async def Watch(  # noqa: N802 (generated name)
        self, request: pb.WatchRequest, context: Any
    ) -> AsyncIterator[pb.NodeVerdict]:
        """The verdict now, at every change, and at least once a heartbeat."""
        del request, context
        shown: tuple[Any, ...] | None = None
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            changed = self._changed
            message = verdict_message(self._prober)
            essence = (message.verdict, tuple(message.reasons), tuple((d.id, d.verdict) for d in message.devices))
            if essence != shown or loop.time() >= due:
                yield message
                shown, due = essence, loop.time() + self._heartbeat_s
            with contextlib.suppress(TimeoutError):
                # Old data is said to be old at that moment, not at the next heartbeat.
                async with asyncio.timeout(min(max(0.0, due - loop.time()), self._prober.good_for() + _JUST_AFTER_S)):
                    await changed.wait()


def verdict_message(prober: Prober) -> pb.NodeVerdict:
    """The prober's answer as a message."""
    assessment, age = prober.answer()
    message = pb.NodeVerdict(
        verdict=_VERDICTS[assessment.node.verdict],
        age_s=age if math.isfinite(age) else -1.0,
        provider=prober.provider,
        reasons=assessment.node.reasons,
        action=_ACTIONS[assessment.node.action],
    )
    for device in assessment.devices:
        entry = message.devices.add(
            id=device.id,
            name=device.name,
            verdict=_VERDICTS[device.judgement.verdict],
            reasons=device.judgement.reasons,
            action=_ACTIONS[device.judgement.action],
        )
        for reading in device.readings:
            entry.readings.add(
                name=reading.name, value=reading.value or 0.0, unit=reading.unit, measured=reading.value is not None
            )
    return message


def metrics_text(prober: Prober) -> str:
    """Verdicts and measured readings as Prometheus text. What was not measured has no sample."""
    registry = CollectorRegistry()
    assessment, age = prober.answer()
    _gauge(registry, "tie_gpu_node_verdict", "1 healthy, 2 degraded, 3 unavailable", int(assessment.node.verdict))
    _gauge(registry, "tie_gpu_snapshot_age_seconds", "Age of the newest complete look", age)
    _gauge(registry, "tie_gpu_looks", "Looks completed since start", prober.looks)
    _gauge(registry, "tie_gpu_probe_failures", "Looks that hung or died since start", prober.failures)
    verdict = Gauge("tie_gpu_verdict", "1 healthy, 2 degraded, 3 unavailable", ["device"], registry=registry)
    reading = Gauge("tie_gpu_reading", "Measured quantities", ["device", "name", "unit"], registry=registry)
    for device in assessment.devices:
        verdict.labels(device.id).set(int(device.judgement.verdict))
        for item in device.readings:
            if item.value is not None:
                reading.labels(device.id, item.name, item.unit).set(item.value)
    return generate_latest(registry).decode()


def _gauge(registry: CollectorRegistry, name: str, text: str, value: float) -> None:
    Gauge(name, text, registry=registry).set(value)


class _VerdictLog:
    """One line for each change of the node's verdict."""

    def __init__(self) -> None:
        self._last: tuple[int, tuple[str, ...]] | None = None

    def note(self, assessment: Assessment) -> None:
        now = (int(assessment.node.verdict), assessment.node.reasons)
        if now != self._last:
            self._last = now
            log.event(
                "gpu.verdict",
                verdict=assessment.node.verdict.name.lower(),
                reason=",".join(assessment.node.reasons)[:160],
                action=assessment.node.action.name.lower(),
            )


async def serve(config: NodeConfig, lifetime: Lifetime) -> None:
    """Runs the daemon until it is asked to stop.

    Raises:
        ConfigError: looks would always be older than they may be, or the policy file is no policy.
    """
    settings = config.gpuhealth
    if settings.poll_interval_s >= settings.stale_after_s:
        raise ConfigError("gpuhealth.stale_after_s must be longer than gpuhealth.poll_interval_s")
    policy = Policy(
        recover_after_polls=settings.recover_after_polls,
        min_available_bytes=settings.min_available_bytes,
        max_load_per_core=settings.max_load_per_core,
        max_temperature_c=settings.max_temperature_c,
        expected_devices=settings.expected_devices,
        expected_nvlinks=settings.expected_nvlinks,
        confidential=settings.confidential,
        verdicts=policy_file.load(Path(settings.policy_file)) if settings.policy_file else {},
    )
    archive = Archive(config.sockets.gpuhealth.with_name("history.json"))
    verdicts = _VerdictLog()

    def on_change() -> None:
        verdicts.note(prober.answer()[0])
        servicer.changed()

    prober = Prober(
        settings.provider,
        policy,
        interval_s=settings.poll_interval_s,
        deadline_s=settings.stale_after_s,
        on_change=on_change,
        kernel_log=settings.kernel_log,
        archive=archive if settings.provider == "nvml" else None,
    )
    servicer = GpuHealth(prober, config.controller.heartbeat_s)

    def register(server: grpc.aio.Server) -> None:
        gpuhealth_pb2_grpc.add_GpuHealthServicer_to_server(servicer, server)

    async with rpc.serve(config.sockets.gpuhealth, register, metrics=lambda: metrics_text(prober)):
        probing = asyncio.create_task(prober.run())
        stopping = asyncio.create_task(lifetime.stopping.wait())
        try:
            lifetime.ready(config.sockets.gpuhealth)
            await asyncio.wait({probing, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if probing.done():
                probing.result()  # a bug in the prober must end the daemon, not leave it serving old verdicts
        finally:
            probing.cancel()
            stopping.cancel()
            await asyncio.gather(probing, stopping, return_exceptions=True)


def main() -> None:
    """The daemon's entry point."""
    run("gpuhealthd", "Watches the hardware of this node and serves a verdict on it.", serve)


if __name__ == "__main__":
    main()
