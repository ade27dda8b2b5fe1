"""What has to hold before a node is available, and what is wrong when it is not. Pure.

Each gate that does not hold gives a stable reason code. The order of the checks is the order in which an operator
would look.
"""

from dataclasses import dataclass

from controllerd.facts import Facts


@dataclass(frozen=True, slots=True)
class Memory:
    """What the controller remembers beside the facts.

    Attributes:
        stale_instance: the runtime that is being, or was to be, recycled; it never counts as ready again.
        warmed_instance: the runtime whose prefix pool has been warmed.
        owner_changed: the weights that the runtime holds belong to an owner that is no more.
        maintenance: withdrawn by an operator.
        overdue: the fresh runtime did not come in time.
    """

    stale_instance: str | None = None
    warmed_instance: str | None = None
    owner_changed: bool = False
    maintenance: bool = False
    overdue: bool = False


@dataclass(frozen=True, slots=True)
class Readiness:
    """The gates at one moment.

    Attributes:
        reasons: why the node is not available; empty when every gate holds.
        broken: the code of a part that says of itself that it has failed; empty when none does.
        fresh: a runtime that is not the stale one is ready.
    """

    reasons: tuple[str, ...]
    broken: str
    fresh: bool

    @property
    def ready(self) -> bool:
        """Whether every gate holds."""
        return not self.reasons


def assess(facts: Facts, memory: Memory) -> Readiness:
    """Checks every gate."""
    reasons: list[str] = []
    if memory.maintenance:
        reasons.append("maintenance")
    broken = ""
    if facts.owner is None:
        reasons.append("owner-gone")
    elif facts.owner.state != "ready":
        reasons.append(f"owner-{facts.owner.state}")
        broken = reasons[-1] if facts.owner.state == "failed" else ""
        reasons.extend(filter(None, (facts.owner.error,)))
    elif memory.owner_changed:
        reasons.append("owner-changed")
    fresh = False
    runtime = facts.runtime
    if runtime is None:
        reasons.append("runtime-gone")
    elif runtime.instance_id == memory.stale_instance:
        reasons.append("runtime-stale")
    elif not runtime.ready:
        reasons.append(f"runtime-{runtime.state}")
        broken = reasons[-1] if runtime.in_error else broken
        reasons.extend(runtime.why)
    elif not runtime.canary_ok:
        reasons.append("canary-failed")
    else:
        fresh = True
        if runtime.instance_id != memory.warmed_instance:
            reasons.append("not-warmed")
    if memory.overdue and not fresh:
        reasons.append("fresh-runtime-deadline")
    if facts.gpu is None:
        reasons.append("gpuhealthd-gone")
    elif facts.gpu.starting:
        reasons.append("gpu-starting")
    elif not facts.gpu.fit:
        reasons.append("gpu-unavailable")
        broken = broken or reasons[-1]
        reasons.extend(facts.gpu.why)
    elif not facts.gpu.fresh:
        reasons.append("gpu-stale")
    if not facts.cloudboard:
        reasons.append("cloudboard-gone")
    elif not facts.keys:
        reasons.append("keys-silent")
    return Readiness(tuple(reasons), broken, fresh)
