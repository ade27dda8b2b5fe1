"""Length-prefixed protobuf on a stream socket: 4-byte big-endian length, then that many bytes.

The format of the app's socket and of the jobhelper's. Both ends bound the size of one frame before they read it, and
every wait has a deadline.
"""

import asyncio
import struct
from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message

from tie.daemon.errors import PeerDiedError, PeerTimeoutError, ProtocolError

PREFIX: Final = struct.Struct(">I")
M = TypeVar("M", bound=Message)


class FrameTooLargeError(ProtocolError):
    """A peer announced a frame over the limit."""


async def read_bytes(
    reader: asyncio.StreamReader, *, limit: int, timeout: float, idle: float | None = None
) -> bytes | None:
    """One frame's payload, or None at a clean end of the stream.

    Args:
        reader: the stream.
        limit: the largest payload taken, in bytes.
        timeout: seconds for the whole frame once its first byte is there.
        idle: seconds until its first byte; as `timeout` when absent, `math.inf` for a peer that may stay silent.

    Raises:
        FrameTooLargeError: the announced length is over `limit` bytes; nothing of it was read.
        PeerDiedError: the stream ended inside a frame.
        PeerTimeoutError: `idle` or `timeout` seconds passed.
    """
    try:
        async with asyncio.timeout(timeout if idle is None else idle):
            first = await reader.read(1)
        if not first:
            return None
        async with asyncio.timeout(timeout):
            (length,) = PREFIX.unpack(first + await reader.readexactly(PREFIX.size - 1))
            if length > limit:
                raise FrameTooLargeError("frame over the size limit")
            return await reader.readexactly(length)
    except TimeoutError:
        raise PeerTimeoutError("no frame within the deadline") from None
    except (asyncio.IncompleteReadError, ConnectionError):
        raise PeerDiedError("the stream ended inside a frame") from None


async def read_message(
    reader: asyncio.StreamReader, kind: type[M], *, limit: int, timeout: float, idle: float | None = None
) -> M | None:
    """One message of type `kind`, or None at a clean end.

    Raises:
        ProtocolError: the payload is not such a message. (And what `read_bytes` raises.)
    """
    payload = await read_bytes(reader, limit=limit, timeout=timeout, idle=idle)
    return None if payload is None else parse(payload, kind)


def parse(payload: bytes, kind: type[M]) -> M:
    """Decodes one message.

    Raises:
        ProtocolError: `payload` is not a message of type `kind`.
    """
    message = kind()
    try:
        message.ParseFromString(payload)
    except DecodeError:
        # The library's text may quote bytes of the payload.
        raise ProtocolError("not a message of the expected type") from None
    return message


def frame(payload: bytes) -> bytes:
    """The bytes of one frame."""
    return PREFIX.pack(len(payload)) + payload


async def write_message(writer: asyncio.StreamWriter, message: Message, *, timeout: float) -> None:
    """Sends one message.

    Raises:
        PeerDiedError: the peer is gone.
        PeerTimeoutError: the peer did not take it within `timeout` seconds.
    """
    await write_bytes(writer, message.SerializeToString(), timeout=timeout)


async def write_bytes(writer: asyncio.StreamWriter, *payloads: bytes, timeout: float) -> None:
    """Sends one frame for each payload; a cancelled call has sent all of them. Raises as `write_message`."""
    await write_frames(writer, b"".join(frame(payload) for payload in payloads), timeout=timeout)


async def write_frames(writer: asyncio.StreamWriter, data: bytes, *, timeout: float) -> None:
    """Sends what are frames already, or a part of them; otherwise as `write_bytes`."""
    try:
        writer.write(data)
        async with asyncio.timeout(timeout):
            await writer.drain()
    except TimeoutError:
        raise PeerTimeoutError("the peer does not read") from None
    except ConnectionError:
        raise PeerDiedError("the peer is gone") from None
