"""CloudBoard's ingress: HTTP from devices, jobhelpers behind it. It sees ciphertext and routing, nothing else.

    GET  /v1/node           the key statement (protobuf; JSON for `Accept: application/json`)
    GET  /v1/statement-key  the public statement key, for devices that are told to trust it on first use
    POST /v1/requests       a sealed request; the sealed response streams back

A node that takes no requests says "busy" before any of a body is read. A request counts as one, and takes its place
among those in flight, when it has come whole. Once its response has begun there is no other status to give: the
response then simply ends, and the device sees that the last segment is missing.
"""

import asyncio
import secrets
import time

from google.protobuf import json_format

from tie.cloudboard import sealed_body
from tie.cloudboard.ingress_metrics import IngressMetrics
from tie.cloudboard.job import Job
from tie.cloudboard.registry import Registry
from tie.cloudboard.replies import reply
from tie.cloudboard.standby import StandbyPool
from tie.cloudboard.statements import NoStatementError, Statements
from tie.cloudboard.uploads import Upload, Uploads
from tie.daemon import log
from tie.daemon.config import NodeConfig
from tie.http.exchange import DisconnectedError, Exchange
from tie.http.reply import RefusedRequestError
from tie.proto import envelope_pb2


class Ingress:
    """Serves exchanges: `http.server.Server`'s handler."""

    def __init__(
        self, config: NodeConfig, registry: Registry, pool: StandbyPool, statements: Statements, statement_key: bytes
    ) -> None:
        self.uploads = Uploads(config)
        self.metrics = IngressMetrics(registry, pool, self.uploads)
        self._config = config
        self._registry = registry
        self._pool = pool
        self._statements = statements
        self._statement_key = statement_key

    async def __call__(self, exchange: Exchange) -> None:
        """Serves one exchange; cancelled when its client goes away."""
        request_id, begun = secrets.token_hex(8), time.monotonic()
        code = "disconnected"
        try:
            code = await self._outcome(exchange, request_id)
        except DisconnectedError:
            code = "stalled"
        finally:
            self.metrics.requests.labels(code=code).inc()
            log.event("request.ended", request_id=request_id, code=code, elapsed_s=round(time.monotonic() - begun, 3))

    async def _outcome(self, exchange: Exchange, request_id: str) -> str:
        """Answers; returns the code of how."""
        try:
            return await self._dispatch(exchange, request_id)
        except RefusedRequestError as refusal:
            code = refusal.code
        except DisconnectedError:
            raise
        except Exception as error:  # noqa: BLE001 (whatever it was, the client gets an answer)
            code = "failed"
            log.failure("request.failed", error, request_id=request_id)
        await (exchange.finish() if exchange.started else exchange.reply(reply(code)))
        return code

    async def _dispatch(self, exchange: Exchange, request_id: str) -> str:
        match exchange.method, exchange.path:
            case "GET", "/v1/node":
                await self._give_statement(exchange)
            case "GET", "/v1/statement-key":
                await exchange.start("application/octet-stream")
                await exchange.write(self._statement_key)
            case "POST", "/v1/requests":
                await self._take(exchange, request_id)
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

    async def _take(self, exchange: Exchange, request_id: str) -> None:
        if not self._registry.has_room():
            raise RefusedRequestError("busy")
        with self.uploads.begin() as upload:
            header = await sealed_body.receive(exchange, self._config.node_id, upload)
            if not self._registry.begin():
                raise RefusedRequestError("busy")
            try:
                async with asyncio.timeout(self._config.cloudboard.request_deadline_s):
                    await self._serve(exchange, envelope_pb2.JobOpen(request_id=request_id, header=header), upload)
            except TimeoutError:
                raise RefusedRequestError("deadline") from None
            finally:
                self._registry.end()

    async def _serve(self, exchange: Exchange, order: envelope_pb2.JobOpen, upload: Upload) -> None:
        try:
            await Job(exchange, order, upload, self._pool).run()
        except RefusedRequestError as refusal:
            if refusal.code == "unknown_key":
                self._statements.forget()
            raise
