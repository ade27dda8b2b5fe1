"""One accepted request between ingress and app: segments opened one way, the app's padded frames sealed the other."""

import asyncio
from typing import Final

from google.protobuf.message import Message

from tie.daemon import frames, log
from tie.daemon.config import AppConfig
from tie.daemon.errors import PeerDiedError, PeerError, PeerTimeoutError, ProtocolError
from tie.daemon.padding import pad
from tie.envelope import stream
from tie.envelope.errors import EnvelopeError
from tie.proto import app_pb2, envelope_pb2

WRITE_S: Final = 30.0
LINGER_S: Final = 10.0  # the ingress closes at once; on a machine that is late with everything it must still hear
GRACE_S: Final = 10.0  # beyond the limits that others keep: they say by themselves that time is up
_BODY_OVERHEAD: Final = 32  # of an AppIn around the bytes it carries
_LIMIT: Final = stream.Direction.REQUEST.max_frame_bytes


class JobEndedError(Exception):
    """The job is over with a status for the ingress."""

    def __init__(self, status: "envelope_pb2.JobStatus.ValueType") -> None:
        super().__init__(envelope_pb2.JobStatus.Name(status))
        self.status = status


class IngressGoneError(Exception):
    """The ingress aborted, died or misbehaved: there is nobody to answer."""


class Link:
    """One framed connection.

    Attributes:
        reader: the incoming half.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer

    async def send(self, message: Message) -> None:
        """Sends one message. Raises as `frames.write_message`."""
        await frames.write_message(self._writer, message, timeout=WRITE_S)

    async def linger(self) -> None:
        """Reads and drops what still comes, until the other end closes or `LINGER_S` are over.

        A socket that is closed while bytes still come to it breaks the other end's connection, and with that is lost
        what we said last and was not read yet.
        """
        try:
            async with asyncio.timeout(LINGER_S):
                while await self.reader.read(_LIMIT):
                    pass
        except (TimeoutError, ConnectionError):
            return

    def close(self) -> None:
        """Closes both halves."""
        self._writer.close()


class Answer:
    """The response on its way to the ingress: the salt once, then sealed segments."""

    def __init__(self, ingress: Link, sealer: stream.Sealer, salt: bytes) -> None:
        self._ingress = ingress
        self._sealer = sealer
        self._salt = salt
        self._started = False

    async def accept(self) -> None:
        """Sends the salt, unless it is out already: the request is accepted.

        Raises:
            IngressGoneError: nobody takes it.
        """
        if not self._started:
            self._started = True
            await self._deliver(envelope_pb2.JobOut(salt=self._salt))

    async def send(self, payload: bytes, *, last: bool) -> None:
        """Seals and sends one padded frame of the app. Raises as `accept`."""
        await self.accept()
        segment = stream.pack_segment(self._sealer.seal(payload, last=last), last=last)
        await self._deliver(envelope_pb2.JobOut(segment=segment))

    def close(self) -> None:
        """Drops the key."""
        self._sealer.close()

    async def _deliver(self, message: envelope_pb2.JobOut) -> None:
        try:
            await self._ingress.send(message)
        except PeerError:
            raise IngressGoneError from None


async def relay(config: AppConfig, ingress: Link, app: Link, opener: stream.Opener, answer: Answer) -> None:
    """Carries one request from its `open` to its `done`; returns when a response has been sent to its end.

    Raises:
        JobEndedError: the request does not verify, is cut short or too large.
        IngressGoneError: nobody waits for the answer any more; the app has been told.
    """
    upload = asyncio.create_task(_upload(config, ingress, app, opener, answer))
    download = asyncio.create_task(_download(config, app, answer))
    try:
        await asyncio.wait({upload, download}, return_when=asyncio.FIRST_COMPLETED)
        if not download.done():
            await upload  # returns only when the app is gone, which the download sees as well
        await download
    except (JobEndedError, IngressGoneError):
        await abort(app)
        raise
    finally:
        await cancel(upload, download)
        opener.close()
        answer.close()


async def read_ingress(ingress: Link, timeout: float, *, may_end: bool = False) -> envelope_pb2.JobIn:
    """The ingress's next message.

    Raises:
        IngressGoneError: it aborted, died, misbehaved or stayed silent for `timeout` seconds.
        JobEndedError: with `may_end`, when it ended its half cleanly: the device's request was cut short.
    """
    try:
        message = await frames.read_message(ingress.reader, envelope_pb2.JobIn, limit=_LIMIT, timeout=timeout)
    except PeerError:
        raise IngressGoneError from None
    if message is None and may_end:
        raise JobEndedError(envelope_pb2.JOB_TRUNCATED)
    if message is None or message.WhichOneof("kind") in {"abort", None}:
        raise IngressGoneError
    return message


async def read_app(config: AppConfig, app: Link, timeout: float) -> tuple[str, bytes]:
    """The app's next frame: its kind ("ready", "delta" or "done") and its bytes.

    Raises:
        PeerDiedError: the app ended.
        PeerTimeoutError: it said nothing for `timeout` seconds.
        ProtocolError: the frame's size is no bucket, or it is no message.
    """
    payload = await frames.read_bytes(app.reader, limit=config.buckets[-1], timeout=timeout)
    if payload is None:
        raise PeerDiedError("the app ended")
    if len(payload) not in config.buckets:
        raise ProtocolError("a frame of the app has a size that is no bucket")
    kind = frames.parse(payload, app_pb2.AppOut).WhichOneof("kind")
    if kind is None:
        raise ProtocolError("a frame of the app says nothing")
    return kind, payload


async def abort(app: Link) -> None:
    """Tells the app to stop, if it is still there."""
    try:
        await app.send(app_pb2.AppIn(abort=app_pb2.Abort()))
    except PeerError:
        return  # gone already, which is what was wanted


async def cancel(*tasks: "asyncio.Task[object]") -> None:
    """Cancels tasks and waits until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _upload(config: AppConfig, ingress: Link, app: Link, opener: stream.Opener, answer: Answer) -> None:
    """Opens the request for the app, then watches for the ingress's end. Returns only when the app is gone.

    Nothing of a request reaches the app before its last segment has verified: what was changed, reordered or cut short
    on the way is refused unseen.
    """
    request = bytearray()  # one buffer: pieces of it, each an object, would cost what no limit here counts
    while not opener.ended:
        message = await read_ingress(ingress, config.idle_timeout_s + GRACE_S, may_end=True)
        try:
            request += opener.open(message.segment.ciphertext, last=message.segment.last)
        except EnvelopeError:
            raise JobEndedError(envelope_pb2.JOB_REFUSED) from None
        if len(request) > config.max_request_bytes:
            raise JobEndedError(envelope_pb2.JOB_TOO_LARGE)
    try:
        await _forward(config, app, request)
    except PeerDiedError:
        return  # what it still said, or that it said nothing, is the download's to tell
    except PeerTimeoutError:
        raise JobEndedError(envelope_pb2.JOB_FAILED) from None
    await answer.accept()
    await read_ingress(ingress, config.time_limit_s + 2 * GRACE_S)
    raise IngressGoneError  # nothing but an abort may follow the last segment


