"""A sealed request's HTTP body: a header frame, then segment frames, checked as they come."""

from collections.abc import AsyncIterator
from typing import Final

from tie.cloudboard.exchange import Exchange
from tie.cloudboard.replies import RefusedRequestError
from tie.daemon import frames
from tie.daemon.config import NodeConfig
from tie.daemon.errors import ProtocolError
from tie.envelope import sealing
from tie.envelope.frames import FrameSplitter
from tie.envelope.stream import Direction
from tie.proto import envelope_pb2

_FRAME_LIMIT: Final = Direction.REQUEST.max_ciphertext_bytes + 4096
_MAX_MODEL_CHARACTERS: Final = 256


class SealedBody:
    """Reads one body: first `header`, then `segments`."""

    def __init__(self, exchange: Exchange, config: NodeConfig) -> None:
        self._node_id = config.node_id
        # The jobhelper counts the plaintext exactly; what is turned away here cannot be within the limit.
        self._room = config.app.max_request_bytes + config.app.max_request_bytes // 8 + _FRAME_LIMIT
        self._declared = exchange.header(b"content-length")
        self._messages = self._split(exchange.chunks(config.app.idle_timeout_s))

    async def header(self) -> envelope_pb2.SealedHeader:
        """The header.

        Raises:
            RefusedRequestError: there is none, or it is not for this node. (And what `segments` raises.)
        """
        if self._declared.isdigit() and int(self._declared[:20]) > self._room:
            raise RefusedRequestError("too_large")
        message = await anext(self._messages, None)
        if message is None or message.WhichOneof("kind") != "header":
            raise RefusedRequestError("bad_frame")
        header = message.header
        if header.version != sealing.VERSION:
            raise RefusedRequestError("bad_version")
        if header.node_id != self._node_id:
            raise RefusedRequestError("unknown_node")
        if (
            len(header.key_id) != sealing.KEY_ID_BYTES
            or len(header.sealed_dek) != sealing.SEALED_DEK_BYTES
            or len(header.model) > _MAX_MODEL_CHARACTERS
        ):
            raise RefusedRequestError("bad_frame")
        return header

    async def segments(self) -> AsyncIterator[envelope_pb2.SealedSegment]:
        """The segments, up to the last one or to where the client stopped.

        Raises:
            DisconnectedError: the client went away.
            RefusedRequestError: something else is there, too much, or nothing for too long.
        """
        last = False
        async for message in self._messages:
            if last or message.WhichOneof("kind") != "segment":
                raise RefusedRequestError("bad_frame")
            last = message.segment.last
            yield message.segment

    async def _split(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[envelope_pb2.SealedIn]:
        splitter = FrameSplitter(_FRAME_LIMIT)
        async for chunk in chunks:
            self._room -= len(chunk)
            if self._room < 0:
                raise RefusedRequestError("too_large")
            try:
                for payload in splitter.feed(chunk):
                    yield frames.parse(payload, envelope_pb2.SealedIn)
            except ProtocolError:
                raise RefusedRequestError("bad_frame") from None
        if splitter.inside:
            raise RefusedRequestError("truncated")
