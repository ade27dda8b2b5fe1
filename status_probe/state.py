"""What the probe says of the runtime, as a pure function of what it knows.

The first row that applies:

    recycling                                   RECYCLING      -
    the engine's kv.sock connection ended       IN_ERROR       engine-gone
    no engine yet, start deadline passed        IN_ERROR       start-timeout
    no engine yet                               INITIALIZING   engine-starting
    last canary failed, after a first success
      or after the start deadline               IN_ERROR       its code
    no canary has passed yet                    INITIALIZING   canary-pending
    being warmed before the first "ready"       INITIALIZING   warming
    otherwise                                   READY          -

An engine that is gone never comes back by itself: only a recycle mends that.
"""

from dataclasses import dataclass

from status_probe.canary import CanaryResult
from tie.proto import probe_pb2


@dataclass(slots=True)
class Facts:
    """What the probe knows.

    Attributes:
        connected: kv.sock's hello has come.
        gone: and its connection has ended since.
        late: the start deadline has passed.
        canary: the last one.
        flown: a canary has passed since the start.
        warming: system prompts are being computed.
        warmed: all of them have been.
        was_ready: READY has been said.
        recycling: a recycle has begun; nothing leads back from there.
    """

    connected: bool = False
    gone: bool = False
    late: bool = False
    canary: CanaryResult | None = None
    flown: bool = False
    warming: bool = False
    warmed: bool = False
    was_ready: bool = False
    recycling: bool = False


def judge(facts: Facts) -> tuple["probe_pb2.State.ValueType", str]:
    """The state and its reason (a stable code, or empty)."""
    if facts.recycling:
        return probe_pb2.STATE_RECYCLING, ""
    if facts.gone:
        return probe_pb2.STATE_IN_ERROR, "engine-gone"
    if not facts.connected:
        if facts.late:
            return probe_pb2.STATE_IN_ERROR, "start-timeout"
        return probe_pb2.STATE_INITIALIZING, "engine-starting"
    if facts.canary is not None and not facts.canary.ok and (facts.flown or facts.late):
        return probe_pb2.STATE_IN_ERROR, facts.canary.error
    if not facts.flown:
        return probe_pb2.STATE_INITIALIZING, "canary-pending"
    if facts.warming and not facts.was_ready:
        return probe_pb2.STATE_INITIALIZING, "warming"
    return probe_pb2.STATE_READY, ""
