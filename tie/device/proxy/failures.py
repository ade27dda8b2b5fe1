"""What went wrong, as OpenAI's clients expect it: an HTTP status and `{"error": {message, type, param, code}}`.

Whether a client should send a request again is said to it (`x-should-retry`, which the official clients obey): only
while nobody can have read anything of it.
"""

import re
from types import MappingProxyType
from typing import Final

import msgspec

from tie.daemon.errors import PeerTimeoutError, ProtocolError, TieError
from tie.device.errors import (
    EnvelopeRefusedError,
    NodeBusyError,
    NodeFailedError,
    RequestRefusedError,
    UnreachableError,
)
from tie.device.nodes import untouched
from tie.envelope.errors import EnvelopeError
from tie.envelope.statement import StatementError
from tie.http.reply import FAULTS, Reply, Text

_RETRY_AFTER_S: Final = 1
_INVALID: Final = "invalid_request_error"
_SERVER: Final = "server_error"


class ApiError(TieError):
    """A request ends with an error. The exception's own text is static: `message` may name what the user wrote.

    Attributes:
        status: of HTTP.
        message: for the user.
        kind: the error's type, as the API has it.
        code: what exactly, in one word.
        param: the field that is to blame, or empty.
        retry: whether the same request may be sent again; None leaves it to the client.
    """

    def __init__(
        self, status: int, message: str, *, kind: str, code: str, param: str = "", retry: bool | None = None
    ) -> None:
        super().__init__(f"the request ends with status {status}, {code}")
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.retry = retry

    @property
    def body(self) -> bytes:
        """As JSON."""
        error = {"message": self.message, "type": self.kind, "param": self.param or None, "code": self.code}
        return msgspec.json.encode({"error": error})

    @property
    def reply(self) -> Reply:
        """As a whole HTTP response."""
        headers = []
        if self.retry is not None:
            headers.append((b"x-should-retry", b"true" if self.retry else b"false"))
        if self.retry:
            headers.append((b"retry-after", b"%d" % _RETRY_AFTER_S))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        return Reply(self.status, self.body, tuple(headers))


def invalid(param: str, why: str) -> ApiError:
    """A field that cannot be as it is."""
    message = f"{param}: {why}" if param else why
    return ApiError(400, message, kind=_INVALID, code="invalid_value", param=param)


def unsupported(param: str, why: str) -> ApiError:
    """A field that this server does not have."""
    return ApiError(400, f"{param}: {why}", kind=_INVALID, code="unsupported_parameter", param=param)


def unservable(param: str, why: str) -> ApiError:
    """A valid wish that cannot be fulfilled here."""
    return ApiError(422, f"{param}: {why}", kind=_INVALID, code="unsupported_value", param=param)


def no_model(model: str, served: str) -> ApiError:
    """A model that nobody serves."""
    message = f"the model {model!r} is not served here; there is: {served}"
    return ApiError(404, message, kind=_INVALID, code="model_not_found", param="model")


# What the HTTP server and the routes say.
_FAULTS: Final = MappingProxyType(
    {
        **FAULTS,
        "unauthorized": Text(401, "the API key is missing or wrong: send `Authorization: Bearer …`"),
        "forbidden": Text(403, "this server answers programs on this machine that call it by a name of this machine"),
        "not_found": Text(404, "no such path"),
        "bad_method": Text(405, "this path does not take this method"),
        "too_large": Text(413, "the request is over the limit"),
        "bad_type": Text(415, "the request's content-type is not application/json"),
    }
)
_KINDS: Final = MappingProxyType({401: "authentication_error", 403: "permission_error"})


def fault(code: str) -> ApiError:
    """The error of one of the HTTP server's codes."""
    text = _FAULTS[code]
    return ApiError(text.status, text.message, kind=_KINDS.get(text.status, _INVALID), code=code, retry=False)


def overloaded() -> ApiError:
    """Too many requests at once; nothing of this one has left."""
    message = "the proxy has as many requests under way as it takes: try again"
    return ApiError(429, message, kind="rate_limit_error", code="proxy_busy", retry=True)


def internal() -> ApiError:
    """A fault of ours."""
    return ApiError(500, "the proxy failed", kind=_SERVER, code="internal_error", retry=False)


# The node's refusals: status of HTTP, code of the API.
_REFUSALS: Final = MappingProxyType(
    {
        "STATUS_UNKNOWN_MODEL": (404, "model_not_found"),
        "STATUS_PROMPT_TOO_LONG": (400, "context_length_exceeded"),
        "STATUS_REQUEST_TOO_LARGE": (413, "too_large"),
        "too_large": (413, "too_large"),
        "STATUS_UNSUPPORTED": (422, "unsupported_value"),
        "STATUS_IMAGE_REFUSED": (422, "image_refused"),
        "STATUS_GRAMMAR_REFUSED": (422, "schema_refused"),
    }
)
# The sealed protocol's names of fields → the API's.
_NAMES: Final = (
    (re.compile(r"^sampling\."), ""),
    (re.compile(r"^constraint\..*"), "response_format"),
    (re.compile(r"\.parameters_json$"), ".function.parameters"),
    (re.compile(r"^(tools\[\d+\])\.(name|description)$"), r"\1.function.\2"),
    (re.compile(r"\.arguments_json$"), ".function.arguments"),
    (re.compile(r"^(messages\[\d+\]\.tool_calls\[\d+\])\.name$"), r"\1.function.name"),
    (re.compile(r"\.parts\b"), ".content"),
    (re.compile(r"\.image$"), ".image_url"),
)
_DETAIL: Final = re.compile(r"([a-z_]+(?:\[\d+\]|\.[a-z_]+)*): (.*)", re.DOTALL)


def from_error(error: TieError, *, accepted: bool) -> ApiError:
    """What a request that failed at a node ends with.

    Args:
        error: of `tie.device`. The message quotes the node's detail, which the user alone may see.
        accepted: whether a node had taken the request: then it may have been read, whatever the error says.
    """
    retry = not accepted and untouched(error)
    match error:
        case ApiError():
            return error
        case NodeBusyError():
            status, code, kind = 429, "node_busy", "rate_limit_error"
        case RequestRefusedError():
            return _refused(error)
        case NodeFailedError(status="STATUS_REPLACED" | "STATUS_RUNTIME_UNAVAILABLE"):
            status, code, kind = 503, "node_restarted", _SERVER
        case NodeFailedError():
            status, code, kind = 500, "node_failed", _SERVER
        case PeerTimeoutError():
            status, code, kind = 504, "timeout", _SERVER
        case UnreachableError():
            status, code, kind = 503, "node_unreachable", _SERVER
        case StatementError() | EnvelopeError():
            status, code, kind = 502, "node_not_trusted", _SERVER
        case EnvelopeRefusedError():
            status, code, kind = 502, "envelope_refused", _SERVER
        case ProtocolError():
            status, code, kind = 502, "bad_answer", _SERVER
        case _:
            status, code, kind = 502, "connection_lost", _SERVER
    return ApiError(status, str(error), kind=kind, code=code, retry=retry)


def _refused(error: RequestRefusedError) -> ApiError:
    status, code = _REFUSALS.get(error.status, (400, "invalid_value"))
    detail = _DETAIL.fullmatch(error.detail)
    param, why = (detail[1], detail[2]) if detail else ("", error.detail or str(error))
    for pattern, name in _NAMES:
        param = pattern.sub(name, param)
    message = f"{param}: {why}" if param else why
    return ApiError(status, message, kind=_INVALID, code=code, param=param, retry=False)
