"""What a server answers that is not an answer of its application: a status and a fixed text for each code.

The texts are the application's. The server itself uses the codes of `FAULTS`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tie.daemon.errors import TieError

FAULTS: Final = ("bad_request", "headers_too_large", "timeout", "truncated")


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
