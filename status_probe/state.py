"""What the probe says of the runtime, as a pure function of what it knows.

The first row that applies:

    recycling                                   RECYCLING      -
    the engine's kv.sock connection ended       IN_ERROR       engine-gone
    a socket of the runtime has lost its file   IN_ERROR       socket-gone
    no engine yet, start deadline passed        IN_ERROR       start-timeout
    no engine yet                               INITIALIZING   engine-starting
    canaries fail (see below), after a first
      success or after the start deadline       IN_ERROR       their code
    no canary has passed yet                    INITIALIZING   canary-pending
    being warmed before the first "ready"       INITIALIZING   warming
    otherwise                                   READY          -

An engine that is gone never comes back by itself: only a recycle mends that.

A canary that does not come back in time may mean a dead runtime, or a busy machine. The age of the engine's last step
tells them apart: where that ended after the canary had begun, somebody is served, and only the canary is *late*; else
the canary was *missed*. Canaries fail

- at once with a wrong answer, or none to be had;
- after `MISSES` in a row that were missed: the controller withdraws the node at the first and recycles at the last;
- after `LATE` in a row that were late: then it is not the engine but the way to it that is stuck.
"""

from dataclasses import dataclass
from typing import Final

from status_probe.canary import TIMEOUT, CanaryResult
from tie.proto import probe_pb2

MISSES: Final = 3
LATE: Final = 10


@dataclass(slots=True)
class Facts:
    """What the probe knows.

    Attributes:
        connected: kv.sock's hello has come.
        gone: and its connection has ended since.
        unreachable: one of its sockets has no file any more: who is connected is served, nobody else.
        late: the start deadline has passed.
        canary: the last one.
        flown: a canary has passed since the start.
        missed_in_a_row: timed-out canaries, up to the last one, while the engine did nothing.
        late_in_a_row: timed-out canaries, up to the last one.
        warming: system prompts are being computed.
        warmed: all of them have been.
        was_ready: READY has been said.
        recycling: a recycle has begun; nothing leads back from there.
    """

    connected: bool = False
    gone: bool = False
    unreachable: bool = False
    late: bool = False
    canary: CanaryResult | None = None
    flown: bool = False
    missed_in_a_row: int = 0
    late_in_a_row: int = 0
    warming: bool = False
    warmed: bool = False
    was_ready: bool = False
    recycling: bool = False

    def note(self, canary: CanaryResult) -> None:
        """Takes a canary into account."""
        self.canary = canary
        self.flown = self.flown or canary.ok
        timed_out = canary.error == TIMEOUT
        self.missed_in_a_row = self.missed_in_a_row + 1 if timed_out and not canary.progress else 0
        self.late_in_a_row = self.late_in_a_row + 1 if timed_out else 0


def failing(facts: Facts) -> str:
    """The code with which canaries fail; empty when they do not."""
    if facts.canary is None or facts.canary.ok:
        return ""
    if facts.canary.error != TIMEOUT or facts.missed_in_a_row >= MISSES:
        return facts.canary.error
    return "canary-late" if facts.late_in_a_row >= LATE else ""


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
    if facts.unreachable:
        return probe_pb2.STATE_IN_ERROR, "socket-gone"
    if (facts.flown or facts.late) and (code := failing(facts)):
        return probe_pb2.STATE_IN_ERROR, code
    if not facts.flown:
        return probe_pb2.STATE_INITIALIZING, "canary-pending"
    if facts.warming and not facts.was_ready:
        return probe_pb2.STATE_INITIALIZING, "warming"
    return probe_pb2.STATE_READY, ""
