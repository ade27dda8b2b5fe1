"""What the jobhelper may say, in which order, and how much of it.

`open` once, `body` until one is marked last, at most one `abort` at any time: the table below is the whole order, and
what is not in it is a protocol error.
"""

import asyncio
import enum
import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Self

from tie.app.outcome import RefusalError
from tie.daemon.config import AppConfig
from tie.daemon.errors import PeerDiedError, PeerTimeoutError, ProtocolError
from tie.daemon.frames import FrameTooLargeError, read_message
from tie.proto import app_pb2

_DEK_BYTES = 32
_REQUEST_ID_LENGTH = 64
_LINGER_S = 0.5


class State(enum.Enum):
    """How far the jobhelper has come."""

    WAITING = "waiting"  # connected ahead of time: no request yet
    READING = "reading"  # open seen: the body is coming
    COMPLETE = "complete"  # the whole request is here
    ABORTED = "aborted"


_ORDER: Final = MappingProxyType(
    {
        (State.WAITING, "open"): State.READING,
        (State.WAITING, "abort"): State.ABORTED,
        (State.READING, "body"): State.READING,
        (State.READING, "last"): State.COMPLETE,
        (State.READING, "abort"): State.ABORTED,
        (State.COMPLETE, "abort"): State.ABORTED,
    }
)


@dataclass(frozen=True)
class Limits:
    """What this request may use: the node's limits, each of which `open` can only lower."""

    request_bytes: int
    output_tokens: int
    time_s: float

    @classmethod
    def of(cls, config: AppConfig, asked: app_pb2.Limits) -> Self:
        """The lower of the two, where zero asks for nothing."""
        return cls(
            request_bytes=min(config.max_request_bytes, asked.max_request_bytes or config.max_request_bytes),
            output_tokens=min(config.max_output_tokens, asked.max_output_tokens or config.max_output_tokens),
            time_s=min(config.time_limit_s, asked.time_limit_ms / 1000 or config.time_limit_s),
        )


class Incoming:
    """The jobhelper's side of the conversation.

    Attributes:
        state: how far it has come.
    """

    def __init__(self, reader: asyncio.StreamReader, config: AppConfig) -> None:
        self.state = State.WAITING
        self._reader = reader
        self._config = config

    async def open(self) -> app_pb2.Open | None:
        """Waits, as long as it takes, for the request; None when the jobhelper left without one.

        Raises:
            RefusalError: it said something else, or an `open` that cannot be.
        """
        message = await self._next(idle=math.inf)
        if message is None:
            return None
        opened = message.open
        if len(opened.dek) != _DEK_BYTES:
            raise _violation("open.dek is not 32 bytes")
        if not 0 < len(opened.request_id) <= _REQUEST_ID_LENGTH:
            raise _violation(f"open.request_id is empty or over {_REQUEST_ID_LENGTH} characters")
        return opened

    async def body(self, limit: int) -> bytes:
        """The whole request body.

        Raises:
            RefusalError: larger than `limit` bytes, too slow, cut short, aborted or out of order.
        """
        body = bytearray()
        while self.state is not State.COMPLETE:
            message = await self._next(idle=self._config.idle_timeout_s)
            if message is None:
                raise _violation("the request ended before its last part")
            body += message.body.data
            if len(body) > limit:
                raise RefusalError(app_pb2.STATUS_REQUEST_TOO_LARGE, f"the request is over {limit} bytes")
        return bytes(body)

    async def watch(self) -> None:
        """Returns never: raises when the jobhelper ends a request that is being answered.

        Raises:
            RefusalError: it aborted, left, or broke the order.
        """
        while await self._next(idle=math.inf) is not None:
            continue  # nothing that follows the last part is in the table, so a message here has raised
        raise RefusalError(app_pb2.STATUS_CANCELLED, "the connection ended")

    async def linger(self) -> None:
        """After a refusal in the middle of a request: reads what is still on its way, for a moment.

        A peer that is still writing would see its own write fail before it sees the answer.
        """
        if self.state in {State.COMPLETE, State.ABORTED}:
            return
        try:
            async with asyncio.timeout(_LINGER_S):
                while await self._reader.read(1 << 16):
                    continue
        except (TimeoutError, ConnectionError):
            return

    async def _next(self, *, idle: float) -> app_pb2.AppIn | None:
        limit = self._config.max_message_bytes
        try:
            message = await read_message(
                self._reader, app_pb2.AppIn, limit=limit, timeout=self._config.idle_timeout_s, idle=idle
            )
        except FrameTooLargeError:
            raise RefusalError(app_pb2.STATUS_REQUEST_TOO_LARGE, f"a message is over {limit} bytes") from None
        except PeerDiedError:
            raise _violation("the stream ended inside a message") from None
        except PeerTimeoutError:
            raise RefusalError(app_pb2.STATUS_DEADLINE_EXCEEDED, "the request stopped arriving") from None
        except ProtocolError:
            raise _violation("not a message") from None
        if message is None:
            return None
        kind = "last" if message.body.last else message.WhichOneof("kind") or "an empty message"
        following = _ORDER.get((self.state, kind))
        if following is None:
            raise _violation(f"{kind} while {self.state.value}")
        self.state = following
        if following is State.ABORTED:
            raise RefusalError(app_pb2.STATUS_CANCELLED, "aborted")
        return message


def _violation(why: str) -> RefusalError:
    return RefusalError(app_pb2.STATUS_PROTOCOL_ERROR, why)
