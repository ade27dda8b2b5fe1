"""CloudBoard's ingress: HTTP from devices, jobhelpers behind it. It sees ciphertext and routing, nothing else.

    GET  /v1/node           the key statement (protobuf; JSON for `Accept: application/json`)
    GET  /v1/statement-key  the public statement key, for devices that are told to trust it on first use
    POST /v1/requests       a sealed request; the sealed response streams back

A request is refused as "busy" before any of its body is read. Once its response has begun there is no other status to
give: the response then simply ends, and the device sees that the last segment is missing.
"""

import asyncio
import math
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from google.protobuf import json_format
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from tie.cloudboard.exchange import DisconnectedError, Exchange, Receive, Scope, Send
from tie.cloudboard.registry import Registry
from tie.cloudboard.replies import JOB_CODES, RefusedRequestError
from tie.cloudboard.standby import Jobhelper, NoJobhelperError, StandbyPool
from tie.cloudboard.statements import NoStatementError, Statements
from tie.daemon import frames, log
from tie.daemon.config import NodeConfig
from tie.daemon.errors import PeerError, ProtocolError
from tie.envelope import sealing
from tie.envelope.frames import FrameSplitter, frame
from tie.envelope.stream import Direction
from tie.proto import envelope_pb2

_FRAME_LIMIT = Direction.REQUEST.max_ciphertext_bytes + 4096
_MAX_MODEL_CHARACTERS = 256


class Metrics:
    """Counts without a trace of anybody's content."""

    def __init__(self, registry: Registry, pool: StandbyPool) -> None:
        self._metrics = CollectorRegistry()
        self.requests = Counter(
            "tie_cloudboard_requests", "Requests, by how they ended", ["code"], registry=self._metrics
        )
        in_flight = Gauge("tie_cloudboard_in_flight", "Requests admitted and not over", registry=self._metrics)
        in_flight.set_function(lambda: registry.in_flight)
        standby = Gauge("tie_cloudboard_standby", "Jobhelpers standing by", registry=self._metrics)
        standby.set_function(lambda: len(pool))

    def text(self) -> str:
        """As Prometheus text."""
        return generate_latest(self._metrics).decode()


