"""What a node uses while it is soaked, and whether that grows."""

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from tie.cli import control
from tie.cli.local_node import LocalNode
from tie.proto import metrics_pb2

MIB = 1024 * 1024
# Programs that live as long as the node; those of requests come and go.
LASTING = (
    "tie-kps",
    "gpuhealthd",
    "tie-model-owner",
    "tie-cloudboard",
    "tie-controllerd",
    "tie-afm-runtime",
    "status_probe.main",
    "tritonserver",
    "triton_python_backend_stub",
)
PASSING = ("tie-cloud-app", "cb_jobhelper")
# What may come on top over the whole of the time that is looked at: allocators keep what they once needed.
RSS_SHARE, RSS_BYTES, SHM_BYTES = 0.03, 8 * MIB, 8 * MIB
# At rest: what a first request opens for good, for example a connection to a peer.
DESCRIPTORS = 8


@dataclass
class Moment:
    """The node at one time. Sizes are bytes, by program; `t` is seconds since the beginning.

    Attributes:
        instances: pid of each lasting program, to tell a restarted one.
        kv: KV blocks by state, and running and waiting sequences, as the runtime says.
        shm: used of /dev/shm, the whole machine's.
    """

    t: float
    rss: dict[str, int] = field(default_factory=dict)
    descriptors: dict[str, int] = field(default_factory=dict)
    instances: dict[str, list[int]] = field(default_factory=dict)
    passing: dict[str, int] = field(default_factory=dict)
    kv: dict[str, float] = field(default_factory=dict)
    shm: int = 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


async def look(node: LocalNode, begun: float) -> Moment:
    """Everything at once."""
    moment = Moment(round(time.monotonic() - begun, 1))
    for name in LASTING:
        processes = node.find(name)
        moment.instances[name] = [process.pid for process in processes]
        for process in processes:
            try:
                moment.rss[name] = moment.rss.get(name, 0) + process.memory_info().rss
                moment.descriptors[name] = moment.descriptors.get(name, 0) + process.num_fds()
            except psutil.Error:
                continue  # ended a moment ago, or not ours to look into
    for name in PASSING:
        moment.passing[name] = len(node.find(name))
    usage = os.statvfs(Path("/dev/shm"))
    moment.shm = (usage.f_blocks - usage.f_bfree) * usage.f_frsize
    moment.kv = await ledger(node)
    return moment


async def ledger(node: LocalNode) -> dict[str, float]:
    """The runtime's blocks and sequences."""
    async with control.connected(node.run_dir) as connection:
        reply = await connection.metrics.Scrape(metrics_pb2.ScrapeRequest(), timeout=control.CALL_S)
    found = {}
    for family in text_string_to_metric_families(reply.text):
        for sample in family.samples:
            if sample.name == "tie_runtime_kv_blocks":
                found[sample.labels["state"]] = sample.value
            elif sample.name in ("tie_runtime_running", "tie_runtime_waiting", "tie_runtime_preemptions_total"):
                found[sample.name.removeprefix("tie_runtime_")] = sample.value
    return found


def growth(moments: Sequence[Moment]) -> list[str]:
    """What memory grew from the first to the last of these moments by more than may be, in words."""
    grown = []
    for name in LASTING:
        kept = [(moment.t, moment.rss[name]) for moment in moments if name in moment.rss]
        allowed = max(RSS_BYTES, RSS_SHARE * statistics.median(size for _, size in kept)) if kept else 0.0
        if (more := drift(kept)) > allowed:
            grown.append(f"memory of {name} grew by {more / MIB:.1f} MiB")
    if (more := drift([(moment.t, moment.shm) for moment in moments])) > SHM_BYTES:
        grown.append(f"/dev/shm grew by {more / MIB:.1f} MiB (other programs of this machine use it as well)")
    return grown


def kept_open(before: Moment, after: Moment) -> list[str]:
    """Programs with more open descriptors than before, both at rest, in words."""
    more = {name: after.descriptors[name] - before.descriptors.get(name, 0) for name in after.descriptors}
    return [
        f"{name} holds {count} descriptors more than at first" for name, count in more.items() if count > DESCRIPTORS
    ]


def drift(points: Sequence[tuple[float, float]]) -> float:
    """How much the values rise over the whole time, by the median of all pairs' slopes (Theil 1950, Sen 1968).

    Neither a peak nor a trough moves it, as long as most of the time it is not there.
    """
    slopes = [
        (later - earlier) / (end - begin)
        for index, (begin, earlier) in enumerate(points)
        for end, later in points[index + 1 :]
        if end > begin
    ]
    return statistics.median(slopes) * (points[-1][0] - points[0][0]) if slopes else 0.0


def restarted(moments: Sequence[Moment]) -> list[str]:
    """Lasting programs that were not the same all the time, in words."""
    return [
        f"{name} was restarted"
        for name in LASTING
        if len({tuple(moment.instances[name]) for moment in moments if moment.instances[name]}) > 1
    ]
