"""Splits a byte stream into its length-prefixed frames, without doing any input or output itself."""

import struct
from collections.abc import Iterator
from typing import Final

from tie.daemon.errors import ProtocolError

PREFIX: Final = struct.Struct(">I")


class FrameSplitter:
    """Takes bytes as they come, gives whole frames."""

    def __init__(self, limit: int) -> None:
        """Frames over `limit` bytes are refused before their bytes are kept."""
        self._limit = limit
        self._buffer = bytearray()

    @property
    def inside(self) -> bool:
        """Whether a frame has begun and not ended."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yields the payload of every frame that `data` completes.

        Raises:
            ProtocolError: a frame announces more than the limit.
        """
        self._buffer += data
        while len(self._buffer) >= PREFIX.size:
            (length,) = PREFIX.unpack_from(self._buffer)
            if length > self._limit:
                raise ProtocolError("frame over the size limit")
            end = PREFIX.size + length
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[PREFIX.size : end])
            del self._buffer[:end]
            yield payload


def frame(payload: bytes) -> bytes:
    """The bytes of one frame."""
    return PREFIX.pack(len(payload)) + payload
