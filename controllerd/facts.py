"""What the controller knows of its peers, checked and reduced to what decides.

Peers are other processes: their messages are checked here before anything is built on them. A value that makes no
sense is a ProtocolError and breaks the connection to that peer; a number that no table knows counts as "not ready".
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from tie.daemon.errors import ProtocolError
from tie.proto import gpuhealth_pb2, metrics_pb2, owner_pb2, probe_pb2

_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_CODE = re.compile(r"[a-z0-9]+([-:.][a-z0-9]+)*")
_STORE_BEGAN = re.compile(r"^tie_store_start_time_seconds ([0-9.e+]{1,32})$", re.MULTILINE)
_MAX_TEXT = 200
_MAX_CODES = 64
_MAX_WHY = 4  # of a peer's reasons that the node repeats


@dataclass(frozen=True, slots=True)
class Runtime:
    """The AFM Runtime, as its probe tells it."""

    instance_id: str
    ready: bool
    state: str  # "initializing", "ready", "in-error", "recycling", "unknown"
    canary_ok: bool
    warmed: bool
    model: str
    release: str
    running: int
    uptime_s: float
    owner_generation: int
    may_heal: bool = False  # in error for a failed canary only: the next one may pass
    why: tuple[str, ...] = ()  # in the probe's words

    @property
    def in_error(self) -> bool:
        """Whether the probe says that the runtime has failed."""
        return self.state == "in-error"


@dataclass(frozen=True, slots=True)
class Gpu:
    """The hardware, as gpuhealthd judges it. `fit` is healthy or degraded: degraded hardware still serves."""

    fit: bool
    fresh: bool
    advises_recycle: bool
    starting: bool = False  # not fit only because gpuhealthd has not looked yet
    why: tuple[str, ...] = ()  # in gpuhealthd's words


@dataclass(frozen=True, slots=True)
class Owner:
    """The model owner."""

    instance: str
    generation: int
    state: str  # "loading", "ready", "failed", "unknown"
    error: str = ""  # in its own words, when it could not load the weights


@dataclass(frozen=True, slots=True)
class Facts:
    """All peers at one moment; None for one that cannot be reached.

    Attributes:
        cloudboard: whether the node is attached.
        keys: whether CloudBoard's key service answers, as far as CloudBoard says; without it nobody can be served.
        busy_acknowledged: CloudBoard knows that the node takes nothing more.
        in_flight: requests that CloudBoard still has here.
    """

    runtime: Runtime | None = None
    gpu: Gpu | None = None
    owner: Owner | None = None
    cloudboard: bool = False
    busy_acknowledged: bool = False
    in_flight: int = 0
    keys: bool = True


_PROBE_STATES = {
    probe_pb2.STATE_INITIALIZING: "initializing",
    probe_pb2.STATE_READY: "ready",
    probe_pb2.STATE_IN_ERROR: "in-error",
    probe_pb2.STATE_RECYCLING: "recycling",
}
_OWNER_STATES = {
    owner_pb2.STATE_LOADING: "loading",
    owner_pb2.STATE_READY: "ready",
    owner_pb2.STATE_FAILED: "failed",
}
_FIT = (gpuhealth_pb2.VERDICT_HEALTHY, gpuhealth_pb2.VERDICT_DEGRADED)


def runtime_of(message: probe_pb2.RuntimeStatus) -> Runtime:
    """Checks the probe's status.

    Raises:
        ProtocolError: a field is impossible.
    """
    state = _PROBE_STATES.get(message.state, "unknown")
    if not _ID.fullmatch(message.instance_id) and (message.instance_id or state == "ready"):
        raise ProtocolError("impossible instance id")
    _texts(message.model, message.release, message.executor, message.prefix.state)
    _codes([*message.reasons, message.last_canary.error])
    _durations(message.uptime_s, message.last_canary.age_s, message.last_canary.latency_s)
    return Runtime(
        instance_id=message.instance_id,
        ready=state == "ready",
        state=state,
        canary_ok=message.last_canary.ok,
        warmed=message.warmed,
        model=message.model,
        release=message.release,
        running=message.running + message.waiting,
        uptime_s=message.uptime_s,
        owner_generation=message.owner_generation,
        why=tuple(message.reasons)[:_MAX_WHY],
        may_heal=bool(message.reasons) and all(reason.startswith("canary-") for reason in message.reasons),
    )


def gpu_of(message: gpuhealth_pb2.NodeVerdict, stale_after_s: float) -> Gpu:
    """Checks gpuhealthd's verdict. Old data is not fresh, whatever the verdict says.

    Raises:
        ProtocolError: a field is impossible.
    """
    _codes(message.reasons)
    if not math.isfinite(message.age_s) or len(message.devices) > 64:
        raise ProtocolError("impossible verdict")
    for device in message.devices:
        _texts(device.id, device.name)
        _codes(device.reasons)
    return Gpu(
        fit=message.verdict in _FIT,
        fresh=0.0 <= message.age_s <= stale_after_s,
        advises_recycle=message.action == gpuhealth_pb2.ACTION_RECYCLE_RUNTIME,
        why=tuple(message.reasons)[:_MAX_WHY],
        starting=list(message.reasons) == ["probe-starting"],
    )


def owner_of(message: owner_pb2.OwnerStatus) -> Owner:
    """Checks the model owner's status.

    Raises:
        ProtocolError: a field is impossible.
    """
    _texts(message.model, message.release, *message.layouts)
    _codes([message.error])
    if not _ID.fullmatch(message.owner_instance):
        raise ProtocolError("impossible owner instance")
    state = _OWNER_STATES.get(message.state, "unknown")
    return Owner(message.owner_instance, message.generation, state, message.error)


def store_of(message: metrics_pb2.ScrapeReply) -> str:
    """Since when the cache store has held entries, as it writes it: another value is another store.

    Raises:
        ProtocolError: it does not say.
    """
    began = _STORE_BEGAN.search(message.text)
    if began is None:
        raise ProtocolError("a store without a beginning")
    return began.group(1)


def _texts(*values: str) -> None:
    if any(len(value) > _MAX_TEXT or not value.isprintable() for value in values):
        raise ProtocolError("impossible text")


def _codes(values: Iterable[str]) -> None:
    listed = list(values)
    if len(listed) > _MAX_CODES or any(value and not (len(value) <= 64 and _CODE.fullmatch(value)) for value in listed):
        raise ProtocolError("impossible code")


def _durations(*values: float) -> None:
    if any(not math.isfinite(value) or value < 0 for value in values):
        raise ProtocolError("impossible duration")