class Ingress:
    """The ASGI application."""

    def __init__(
        self, config: NodeConfig, registry: Registry, pool: StandbyPool, statements: Statements, statement_key: bytes
    ) -> None:
        self.metrics = Metrics(registry, pool)
        self._config = config
        self._registry = registry
        self._pool = pool
        self._statements = statements
        self._statement_key = statement_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one ASGI scope."""
        match scope["type"]:
            case "http":
                await self._http(Exchange(scope, receive, send))
            case "lifespan":
                await receive()
                await send({"type": "lifespan.startup.complete"})
                await receive()
                await send({"type": "lifespan.shutdown.complete"})
            case "websocket":
                await send({"type": "websocket.close"})

    async def _http(self, exchange: Exchange) -> None:
        request_id, begun = secrets.token_hex(8), time.monotonic()
        try:
            code = await self._dispatch(exchange, request_id)
        except RefusedRequestError as refusal:
            code = refusal.code
            await (exchange.finish() if exchange.started else exchange.reply(code))
        except DisconnectedError:
            code = "disconnected"
        except Exception as error:  # noqa: BLE001 (the server would end the whole connection)
            code = "failed"
            log.failure("request.failed", error, request_id=request_id)
            await (exchange.finish() if exchange.started else exchange.reply(code))
        self.metrics.requests.labels(code=code).inc()
        log.event("request.ended", request_id=request_id, code=code, elapsed_s=round(time.monotonic() - begun, 3))

    async def _dispatch(self, exchange: Exchange, request_id: str) -> str:
        match exchange.method, exchange.path:
            case "GET", "/v1/node":
                await self._give_statement(exchange)
            case "GET", "/v1/statement-key":
                await exchange.start("application/octet-stream")
                await exchange.write(self._statement_key)
            case "POST", "/v1/requests":
                await self._admit(exchange, request_id)
            case _, "/v1/node" | "/v1/statement-key" | "/v1/requests":
                raise RefusedRequestError("bad_method")
            case _:
                raise RefusedRequestError("not_found")
        await exchange.finish()
        return "ok"

    async def _give_statement(self, exchange: Exchange) -> None:
        try:
            statement = await self._statements.current()
        except NoStatementError:
            raise RefusedRequestError("unavailable") from None
        if b"application/json" in exchange.header(b"accept"):
            await exchange.start("application/json")
            await exchange.write(json_format.MessageToJson(statement, preserving_proto_field_name=True).encode())
        else:
            await exchange.start("application/x-protobuf")
            await exchange.write(statement.SerializeToString())

    async def _admit(self, exchange: Exchange, request_id: str) -> None:
        if not self._registry.begin():
            raise RefusedRequestError("busy")
        try:
            async with asyncio.timeout(self._config.cloudboard.request_deadline_s):
                await self._serve(exchange, request_id)
        except TimeoutError:
            raise RefusedRequestError("deadline") from None
        finally:
            self._registry.end()

    async def _serve(self, exchange: Exchange, request_id: str) -> None:
        body = _SealedBody(exchange, self._config)
        header = await body.header()
        try:
            jobhelper = await self._pool.take()
        except NoJobhelperError as error:
            log.failure("request.no-jobhelper", error, request_id=request_id)
            raise RefusedRequestError("busy") from None
        try:
            job = _Job(exchange, body, jobhelper)
            await job.open(request_id, header)
            await self._run(job)
        except RefusedRequestError as refusal:
            if refusal.code == "unknown_key":
                self._statements.forget()
            raise
        finally:
            jobhelper.close()  # before the answer's end this is what stops the app

    async def _run(self, job: "_Job") -> None:
        """Both directions at once, until the response has ended or the request turns out bad."""
        upload, download = asyncio.create_task(job.upload()), asyncio.create_task(job.download())
        try:
            await asyncio.wait({upload, download}, return_when=asyncio.FIRST_COMPLETED)
            if not download.done():
                await upload  # raises: it never ends by itself
            await download
        finally:
            upload.cancel()
            download.cancel()
            await asyncio.gather(upload, download, return_exceptions=True)


class _SealedBody:
    """The request body: a header frame, then segment frames."""

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


@dataclass
class _Job:
    """One admitted request between client and jobhelper."""

    exchange: Exchange
    body: _SealedBody
    jobhelper: Jobhelper

    async def open(self, request_id: str, header: envelope_pb2.SealedHeader) -> None:
        """Gives the jobhelper its request.

        Raises:
            RefusedRequestError: it died while standing by.
        """
        try:
            order = envelope_pb2.JobOpen(request_id=request_id, header=header)
            await self.jobhelper.send(envelope_pb2.JobIn(open=order))
        except PeerError:
            raise RefusedRequestError("busy") from None

    async def upload(self) -> None:
        """Forwards segments, then watches for the client's going away. Never returns.

        Raises:
            DisconnectedError: the client went away.
            RefusedRequestError: the body is bad.
        """
        complete, deaf = False, False
        async for segment in self.body.segments():
            complete = segment.last
            if not deaf:
                try:
                    await self.jobhelper.send(envelope_pb2.JobIn(segment=segment))
                except PeerError:
                    deaf = True  # the download tells why; the rest of the body is read and dropped
        if not complete:
            self.jobhelper.end()
        await self.exchange.disconnected()

    async def download(self) -> None:
        """Carries the response until its end.

        Raises:
            RefusedRequestError: the jobhelper refused, failed or died.
        """
        while True:
            message = await self._receive()
            match message.WhichOneof("kind"), self.exchange.started:
                case "salt", False:
                    await self.exchange.start("application/octet-stream")
                    await self.exchange.write(message.salt)
                case "segment", True:
                    await self.exchange.write(frame(message.segment))
                case "done", started:
                    if message.done.status == envelope_pb2.JOB_OK and started:
                        return
                    raise RefusedRequestError(JOB_CODES.get(message.done.status, "failed"))
                case _:
                    log.event("request.job-lost", reason="out-of-order")
                    raise RefusedRequestError("failed")

    async def _receive(self) -> envelope_pb2.JobOut:
        try:
            # The request's deadline bounds this wait: it may be long before a model's first token.
            message = await self.jobhelper.receive(math.inf)
        except PeerError as error:
            log.failure("request.job-lost", error)
            raise RefusedRequestError("failed") from None
        if message is None:
            log.event("request.job-lost", reason="ended")
            raise RefusedRequestError("failed")
        return message
