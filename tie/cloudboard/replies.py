"""What the ingress answers when it does not answer with a sealed response: one table (also in docs/envelope.md)."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import msgspec

from tie.daemon.errors import TieError
from tie.proto import envelope_pb2

RETRY_AFTER_S: Final = 1


@dataclass(frozen=True)
class Reply:
    """An HTTP status and a fixed text."""

    status: int
    message: str


REPLIES: Final = MappingProxyType(
    {
        "bad_request": Reply(400, "what arrived is not HTTP as this server speaks it"),
        "bad_frame": Reply(400, "the request body is not a header frame followed by segment frames"),
        "bad_version": Reply(400, "the sealed protocol's version is not served here"),
        "truncated": Reply(400, "the request ended before its last segment"),
        "refused": Reply(400, "the sealed request does not open"),
        "not_found": Reply(404, "no such resource"),
        "unknown_node": Reply(404, "the request is sealed for another node"),
        "bad_method": Reply(405, "this resource does not take this method"),
        "timeout": Reply(408, "the request stopped arriving"),
        "unknown_key": Reply(409, "the node has another key now: fetch its statement again and seal anew"),
        "replayed": Reply(409, "this envelope has been used before: seal anew"),
        "too_large": Reply(413, "the request is over the node's limit"),
        "headers_too_large": Reply(431, "the request's head is over the server's limit"),
        "failed": Reply(502, "the node lost the request"),
        "busy": Reply(503, "the node takes no requests now: try another, or again"),
        "unavailable": Reply(503, "the node's key protection service does not answer: try again"),
        "deadline": Reply(504, "the request took too long"),
    }
)

# What a client may send again, anywhere: nobody has read anything of the request.
UNREAD: Final = frozenset({"busy", "unavailable", "unknown_key"})

JOB_CODES: Final = MappingProxyType(
    {
        envelope_pb2.JOB_REFUSED: "refused",
        envelope_pb2.JOB_REPLAYED: "replayed",
        envelope_pb2.JOB_UNKNOWN_KEY: "unknown_key",
        envelope_pb2.JOB_BUSY: "busy",
        envelope_pb2.JOB_TRUNCATED: "truncated",
        envelope_pb2.JOB_TOO_LARGE: "too_large",
        envelope_pb2.JOB_UNAVAILABLE: "unavailable",
        envelope_pb2.JOB_FAILED: "failed",
    }
)


class RefusedRequestError(TieError):
    """A request ends with a reply of the table."""

    def __init__(self, code: str) -> None:
        super().__init__(REPLIES[code].message)
        self.code = code


def body(code: str) -> bytes:
    """The JSON body of a reply."""
    return msgspec.json.encode({"error": code, "message": REPLIES[code].message})
