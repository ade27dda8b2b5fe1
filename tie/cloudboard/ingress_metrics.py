"""Counts of the ingress, without a trace of anybody's content."""

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from tie.cloudboard.registry import Registry
from tie.cloudboard.standby import StandbyPool
from tie.cloudboard.uploads import Uploads
from tie.http.server import Server


class IngressMetrics:
    """The ingress's metrics.

    Attributes:
        requests: by how they ended.
    """

    def __init__(self, registry: Registry, pool: StandbyPool, uploads: Uploads) -> None:
        self._metrics = CollectorRegistry()
        self.requests = Counter(
            "tie_cloudboard_requests", "Requests, by how they ended", ["code"], registry=self._metrics
        )
        in_flight = self._gauge("in_flight", "Requests admitted and not over")
        in_flight.set_function(lambda: registry.in_flight)
        standby = self._gauge("standby", "Jobhelpers standing by")
        standby.set_function(lambda: len(pool))
        held = self._gauge("upload_bytes", "Held by requests that are not accepted yet")
        held.set_function(lambda: uploads.held)

    def watch(self, server: Server) -> None:
        """Counts the connections of `server` as well."""
        connections = self._gauge("connections", "Open connections")
        connections.set_function(lambda: len(server))
        refused = self._gauge("connections_refused", "Connections that there was no room for, since the start")
        refused.set_function(lambda: server.refused)
        displaced = self._gauge("connections_displaced", "Idle connections that made room for others, since the start")
        displaced.set_function(lambda: server.displaced)

    def text(self) -> str:
        """As Prometheus text."""
        return generate_latest(self._metrics).decode()

    def _gauge(self, name: str, what: str) -> Gauge:
        return Gauge(f"tie_cloudboard_{name}", what, registry=self._metrics)
