"""cb_jobhelper: one process per request, between CloudBoard's ingress and the request's tie-cloud-app.

It connects to an app and waits until that is ready, so that a pair can stand by; opens the request's envelope with the
help of the key protection service; and relays until the end of the answer. Of the app's frames it reads only the kind.
"""

import asyncio
import re
import secrets
from typing import Final

import grpc.aio

from tie.cloudboard import keys
from tie.cloudboard.relay import (
    Answer,
    IngressGoneError,
    JobEndedError,
    Link,
    cancel,
    read_app,
    read_ingress,
    relay,
)
from tie.daemon import ahead, log, rpc, service
from tie.daemon.activation import accepted_connection
from tie.daemon.config import NodeConfig
from tie.daemon.errors import PeerDiedError, PeerError, ProtocolError
from tie.envelope import sealing, stream
from tie.envelope.errors import EnvelopeError
from tie.envelope.secret import Secret
from tie.proto import app_pb2, envelope_pb2, kps_pb2, kps_pb2_grpc

APP_READY_S: Final = 60.0  # a cold start of an app on a loaded machine
STANDBY_S: Final = 3600.0  # a pair that waited this long unused is replaced
KPS_S: Final = 3.0
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_OUTCOMES: Final = {
    kps_pb2.OUTCOME_REFUSED: envelope_pb2.JOB_REFUSED,
    kps_pb2.OUTCOME_REPLAYED: envelope_pb2.JOB_REPLAYED,
    kps_pb2.OUTCOME_UNKNOWN_KEY: envelope_pb2.JOB_UNKNOWN_KEY,
    kps_pb2.OUTCOME_RATE_LIMITED: envelope_pb2.JOB_UNAVAILABLE,
}


