"""HTTP as both clients use it: connections, paths, deadlines, and what httpx's errors mean here.

Every request has a connection of its own. httpcore does not reset an HTTP/2 stream whose response is closed early, so
only the end of the connection tells the node that nobody waits any more; and an answer that is read slowly holds up no
other.
"""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Final

import httpx

from tie.daemon.errors import ConfigError, PeerTimeoutError
from tie.device.errors import TruncatedError, UnreachableError

NODE_PATH: Final = "/v1/node"
STATEMENT_KEY_PATH: Final = "/v1/statement-key"
REQUESTS_PATH: Final = "/v1/requests"
_CONNECT_S: Final = 10.0
_WRITE_S: Final = 60.0
STATEMENT_S: Final = 15.0
_HINT: Final = "for example http://127.0.0.1:8443"


class Address:
    """Where a node's ingress is, and how to connect to it."""

    def __init__(self, url: str, silence_s: float) -> None:
        """Checks the address.

        Args:
            url: http (HTTP/2 by prior knowledge) or https.
            silence_s: the longest time without a byte of an answer.

        Raises:
            ConfigError: `url` is no such address.
        """
        try:
            parsed = httpx.URL(url)
        except (httpx.InvalidURL, TypeError) as error:
            raise ConfigError("the node's address is not a URL", hint=_HINT) from error
        if parsed.scheme not in {"http", "https"} or not parsed.host:
            raise ConfigError("the node's address is not an http or https URL", hint=_HINT)
        self._url = parsed
        self._timeout = httpx.Timeout(connect=_CONNECT_S, read=silence_s, write=_WRITE_S, pool=_CONNECT_S)
        # Made once, and only where it is used: reading the certificate store takes tens of milliseconds.
        self._tls = (
            ssl.create_default_context() if parsed.scheme == "https" else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        )

    def client(self) -> httpx.Client:
        """For one request."""
        return httpx.Client(
            base_url=self._url, http1=False, http2=True, timeout=self._timeout, trust_env=False, verify=self._tls
        )

    def async_client(self) -> httpx.AsyncClient:
        """For one request."""
        return httpx.AsyncClient(
            base_url=self._url, http1=False, http2=True, timeout=self._timeout, trust_env=False, verify=self._tls
        )


class Stage(Enum):
    """How far an exchange has come, which says what its breaking off means."""

    ASKING = "asking"  # for a statement: nothing private is under way
    SENDING = "sending"  # a request, until its answer begins
    ANSWERING = "answering"


@contextmanager
def mapped(stage: Stage) -> Iterator[None]:
    """Turns httpx's errors into ours."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise UnreachableError("no node answers at this address") from error
    except UnreachableError as error:
        error.sent = stage is not Stage.ASKING  # whoever replied has seen the request
        raise
    except httpx.TimeoutException as error:
        if stage is Stage.ASKING:
            raise UnreachableError("the node did not answer in time") from error
        raise PeerTimeoutError("the node did not answer in time") from error
    except httpx.TransportError as error:
        if stage is Stage.ANSWERING:
            raise TruncatedError("the answer stopped before its end") from error
        raise UnreachableError("no node answers at this address", sent=stage is Stage.SENDING) from error
