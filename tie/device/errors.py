"""What a client may meet, beneath the suite's tree (tie.daemon.errors).

    RefusedError
    ├── StatementError         the node's key statement is not to be believed (tie.envelope.statement)
    ├── NodeBusyError          the node takes no requests now; nothing was sent to it: try another, or again
    ├── RequestRefusedError    the node or its app refused this request; `status` says why
    └── EnvelopeRefusedError   the envelope was not taken (not opened, used before, for another node or key)
    PeerError
    ├── UnreachableError       no node answers at the address
    ├── NodeFailedError        the node lost the request after it had taken it
    ├── PeerDiedError
    │   └── TruncatedError     the answer stopped before its end
    ├── PeerTimeoutError       a deadline passed
    └── ProtocolError
        └── EnvelopeError      the answer does not verify (tie.envelope.errors)

`RequestRefusedError.detail` is the node's explanation, which only the user at this device should see: it is in no
message.
"""

from types import MappingProxyType
from typing import Final

from tie.daemon.errors import PeerDiedError, PeerError, PeerTimeoutError, RefusedError, TieError
from tie.proto import app_pb2


class NodeBusyError(RefusedError):
    """The node takes no requests now. The request was not served, and may be sent again."""


class RequestRefusedError(RefusedError):
    """The request cannot be served as it is.

    Attributes:
        status: the app's status, for example `STATUS_PROMPT_TOO_LONG`, or the ingress's code.
        detail: what is wrong and what to do, for the user alone.
    """

    def __init__(self, message: str, *, status: str, detail: str = "") -> None:
        super().__init__(message, hint=detail)
        self.status = status
        self.detail = detail


class EnvelopeRefusedError(RefusedError):
    """The sealed envelope was not taken; nothing in it was read.

    Attributes:
        code: the ingress's code.
    """

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class UnreachableError(PeerError):
    """Nothing answers at the node's address, or it is no ingress of ours.

    Attributes:
        sent: whether a request was on its way: it may have been read.
    """

    def __init__(self, message: str, *, sent: bool = False) -> None:
        super().__init__(message)
        self.sent = sent


class NodeFailedError(PeerError):
    """The node took the request and lost it.

    Attributes:
        status: the app's status or the ingress's code.
    """

    def __init__(self, message: str, *, status: str) -> None:
        super().__init__(message)
        self.status = status


class TruncatedError(PeerDiedError):
    """The answer stopped before its end: something on the way died."""


_REFUSALS: Final = MappingProxyType(
    {
        app_pb2.STATUS_INVALID_REQUEST: "the request is not valid",
        app_pb2.STATUS_UNKNOWN_MODEL: "the node does not serve this model",
        app_pb2.STATUS_PROMPT_TOO_LONG: "the prompt is longer than the model's context",
        app_pb2.STATUS_REQUEST_TOO_LARGE: "the request is over the node's limit",
        app_pb2.STATUS_UNSUPPORTED: "the node cannot do what the request asks for",
        app_pb2.STATUS_IMAGE_REFUSED: "an image was refused",
        app_pb2.STATUS_GRAMMAR_REFUSED: "the constraint was refused",
        app_pb2.STATUS_PROTOCOL_ERROR: "the request was not understood",
    }
)
_FAILURES: Final = MappingProxyType(
    {
        app_pb2.STATUS_RUNTIME_UNAVAILABLE: "the node's runtime ended while it worked on the request",
        app_pb2.STATUS_CANCELLED: "the request was cancelled",
        app_pb2.STATUS_INTERNAL: "the node failed",
        app_pb2.STATUS_APP_DIED: "the process that served the request ended",
        app_pb2.STATUS_REPLACED: "the node had to restart before the answer was done: send it again",
    }
)


def from_done(done: app_pb2.Done) -> TieError | None:
    """The error of an answer's end; None when it ended well."""
    status = done.status
    if status == app_pb2.STATUS_OK:
        return None
    if status == app_pb2.STATUS_BUSY:
        return NodeBusyError("the node takes no requests now", hint="try again, or another node")
    if status == app_pb2.STATUS_DEADLINE_EXCEEDED:
        return PeerTimeoutError("the node's time limit for the request passed")
    name = app_pb2.Status.Name(status) if status in app_pb2.Status.values() else "STATUS_UNSPECIFIED"
    if status in _REFUSALS:
        return RequestRefusedError(_REFUSALS[status], status=name, detail=done.detail)
    return NodeFailedError(_FAILURES.get(status, "the node failed"), status=name)


def from_code(code: str) -> TieError:
    """The error of an ingress's reply (docs/envelope.md lists the codes)."""
    match code:
        case "busy" | "unavailable":
            return NodeBusyError("the node takes no requests now", hint="try again, or another node")
        case "too_large":
            return RequestRefusedError("the request is over the node's limit", status=code)
        case "refused" | "replayed" | "unknown_key" | "unknown_node" | "bad_version":
            return EnvelopeRefusedError(f"the node did not take the sealed request ({code})", code=code)
        case "deadline" | "timeout":
            return PeerTimeoutError("the request took too long")
        case "truncated":
            return TruncatedError("the request did not arrive whole")
        case "failed":
            return NodeFailedError("the node lost the request", status=code)
        case "bad_frame" | "bad_request" | "headers_too_large":
            return RequestRefusedError("the ingress did not understand the request", status=code)
        case _:
            return UnreachableError("the address answers, but not as a node's ingress")