class Job:
    """One request, from an app's `ready` to the end of its answer."""

    def __init__(
        self,
        config: NodeConfig,
        binding: sealing.PrivateKey,
        ingress: Link,
        kps: grpc.aio.Channel,
        *,
        standby: bool = False,
    ) -> None:
        self._config = config
        self._standby = standby
        self._binding = binding
        self._ingress = ingress
        self._kps: kps_pb2_grpc.KeyProtectionAsyncStub = kps_pb2_grpc.KeyProtectionStub(kps)
        self._request_id = ""

    async def run(self) -> None:
        """Serves the one request and tells the ingress how it went. A peer's fault raises nothing."""
        try:
            await self._serve()
            status = envelope_pb2.JOB_OK
        except JobEndedError as end:
            status = end.status
        except IngressGoneError:
            log.event("job.abandoned", request_id=self._request_id)
            return
        except PeerError as error:
            log.failure("job.failed", error, request_id=self._request_id)
            status = envelope_pb2.JOB_FAILED
        log.event("job.ended", request_id=self._request_id, status=envelope_pb2.JobStatus.Name(status))
        try:
            await self._ingress.send(envelope_pb2.JobOut(done=envelope_pb2.JobDone(status=status)))
            await self._ingress.linger()
        except PeerError as error:
            log.failure("job.unheard", error, request_id=self._request_id)

    async def _serve(self) -> None:
        app = await self._connect_app()
        try:
            await self._ingress.send(envelope_pb2.JobOut(ready=envelope_pb2.JobReady()))
            job = await self._stand_by(app)
            self._request_id = job.request_id
            header = self._checked(job.header)
            with await self._open_dek(header) as dek:
                salt = secrets.token_bytes(sealing.SALT_BYTES)
                opener = stream.Opener(sealing.request_key(dek, header), stream.Direction.REQUEST)
                sealer = stream.Sealer(sealing.response_key(dek, header, salt), stream.Direction.RESPONSE)
                await app.send(_open_message(job, dek))
            await relay(self._config.app, self._ingress, app, opener, Answer(self._ingress, sealer, salt))
        except PeerDiedError:
            # Outside the relay: the app left between its `ready` and our `open`, and the request can go elsewhere.
            raise JobEndedError(envelope_pb2.JOB_BUSY) from None
        finally:
            app.close()

    async def _connect_app(self) -> Link:
        """Connects to an app and waits for its `ready`.

        Raises:
            JobEndedError: no app becomes ready.
        """
        link = None
        try:
            async with asyncio.timeout(APP_READY_S):
                link = Link(*await ahead.connect(self._config.sockets.app, ahead=self._standby))
            kind, _ = await read_app(self._config.app, link, APP_READY_S)
        except (PeerError, OSError) as error:
            log.failure("job.no-app", error)
            if link is not None:
                link.close()
            raise JobEndedError(envelope_pb2.JOB_BUSY) from None
        if kind != "ready":
            # Told to the user who waits for it, this could only be an app without its node: see its log.
            log.event("job.app-not-ready", state=kind)
            link.close()
            raise JobEndedError(envelope_pb2.JOB_BUSY)
        return link

    async def _stand_by(self, app: Link) -> envelope_pb2.JobOpen:
        """Waits for the ingress's request.

        Raises:
            IngressGoneError: the ingress let go of this pair.
            JobEndedError: the app left first.
        """
        order = asyncio.create_task(read_ingress(self._ingress, STANDBY_S))
        departure = asyncio.create_task(app.reader.read(1))
        try:
            await asyncio.wait({order, departure}, return_when=asyncio.FIRST_COMPLETED)
            if departure.done():
                # End-of-file or a frame: an app that was not opened has nothing to say, so either way it is lost.
                raise JobEndedError(envelope_pb2.JOB_BUSY)
            message = await order
        finally:
            await cancel(order, departure)
        if message.WhichOneof("kind") != "open" or not _REQUEST_ID.fullmatch(message.open.request_id):
            raise ProtocolError("the ingress did not begin with open")
        return message.open

    def _checked(self, header: envelope_pb2.SealedHeader) -> sealing.Header:
        if header.version != sealing.VERSION or header.node_id != self._config.node_id:
            raise JobEndedError(envelope_pb2.JOB_REFUSED)
        return sealing.Header(
            node_id=header.node_id, key_id=header.key_id, sealed_dek=header.sealed_dek, model=header.model
        )

    async def _open_dek(self, header: sealing.Header) -> Secret:
        """Has the key protection service open the DEK.

        Raises:
            JobEndedError: it would not, or cannot now.
        """
        request = kps_pb2.OpenDekRequest(
            node_id=header.node_id, key_id=header.key_id, version=sealing.VERSION, sealed_dek=header.sealed_dek
        )
        try:
            reply = await self._kps.OpenDek(request, timeout=KPS_S, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            log.failure("job.no-kps", error, request_id=self._request_id)
            raise JobEndedError(envelope_pb2.JOB_UNAVAILABLE) from None
        if reply.outcome != kps_pb2.OUTCOME_OK:
            raise JobEndedError(_OUTCOMES.get(reply.outcome, envelope_pb2.JOB_FAILED))
        try:
            return sealing.unbind_dek(reply.bound_dek, header.sealed_dek, header.node_id, self._binding)
        except EnvelopeError as error:
            # Sealed to another binding key: somebody replaced the key file under a running service.
            log.failure("job.binding-mismatch", error, request_id=self._request_id)
            raise JobEndedError(envelope_pb2.JOB_FAILED) from None


def _open_message(job: envelope_pb2.JobOpen, dek: Secret) -> app_pb2.AppIn:
    return app_pb2.AppIn(
        open=app_pb2.Open(
            request_id=job.request_id, dek=bytes(dek.reveal()), model=job.header.model, limits=app_pb2.Limits()
        )
    )


async def serve(config: NodeConfig, lifetime: service.Lifetime) -> None:
    """Serves the connection this process was started with, then returns.

    Raises:
        ConfigError: there is no such connection, or no binding key.
    """
    connection = accepted_connection()
    standby = ahead.is_ahead(connection)  # then so is its app
    ingress = Link(*await asyncio.open_unix_connection(sock=connection))
    try:
        async with rpc.connect(config.sockets.kps) as kps:
            kps.get_state(try_to_connect=True)  # the handshake is over before the request comes
            binding = keys.read_binding_key(config)
            job = asyncio.create_task(Job(config, binding, ingress, kps, standby=standby).run())
            stop = asyncio.create_task(lifetime.stopping.wait())
            try:
                await asyncio.wait({job, stop}, return_when=asyncio.FIRST_COMPLETED)
                if job.done():
                    await job
            finally:
                await cancel(job, stop)
    finally:
        ingress.close()


def main() -> None:
    """Entry point of cb_jobhelper."""
    service.run("cb_jobhelper", "Opens one sealed request for one tie-cloud-app and seals its answer.", serve)


if __name__ == "__main__":
    main()
