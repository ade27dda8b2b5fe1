"""One recycle, from "busy" until the old runtime has let go. What follows is waiting, and the state machine's.

1. CloudBoard acknowledges "busy": no new request is on its way to this node. If CloudBoard is gone, no request can
   come either, and the procedure goes on after its deadline.
2. What CloudBoard still has in flight here ends, within the drain deadline: a request whose app has not yet submitted
   it to the runtime would be refused by a runtime that drains.
3. The probe is told to recycle, with what is left of the deadline; the runtime drains whatever remains.
4. The old runtime is gone, or another has taken its place, or its time is up.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from controllerd.attachment import Attachment
from controllerd.facts import Runtime
from controllerd.peers import ProbePeer
from controllerd.signals import Bell
from tie.daemon import log
from tie.daemon.errors import PeerError
from tie.proto import cloudboard_pb2

_CALL_TIMEOUT_S = 5.0
_RETRY_S = 0.25
_MARGIN_S = 2.0  # beyond the drain deadline: the runtime cancels what is left, and ends


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long each part may take, in seconds."""

    busy_ack_s: float
    drain_s: float
    fresh_s: float


@dataclass(slots=True)
class RecycleRecord:
    """A recycle and what came of it.

    Attributes:
        reason: "timer", "operator", "error", "owner" or "maintenance".
        began: on the controller's clock.
        old_instance: the runtime to go; empty when none was ever seen.
        new_instance: the one that took its place; empty until then.
        ended: when, on the same clock; None while under way.
        error: a stable code when it ended without success.
    """

    reason: str
    began: float
    old_instance: str = ""
    new_instance: str = ""
    ended: float | None = None
    error: str = ""

    @property
    def finished(self) -> bool:
        """Whether it has ended, one way or the other."""
        return self.ended is not None


class Procedure:
    """Carries out steps 1 to 4."""

    def __init__(self, probe: "ProbePeer[Runtime]", cloudboard: Attachment, bell: Bell, deadlines: Deadlines) -> None:
        self._probe = probe
        self._cloudboard = cloudboard
        self._bell = bell
        self._deadlines = deadlines

    async def run(self, recycle: RecycleRecord, drain_s: float, stale: Callable[[str], None]) -> None:
        """Returns when the old runtime has let go or its time is up; never raises for a peer's failure.

        Args:
            recycle: `old_instance` is set here when it was not known before.
            drain_s: what running requests get, in all.
            stale: called with the runtime that is to go, before it is told.
        """
        loop = asyncio.get_running_loop()
        await self._bell.until(self._busy, self._deadlines.busy_ack_s)
        drained_by = loop.time() + drain_s
        if self._cloudboard.attached:
            await self._bell.until(lambda: not self._cloudboard.attached or self._cloudboard.in_flight == 0, drain_s)
        overdue = loop.time() + self._deadlines.fresh_s
        if not recycle.old_instance:
            # Without knowing who is there now, nobody could say later that somebody else came.
            await self._bell.until(lambda: self._probe.facts is not None, self._deadlines.fresh_s)
            recycle.old_instance = self._probe.facts.instance_id if self._probe.facts else ""
        stale(recycle.old_instance)
        while not self._going(recycle.old_instance) and loop.time() < overdue:
            try:
                # A runtime that is told late still gets a moment to end its streams properly.
                left = max(0.001, drained_by - loop.time())
                await self._probe.recycle(recycle.reason, left, _CALL_TIMEOUT_S)
                break
            except PeerError as error:
                log.failure("recycle.not-told", error, instance_id=recycle.old_instance)
                await self._bell.wait(_RETRY_S)
        left = max(0.0, drained_by - loop.time()) + _MARGIN_S
        await self._bell.until(lambda: self._gone(recycle.old_instance), left)

    def _busy(self) -> bool:
        return self._cloudboard.in_force == cloudboard_pb2.STATE_BUSY

    def _going(self, old: str) -> bool:
        """Whether the old runtime need not be told: another is there, or it is on its way out."""
        runtime = self._probe.facts
        return runtime is not None and (runtime.instance_id != old or runtime.state == "recycling")

    def _gone(self, old: str) -> bool:
        runtime = self._probe.facts
        return runtime is None or runtime.instance_id != old
