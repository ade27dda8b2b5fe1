"""tie-cache-stored: keeps sealed conversations in memory until their devices come back for them, or time runs out."""

import contextlib
import resource
import time
from collections.abc import Iterator

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tie.daemon import rpc, service
from tie.daemon.config import NodeConfig
from tie.store import memory
from tie.store.entries import Entries, Limits
from tie.store.server import ConnectionLimits, StoreServer

_OTHER_DESCRIPTORS = 64


class StoreCollector(Collector):
    """Metrics: sums only. Nothing here tells one entry or one client from another."""

    def __init__(self, entries: Entries, server: StoreServer) -> None:
        self._entries = entries
        self._server = server
        self._began = time.time()

    def collect(self) -> Iterator[Metric]:
        """One family per quantity."""
        counters = self._entries.counters
        for name, text, value in (
            ("entries", "Entries held.", len(self._entries)),
            ("used_bytes", "What they count as.", self._entries.used),
            ("reserved_bytes", "What is being written.", self._entries.reserved),
            ("connections", "Clients connected.", self._server.connections),
        ):
            yield GaugeMetricFamily(f"tie_store_{name}", text, value)
        yield GaugeMetricFamily("tie_store_start_time_seconds", "Since when it has held them, since 1970.", self._began)
        ends = CounterMetricFamily("tie_store_entries_ended", "Entries let go of.", labels=["how"])
        for how in ("replaced", "evicted", "expired", "dropped"):
            ends.add_metric([how], getattr(counters, how))
        yield ends
        yield CounterMetricFamily("tie_store_entries_filed", "Entries filed.", counters.filed)
        requests = CounterMetricFamily("tie_store_requests", "Requests answered.", labels=["kind", "outcome"])
        for (kind, outcome), count in sorted(self._server.outcomes.items()):
            requests.add_metric([kind, outcome], count)
        yield requests


async def store(config: NodeConfig, lifetime: service.Lifetime) -> None:
    """Serves until asked to end; what is held ends with the process."""
    table = config.store
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # Each entry and each client is a descriptor.
    room = max(1, most - table.max_connections - _OTHER_DESCRIPTORS)
    limits = Limits(
        capacity=table.capacity_bytes,
        max_entry=table.max_entry_bytes,
        max_entries=min(table.max_entries, room),
        ttl_s=table.ttl_s,
        turnover_s=table.turnover_s,
    )
    reaper, spares = memory.Reaper(), memory.spares(table.spare_bytes)
    entries = Entries(limits, time.monotonic, reaper.close)
    server = StoreServer(
        entries,
        ConnectionLimits(
            connections=table.max_connections,
            written_bytes=table.connection_bytes,
            written_entries=table.connection_entries,
            write_s=table.write_deadline_s,
        ),
        reaper,
        spares,
    )
    registry = prometheus_client.CollectorRegistry()
    registry.register(StoreCollector(entries, server))
    with contextlib.ExitStack() as ending:
        ending.callback(spares.close)
        ending.callback(reaper.stop)
        async with (
            server.serve(config.sockets.store),
            rpc.serve(
                config.sockets.store_control,
                lambda _: None,
                metrics=lambda: prometheus_client.generate_latest(registry).decode(),
            ),
        ):
            lifetime.ready(config.sockets.store, config.sockets.store_control)
            await lifetime.stopping.wait()


def main() -> None:
    """Entry point."""
    service.run("tie-cache-stored", "Holds sealed conversations in memory; it has no key to any of them.", store)


if __name__ == "__main__":
    main()
