"""A sealed request's HTTP body: a header frame, then segment frames, checked as they come."""

from collections.abc import AsyncIterator
from typing import Final

from tie.cloudboard.uploads import Upload
from tie.daemon import frames
from tie.daemon.errors import ProtocolError
from tie.envelope import sealing
from tie.envelope.frames import FrameSplitter
from tie.envelope.stream import Direction
from tie.http.exchange import Exchange
from tie.http.reply import RefusedRequestError
from tie.proto import envelope_pb2

_MAX_MODEL_CHARACTERS: Final = 256


async def receive(exchange: Exchange, node_id: str, upload: Upload) -> envelope_pb2.SealedHeader:
    """Reads one body to its end; its segments are in `upload` then.

    Raises:
        RefusedRequestError: it is malformed, cut short, too large or too slow, or there is no memory for it.
    """
    declared = exchange.header(b"content-length")
    if declared.isdigit() and int(declared[:20]) > upload.largest:
        raise RefusedRequestError("too_large")
    header, last = None, False
    async for message in _messages(exchange, upload):
        kind = message.WhichOneof("kind")
        if header is None and kind == "header":
            _check(message.header, node_id)
            header = message.header
        elif header is not None and kind == "segment" and not last:
            last = message.segment.last
            upload.add(message.segment)
        else:
            raise RefusedRequestError("bad_frame")
    if header is None:
        raise RefusedRequestError("bad_frame")
    if not last:
        raise RefusedRequestError("truncated")
    return header


def _check(header: envelope_pb2.SealedHeader, node_id: str) -> None:
    if header.version != sealing.VERSION:
        raise RefusedRequestError("bad_version")
    if header.node_id != node_id:
        raise RefusedRequestError("unknown_node")
    if (
        len(header.key_id) != sealing.KEY_ID_BYTES
        or len(header.sealed_dek) != sealing.SEALED_DEK_BYTES
        or len(header.model) > _MAX_MODEL_CHARACTERS
    ):
        raise RefusedRequestError("bad_frame")


async def _messages(exchange: Exchange, upload: Upload) -> AsyncIterator[envelope_pb2.SealedIn]:
    splitter, room = FrameSplitter(Direction.REQUEST.max_frame_bytes), upload.largest
    async for chunk in exchange.chunks(upload.pace):
        room -= len(chunk)
        if room < 0:
            raise RefusedRequestError("too_large")
        upload.count(len(chunk))
        try:
            for payload in splitter.feed(chunk):
                yield frames.parse(payload, envelope_pb2.SealedIn)
        except ProtocolError:
            raise RefusedRequestError("bad_frame") from None
    if splitter.inside:
        raise RefusedRequestError("truncated")
