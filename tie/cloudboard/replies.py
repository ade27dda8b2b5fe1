"""What the ingress answers when it does not answer with a sealed response: one table (also in docs/envelope.md)."""

from types import MappingProxyType
from typing import Final

import msgspec

from tie.http.reply import FAULTS, Reply, Text
from tie.proto import envelope_pb2

RETRY_AFTER_S: Final = 1

TEXTS: Final = MappingProxyType(
    {
        **FAULTS,
        "bad_frame": Text(400, "the request body is not a header frame followed by segment frames"),
        "bad_version": Text(400, "the sealed protocol's version is not served here"),
        "refused": Text(400, "the sealed request does not open"),
        "not_found": Text(404, "no such resource"),
        "unknown_node": Text(404, "the request is sealed for another node"),
        "bad_method": Text(405, "this resource does not take this method"),
        "unknown_key": Text(409, "the node has another key now: fetch its statement again and seal anew"),
        "replayed": Text(409, "this envelope has been used before: seal anew"),
        "too_large": Text(413, "the request is over the node's limit"),
        "failed": Text(502, "the node lost the request"),
        "busy": Text(503, "the node takes no requests now: try another, or again"),
        "unavailable": Text(503, "the node's key protection service does not answer: try again"),
        "deadline": Text(504, "the request took too long"),
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


def reply(code: str) -> Reply:
    """The reply of a code."""
    text = TEXTS[code]
    body = msgspec.json.encode({"error": code, "message": text.message})
    headers = ((b"retry-after", b"%d" % RETRY_AFTER_S),) if text.status == 503 else ()
    return Reply(text.status, body, headers)
