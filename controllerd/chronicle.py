"""Writes what happens where it is looked for afterwards: the journal, the log, systemd's status line."""

from controllerd.happening import Happening
from controllerd.journal import Journal
from controllerd.signals import Bell
from tie.daemon import log
from tie.daemon.notify import notify

_REASON_CHARACTERS = 160  # of a log field


class Chronicle:
    """Told of everything. An operator's own words go to the journal only: the log takes codes.

    Args:
        journal: the node's.
        bell: rung each time.
    """

    def __init__(self, journal: Journal, bell: Bell) -> None:
        self._journal = journal
        self._bell = bell

    def __call__(self, happening: Happening) -> None:
        """Adds one."""
        self._journal.add(happening)
        reason = ",".join((happening.code, *happening.more))[:_REASON_CHARACTERS]
        match happening.kind:
            case "state":
                before, after = happening.before, happening.after
                log.event("node.transition", reason=happening.code, from_state=before, to_state=after)
                notify(f"STATUS={after} ({happening.code})")
            case "runtime" if happening.code == "seen":
                log.event("runtime.seen", instance_id=happening.after)
            case "runtime":
                log.event("runtime.said", instance_id=happening.after, reason=reason)
            case "recycled":
                log.event(
                    "recycle.finished",
                    status=happening.code,
                    instance_id=happening.after,
                    elapsed_s=round(happening.seconds, 3),
                )
            case "cut":
                log.event("recycle.cut", reason=reason, count=happening.count)
            case "given-up":
                log.event("node.given-up", reason=reason, action="call-somebody")
            case "peer":
                pass  # who watches the peer has said so, and what was wrong
            case "recycle" | "joined":
                log.event("node.recycle", reason=reason)
            case "settling":
                log.event("node.settling", elapsed_s=happening.seconds)
            case "keys":
                log.event("node.keys", status=happening.code)
            case "gpu":
                log.event("node.gpu", reason=reason)
            case "owner":
                log.event("node.owner", reason=reason)
            case "maintenance":
                log.event("node.maintenance", reason=reason)
            case "controller":
                log.event("node.controller", status=happening.code, elapsed_s=round(happening.seconds, 3))
            case "disk":
                log.event("node.disk", status=happening.code)
            case "journal":
                log.event("node.journal", status=happening.code)
            case _:
                raise ValueError(happening.kind)
        self._bell.ring()
