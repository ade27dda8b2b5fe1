"""What a server answers that is not an answer of its application: a status and a fixed text for each code.

The codes of `FAULTS` are the server's own; every application has them in its table, beside its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from tie.daemon.errors import TieError


@dataclass(frozen=True)
class Text:
    """An HTTP status and a fixed text."""

    status: int
    message: str


FAULTS: Final = MappingProxyType(
    {
        "bad_request": Text(400, "what arrived is not HTTP as this server speaks it"),
        "truncated": Text(400, "the request ended before its end"),
        "timeout": Text(408, "the request stopped arriving"),
        "headers_too_large": Text(431, "the request's head is over the server's limit"),
    }
)


@dataclass(frozen=True)
class Reply:
    """A whole response.

    Attributes:
        status: the HTTP status.
        body: JSON.
        headers: beside those that every response has; names in lower case.
    """

    status: int
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()


Replies = Callable[[str], Reply]


class RefusedRequestError(TieError):
    """A request ends with the reply of a code.

    Attributes:
        code: which.
    """

    def __init__(self, code: str) -> None:
        super().__init__(f"the request is refused: {code}")
        self.code = code
