"""CloudBoard's ingress: HTTP from devices, jobhelpers behind it. It sees ciphertext and routing, nothing else.

    GET  /v1/node           the key statement (protobuf; JSON for `Accept: application/json`)
    GET  /v1/statement-key  the public statement key, for devices that are told to trust it on first use
    POST /v1/requests       a sealed request; the sealed response streams back

A request is refused as "busy" before any of its body is read. Once its response has begun there is no other status to
give: the response then simply ends, and the device sees that the last segment is missing.
"""

import asyncio
import secrets
import time

from google.protobuf import json_format
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from tie.cloudboard.exchange import DisconnectedError, Exchange, Receive, Scope, Send
from tie.cloudboard.job import Job
from tie.cloudboard.registry import Registry
from tie.cloudboard.replies import RefusedRequestError
from tie.cloudboard.sealed_body import SealedBody
from tie.cloudboard.standby import StandbyPool
from tie.cloudboard.statements import NoStatementError, Statements
from tie.daemon import log
from tie.daemon.config import NodeConfig
from tie.proto import envelope_pb2


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
        body = SealedBody(exchange, self._config)
        header = await body.header()
        order = envelope_pb2.JobIn(open=envelope_pb2.JobOpen(request_id=request_id, header=header))
        job = Job(exchange, body, order, self._pool)
        try:
            await job.run()
        except RefusedRequestError as refusal:
            if refusal.code == "unknown_key":
                self._statements.forget()
            raise
