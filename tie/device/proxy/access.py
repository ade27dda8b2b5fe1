"""Who may ask: programs on this machine. What a web page in a browser could send is refused."""

import hmac
from dataclasses import dataclass
from typing import Final

from tie.device.proxy.failures import fault
from tie.http.exchange import Exchange

_NAMES: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})
LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, repr=False)
class Access:
    """The rules.

    Attributes:
        api_key: that every request must bring, or empty.
        local: whether the server listens on loopback, and so is called by one of its names. A page whose own name is
            made to lead here (DNS rebinding) calls it by another one.
    """

    api_key: bytes = b""
    local: bool = True

    def check(self, exchange: Exchange) -> None:
        """Checks one request.

        Raises:
            ApiError: it may not ask.
        """
        host = (exchange.header(b"host") or exchange.header(b":authority")).decode("ascii", "replace")
        if self.local and _name(host) not in _NAMES:
            raise fault("forbidden")
        if self.api_key:
            kind, _, given = exchange.header(b"authorization").partition(b" ")
            if kind.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self.api_key):
                raise fault("unauthorized")
        # Pages may send some types to anybody without asking, this one not (the Fetch standard's "simple" requests).
        media = exchange.header(b"content-type").partition(b";")[0].strip().lower()
        if exchange.method == "POST" and media != b"application/json":
            raise fault("bad_type")


def _name(host: str) -> str:
    """Without the port."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).lower()
