"""Which statement key a device believes: a pinned one or, only when told so, the first one that it is given."""

import contextlib
import time
from pathlib import Path
from typing import Final

from tie.daemon.errors import ConfigError, ProtocolError
from tie.daemon.frames import parse
from tie.device.errors import UnreachableError
from tie.envelope import statement
from tie.envelope.statement import STATEMENT_KEY_BYTES, NodeKey
from tie.proto import kps_pb2

_RENEW_S: Final = 30.0  # a statement that ends within this time is fetched anew: sealing and sending take a while
MAX_REPLY_BYTES: Final = 64 * 1024


class Trust:
    """The pinned statement key.

    Attributes:
        pinned: the raw key, or None before first use.
    """

    def __init__(self, statement_key: bytes | str | Path | None, *, trust_on_first_use: bool) -> None:
        """Reads the key.

        Raises:
            ConfigError: there is neither a key nor permission to trust one, or the key file cannot be.
        """
        if statement_key is None and not trust_on_first_use:
            raise ConfigError(
                "no statement key to verify the node with",
                hint="give the fleet's statement.pub (a file or 32 bytes), or say trust_on_first_use=True",
            )
        self.pinned = None if statement_key is None else _read(statement_key)
        self._file = None if statement_key is None or isinstance(statement_key, bytes) else Path(statement_key)

    @staticmethod
    def holds(key: NodeKey) -> bool:
        """Whether a verified key is good for some time yet."""
        return time.time() + _RENEW_S < key.not_after

    def pin(self, key: bytes) -> None:
        """Trusts `key`, on first use.

        Raises:
            UnreachableError: it is no statement key.
        """
        if len(key) != STATEMENT_KEY_BYTES:
            raise UnreachableError("the address answers, but not as a node's ingress")
        self.pinned = key

    def verify(self, received: bytes) -> NodeKey:
        """The key that a statement vouches for.

        What is trusted is what the key's file says, if it is one: it is read again where the statement does not verify,
        for a node on this machine makes its keys anew when it starts.

        Raises:
            StatementError: it is not to be believed.
            UnreachableError: it is no statement.
        """
        try:
            message = parse(received, kps_pb2.KeyStatement)
        except ProtocolError:
            raise UnreachableError("the address answers, but not as a node's ingress") from None
        try:
            return statement.verify(message, self.pinned or b"", now=time.time())
        except statement.StatementError:
            if not self._renewed():
                raise
        return statement.verify(message, self.pinned or b"", now=time.time())

    def _renewed(self) -> bool:
        """Whether the key's file has another key by now, which then is pinned."""
        before = self.pinned
        if self._file is not None:
            with contextlib.suppress(ConfigError):  # gone, or just being written
                self.pinned = _read(self._file)
        return self.pinned != before


def _read(source: bytes | str | Path) -> bytes:
    if isinstance(source, bytes):
        key = source
    else:
        try:
            key = Path(source).read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read the statement key {source}: {error.strerror}") from error
    if len(key) != STATEMENT_KEY_BYTES:
        raise ConfigError(
            f"the statement key is {len(key)} bytes, not {STATEMENT_KEY_BYTES}", hint="it is the node's statement.pub"
        )
    return key
