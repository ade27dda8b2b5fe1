"""What a fuzzer says on the sockets between CloudBoard, jobhelper and app: frames, and the order of what is in them."""

import asyncio
import contextlib
from typing import Any, Final

from tie.app.frames import Incoming
from tie.app.outcome import RefusalError
from tie.cloudboard.relay import IngressGoneError, JobEndedError, Link, read_app, read_ingress
from tie.daemon import frames
from tie.daemon.config import AppConfig
from tie.daemon.errors import PeerDiedError, PeerError, ProtocolError
from tie.envelope.frames import FrameSplitter
from tie.proto import app_pb2

LIMIT: Final = 64
CONFIG: Final = AppConfig(max_message_bytes=512, buckets=(64, 128, 1024))
_REQUEST_BYTES: Final = 300
_S: Final = 5.0
_REFUSALS: Final = {app_pb2.STATUS_PROTOCOL_ERROR, app_pb2.STATUS_CANCELLED, app_pb2.STATUS_REQUEST_TOO_LARGE}
_LOOP: Final = asyncio.new_event_loop()


def frames_(data: bytes) -> None:
    """The lowest bits of byte 0 say who hears what comes after byte 1.

    0: both splitters, which must agree, in pieces of byte 1; 1: the app; 2: the jobhelper, from an app; 3: the
    jobhelper, from the ingress.
    """
    if len(data) < 2:
        return
    rest = data[2:]
    match data[0] & 3:
        case 0:
            _LOOP.run_until_complete(_split(rest, data[1] or 256))
        case 1:
            _LOOP.run_until_complete(_asked(rest))
        case 2:
            _LOOP.run_until_complete(_of_app(rest))
        case _:
            _LOOP.run_until_complete(_of_ingress(rest, may_end=bool(data[1] & 1)))


def _reader(data: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return reader


async def _split(data: bytes, size: int) -> None:
    splitter, reader = FrameSplitter(LIMIT), _reader(data)
    pushed, pulled, over, ended = [], [], False, False
    try:
        for at in range(0, len(data), size):
            pushed += list(splitter.feed(data[at : at + size]))
    except ProtocolError:
        over = True
    try:
        while (payload := await frames.read_bytes(reader, limit=LIMIT, timeout=_S)) is not None:
            pulled.append(payload)
        ended = True
    except frames.FrameTooLargeError:
        assert over
    except PeerDiedError:
        assert splitter.inside
    assert ended == (not over and not splitter.inside)
    # Whoever pushes loses what came in the same piece as a length that cannot be.
    assert pushed == pulled or (over and pulled[: len(pushed)] == pushed)
    assert all(len(payload) <= LIMIT for payload in pulled)


async def _asked(data: bytes) -> None:
    """A request that the app takes is one that was sent in the right order."""
    incoming, refusal, opened, body = Incoming(_reader(data), CONFIG), None, None, b""
    try:
        opened = await incoming.open()
        body = b"" if opened is None else await incoming.body(_REQUEST_BYTES)
    except RefusalError as error:
        refusal = error
    if refusal is not None:
        assert refusal.status in _REFUSALS
        return
    if opened is None:
        assert not data
        return
    assert len(opened.dek) == 32
    said = map(app_pb2.AppIn.FromString, _whole(data))  # as far as the request goes: what follows may be no message
    assert next(said).open == opened
    parts = []
    while not parts or not parts[-1].last:
        parts.append(next(said).body)
    assert body == b"".join(part.data for part in parts)
    assert len(body) <= _REQUEST_BYTES
    with contextlib.suppress(RefusalError):
        await incoming.watch()
        raise AssertionError("the end of the connection was not noticed")


def _whole(data: bytes) -> list[bytes]:
    found = []
    with contextlib.suppress(ProtocolError):
        for payload in FrameSplitter(CONFIG.max_message_bytes).feed(data):
            found.append(payload)  # noqa: PERF402 (what was found before the error counts)
    return found


def _link(data: bytes) -> Link:
    writer: Any = None  # nothing is said back
    return Link(_reader(data), writer)


async def _of_app(data: bytes) -> None:
    link = _link(data)
    with contextlib.suppress(PeerError):
        while True:
            kind, payload = await read_app(CONFIG, link, _S)
            assert kind in {"ready", "delta", "done"}
            assert len(payload) in CONFIG.buckets
            assert app_pb2.AppOut.FromString(payload).WhichOneof("kind") == kind


async def _of_ingress(data: bytes, *, may_end: bool) -> None:
    link = _link(data)
    with contextlib.suppress(IngressGoneError, JobEndedError):
        while True:
            message = await read_ingress(link, _S, may_end=may_end)
            assert message.WhichOneof("kind") in {"open", "segment"}
