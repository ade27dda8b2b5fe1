"""tie-model-owner: loads the weights once and outlives every runtime that uses them."""

from collections.abc import Iterable, Iterator
from typing import Any

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from model_owner.prefix_pool import PrefixPools
from model_owner.server import AttachServer, allowed_uids
from model_owner.weights import Weights
from tie.daemon import log, rpc, service
from tie.daemon.config import NodeConfig
from tie.daemon.layout import layout_for
from tie.proto import owner_pb2, owner_pb2_grpc


class ModelOwnerServicer(owner_pb2_grpc.ModelOwnerServicer):
    """control.sock, for the controller."""

    def __init__(self, weights: Weights, pools: PrefixPools, lifetime: service.Lifetime) -> None:
        self._weights = weights
        self._pools = pools
        self._lifetime = lifetime

    async def GetStatus(  # noqa: N802 (generated name)
        self, request: owner_pb2.GetStatusRequest, context: Any
    ) -> owner_pb2.OwnerStatus:
        """How far the weights are, what has been done with them, and what there is of prefix pools."""
        del request, context
        return status_of(self._weights, self._pools)

    async def Shutdown(  # noqa: N802 (generated name)
        self, request: owner_pb2.ShutdownRequest, context: Any
    ) -> owner_pb2.ShutdownReply:
        """Ends the process once this is answered; its supervisor starts a fresh one."""
        del context
        log.event("owner.shutdown", reason=request.reason)
        self._lifetime.stop()
        return owner_pb2.ShutdownReply()


class StatusCollector(Collector):
    """Metrics out of the same snapshot that the controller gets: nothing is counted twice."""

    def __init__(self, weights: Weights, pools: PrefixPools, server: AttachServer) -> None:
        self._weights = weights
        self._pools = pools
        self._server = server

    def collect(self) -> Iterator[Metric]:
        """One family per quantity."""
        status = status_of(self._weights, self._pools)
        counters = {
            "weight_bytes_read": ("Bytes read from weight files since start.", status.weight_bytes_read),
            "loads": ("Packings made, each out of one reading of the weight files.", status.loads),
            "attaches": ("Times that a runtime got the weights.", status.attaches),
            "pool_seals": ("Prefix pools sealed.", status.pool_seals),
            "pool_restores": ("Prefix pools handed out again.", status.pool_restores),
            "pool_resets": ("Times that prefix pools were thrown away.", status.pool_resets),
        }
        gauges = {
            "load_seconds": ("Duration of the last load.", status.load_seconds),
            "arena_bytes": ("Memory that holds packed weights.", status.arena_bytes),
            "generation": ("Which weights are held.", status.generation),
            "pool_bytes": ("Memory of prefix pools.", status.pool_bytes),
            "pool_blocks": ("Blocks of one rank's prefix pool.", status.pool_blocks),
        }
        for name, (text, count) in counters.items():
            yield CounterMetricFamily(f"tie_owner_{name}", text, count)
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"tie_owner_{name}", text, value)
        yield _labelled(
            GaugeMetricFamily("tie_owner_state", "One for the state that the owner is in.", labels=["state"]),
            ((name.removeprefix("STATE_").lower(), status.state == value) for name, value in owner_pb2.State.items()),
        )
        yield _labelled(
            CounterMetricFamily("tie_owner_refusals", "Attach requests refused.", labels=["code"]),
            self._server.refusals.items(),
        )


def _labelled(family: Any, samples: Iterable[tuple[str, float]]) -> Metric:
    for label, value in samples:
        family.add_metric([label], value)
    metric: Metric = family
    return metric


def status_of(weights: Weights, pools: PrefixPools) -> owner_pb2.OwnerStatus:
    """The whole snapshot, for the controller and for metrics."""
    status = weights.status()
    pools.describe(status)
    return status


async def own(config: NodeConfig, lifetime: service.Lifetime) -> None:
    """Serves until asked to end. Sockets are there before the weights: whoever attaches meanwhile hears "loading"."""
    allowed = allowed_uids(config.owner.allowed_users)
    weights = Weights(config.model.bundle, layout_for(config.runtime))
    pools = PrefixPools(config.owner.pool_bytes)
    try:
        server = AttachServer(weights, pools, allowed)
        registry = prometheus_client.CollectorRegistry()
        registry.register(StatusCollector(weights, pools, server))
        async with (
            server.serve(config.sockets.owner),
            rpc.serve(
                config.sockets.owner_control,
                lambda grpc_server: owner_pb2_grpc.add_ModelOwnerServicer_to_server(
                    ModelOwnerServicer(weights, pools, lifetime), grpc_server
                ),
                metrics=lambda: prometheus_client.generate_latest(registry).decode(),
            ),
        ):
            lifetime.ready(config.sockets.owner, config.sockets.owner_control)
            await lifetime.stopping.wait()
    finally:
        pools.reset()
        weights.close()


def main() -> None:
    """Entry point."""
    service.run("tie-model-owner", "Holds the model's weights in memory, so that a runtime starts in seconds.", own)


if __name__ == "__main__":
    main()