async def _forward(config: AppConfig, app: Link, request: bytearray) -> None:
    """Sends the request in messages that the app takes. Raises as `Link.send`."""
    step = max(1, config.max_message_bytes - _BODY_OVERHEAD)
    for start in range(0, max(1, len(request)), step):
        body = app_pb2.Body(data=bytes(request[start : start + step]), last=start + step >= len(request))
        await app.send(app_pb2.AppIn(body=body))


async def _download(config: AppConfig, app: Link, answer: Answer) -> None:
    """Seals the app's frames towards the device until `done`: the app's own, or one in its place."""
    limit = config.time_limit_s + GRACE_S
    try:
        async with asyncio.timeout(limit):
            while True:
                kind, payload = await read_app(config, app, limit)
                if kind == "ready":
                    break  # a second one: out of order
                await answer.send(payload, last=kind == "done")
                if kind == "done":
                    return
        status = app_pb2.STATUS_PROTOCOL_ERROR
    except PeerDiedError as error:
        log.failure("job.app-died", error)
        status = app_pb2.STATUS_APP_DIED
    except (PeerTimeoutError, TimeoutError):
        log.event("job.app-silent")
        status = app_pb2.STATUS_DEADLINE_EXCEEDED
    except ProtocolError as error:
        # Fail closed: a frame of a wrong size could say something by its size alone.
        log.failure("job.app-misbehaved", error)
        status = app_pb2.STATUS_PROTOCOL_ERROR
    await answer.send(pad(app_pb2.AppOut(done=app_pb2.Done(status=status)), config.buckets), last=True)
    await abort(app)
