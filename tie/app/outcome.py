"""How a request ends: one of the closed set of statuses, and what its user is told."""

from dataclasses import dataclass, field

from tie.daemon.errors import TieError
from tie.proto import app_pb2


@dataclass(frozen=True)
class Outcome:
    """What goes into the one `done` of a request.

    Attributes:
        status: the outcome, `app_pb2.Status`.
        detail: for the user's eyes inside the sealed stream: which field was wrong, what to do. Never logged.
        finishes: why each choice ended.
        usage: tokens counted.
    """

    status: app_pb2.Status.ValueType
    detail: str = ""
    finishes: tuple[app_pb2.Finish, ...] = ()
    usage: app_pb2.Usage = field(default_factory=app_pb2.Usage)


class RefusalError(TieError):
    """Ends the request with `status`. Its text is the status' name alone: `detail` may quote what the user wrote."""

    def __init__(self, status: app_pb2.Status.ValueType, detail: str = "") -> None:
        super().__init__(app_pb2.Status.Name(status))
        self.status = status
        self.detail = detail


def invalid(field_name: str, why: str) -> RefusalError:
    """The refusal of an impossible value."""
    return RefusalError(app_pb2.STATUS_INVALID_REQUEST, f"{field_name}: {why}")


def unsupported(field_name: str, why: str) -> RefusalError:
    """The refusal of a valid wish that this node cannot fulfil."""
    return RefusalError(app_pb2.STATUS_UNSUPPORTED, f"{field_name}: {why}")
