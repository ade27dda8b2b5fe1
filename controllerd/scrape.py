"""All metrics of the node as one Prometheus text: the controller's own and those of every daemon it watches.

Each daemon is asked on its own socket, all at once, each with a deadline: a dead one costs a second and shows as
`tie_peer_up 0`. What they send is parsed, not pasted: a text that is no Prometheus text is dropped as a whole, and
every sample gets the label `daemon`.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from controllerd.controller import Controller
from controllerd.peers import translated
from controllerd.states import State
from tie.daemon import rpc
from tie.daemon.errors import PeerError
from tie.proto import metrics_pb2, metrics_pb2_grpc

_TIMEOUT_S = 1.0


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


async def node_metrics(controller: Controller, sources: Mapping[str, Path]) -> str:
    """The whole text.

    Args:
        controller: for its own metrics.
        sources: daemon name → the socket on which it serves `Metrics.Scrape`.
    """
    texts = await asyncio.gather(*(_scrape(path) for path in sources.values()))
    merged: dict[str, Metric] = {}
    up = GaugeMetricFamily("tie_peer_up", "Whether the daemon answered the scrape", labels=["daemon"])
    for daemon, text in zip(sources, texts, strict=True):
        families = None if text is None else parse(text)
        up.add_metric([daemon], 0 if families is None else 1)
        for family in families or ():
            _merge(merged, family, daemon)
    for family in (*own_families(controller), up):
        merged[family.name] = family  # ours win over a daemon that borrows their names
    registry = CollectorRegistry()
    registry.register(_Families(merged.values()))
    return generate_latest(registry).decode()


def parse(text: str) -> list[Metric] | None:
    """The metric families of a Prometheus text, or None when it is none."""
    try:
        return list(text_string_to_metric_families(text))
    except (ValueError, KeyError, IndexError, TypeError):  # the parser has no exception of its own
        return None


def own_families(controller: Controller) -> Iterator[Metric]:
    """The controller's own metrics."""
    now = controller.clock()
    state = GaugeMetricFamily("tie_node_state", "1 for the state that the node is in", labels=["state"])
    for name in State:
        state.add_metric([name.name.lower()], 1 if name is controller.mind.state else 0)
    yield state
    yield GaugeMetricFamily("tie_node_state_age_seconds", "How long it has been", value=now - controller.mind.since)
    yield GaugeMetricFamily(
        "tie_node_in_flight", "Requests, as told by CloudBoard", value=controller.cloudboard.in_flight
    )
    recycles = CounterMetricFamily("tie_node_recycles", "Recycles begun", labels=["reason"])
    for reason, count in controller.mind.recycles.items():
        recycles.add_metric([reason], count)
    yield recycles
    yield GaugeMetricFamily(
        "tie_node_last_recycle_seconds",
        "The last recycle, from busy to available",
        value=controller.mind.last_recycle_s,
    )
    yield GaugeMetricFamily(
        "tie_node_given_up", "1 when somebody is needed", value=int(controller.mind.endurance.given_up)
    )
    remaining = controller.mind.timer.remaining(now)
    if remaining is not None:
        yield GaugeMetricFamily("tie_node_next_recycle_seconds", "Until the timer's next recycle", value=remaining)


def _merge(merged: dict[str, Metric], family: Metric, daemon: str) -> None:
    target = merged.get(family.name)
    if target is None:
        target = merged[family.name] = Metric(family.name, family.documentation, family.type, family.unit)
    elif target.type != family.type:
        return
    for sample in family.samples:
        target.samples.append(sample._replace(labels={**sample.labels, "daemon": daemon}))


async def _scrape(path: Path) -> str | None:
    try:
        async with asyncio.timeout(_TIMEOUT_S * 2), translated(), rpc.connect(path) as channel:
            reply = await metrics_pb2_grpc.MetricsStub(channel).Scrape(metrics_pb2.ScrapeRequest(), timeout=_TIMEOUT_S)
    except (PeerError, TimeoutError):
        return None
    return str(reply.text)
