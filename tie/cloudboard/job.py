"""One admitted request between its client and a jobhelper; and a second jobhelper when the first one was dead."""

import asyncio
import math
from typing import Final

from tie.cloudboard.exchange import Exchange
from tie.cloudboard.replies import JOB_CODES, RefusedRequestError
from tie.cloudboard.sealed_body import SealedBody
from tie.cloudboard.standby import Jobhelper, NoJobhelperError, StandbyPool
from tie.daemon import log
from tie.daemon.errors import PeerError
from tie.envelope.frames import frame
from tie.proto import envelope_pb2

_KEEP_BYTES: Final = 1024 * 1024


class JobLostError(PeerError):
    """The jobhelper ended, or has no app to serve the request.

    Attributes:
        code: what to tell the client when there is no second chance.
    """

    def __init__(self, message: str, *, code: str = "failed") -> None:
        super().__init__(message)
        self.code = code


class Job:
    """Carries one sealed request to a jobhelper and the sealed answer back.

    A jobhelper that stood by may turn out dead, or without its app, when its request comes. As long as nothing has been
    accepted the same sealed request goes to a new one, once: should the first have had it opened after all, it does not
    open again.
    """

    def __init__(self, exchange: Exchange, body: SealedBody, order: envelope_pb2.JobIn, pool: StandbyPool) -> None:
        self._exchange = exchange
        self._body = body
        self._pool = pool
        self._sent: list[envelope_pb2.JobIn] = [order]
        self._spares = 1
        self._whole = True  # whether `_sent` is all that came so far
        self._truncated = False
        self._turn = asyncio.Lock()  # between the upload and a change of jobhelpers
        self._jobhelper: Jobhelper | None = None

    async def run(self) -> None:
        """Both directions at once, until the answer has ended or the request turns out bad.

        Raises:
            DisconnectedError: the client went away.
            RefusedRequestError: the request cannot be served; see the code.
        """
        try:
            await self._start()
            upload, download = asyncio.create_task(self._upload()), asyncio.create_task(self._download())
            try:
                await asyncio.wait({upload, download}, return_when=asyncio.FIRST_COMPLETED)
                if not download.done():
                    await upload  # raises: it never ends by itself
                await download
            finally:
                upload.cancel()
                download.cancel()
                await asyncio.gather(upload, download, return_exceptions=True)
        finally:
            if self._jobhelper is not None:
                self._jobhelper.close()  # before the answer's end this is what stops the app

    async def _start(self) -> None:
        """Gives what has come of the request to a jobhelper."""
        try:
            # The second time not one that stood by: what killed the first may have killed them all.
            self._jobhelper = await (self._pool.take() if self._spares else self._pool.new())
        except NoJobhelperError as error:
            log.failure("request.no-jobhelper", error)
            raise RefusedRequestError("busy") from None
        for message in self._sent:
            await self._forward(message)
        if self._truncated:
            self._jobhelper.end()

    async def _upload(self) -> None:
        """Forwards segments, then watches for the client's going away. Never returns.

        Raises:
            DisconnectedError: the client went away.
            RefusedRequestError: the body is bad.
        """
        complete, kept = False, 0
        async for segment in self._body.segments():
            complete = segment.last
            message = envelope_pb2.JobIn(segment=segment)
            async with self._turn:
                kept += len(segment.ciphertext)
                self._whole = kept <= _KEEP_BYTES
                if self._whole:
                    self._sent.append(message)
                await self._forward(message)
        async with self._turn:
            self._truncated = not complete
            if self._truncated and self._jobhelper is not None:
                self._jobhelper.end()
        await self._exchange.disconnected()

    async def _forward(self, message: envelope_pb2.JobIn) -> None:
        try:
            if self._jobhelper is not None:
                await self._jobhelper.send(message)
        except PeerError:
            return  # the download sees it as well and decides; the rest of the body is read and dropped meanwhile

    async def _download(self) -> None:
        """Carries the answer until its end.

        Raises:
            RefusedRequestError: the jobhelper refused, failed or died.
        """
        while True:
            try:
                finished = await self._pass_on()
            except JobLostError as error:
                log.failure("request.job-lost", error)
                async with self._turn:
                    if self._exchange.started or not self._whole or not self._spares:
                        raise RefusedRequestError(error.code) from None
                    self._spares -= 1
                    if self._jobhelper is not None:
                        self._jobhelper.close()
                    await self._start()
                continue
            if finished:
                return

    async def _pass_on(self) -> bool:
        """Passes on one message; True at the answer's end."""
        message = await self._receive()
        match message.WhichOneof("kind"), self._exchange.started:
            case "salt", False:
                self._sent.clear()
                await self._exchange.start("application/octet-stream")
                await self._exchange.write(message.salt)
                return False
            case "segment", True:
                await self._exchange.write(frame(message.segment))
                return False
            case "done", started:
                status = message.done.status
                if status == envelope_pb2.JOB_OK and started:
                    return True
                if status == envelope_pb2.JOB_BUSY:
                    raise JobLostError("the jobhelper cannot serve", code="busy")
                raise RefusedRequestError(self._code(status))
        raise JobLostError("the jobhelper spoke out of order")

    async def _receive(self) -> envelope_pb2.JobOut:
        if self._jobhelper is None:
            raise JobLostError("there is no jobhelper")
        try:
            # The request's deadline bounds this wait: it may be long before a model's first token.
            message = await self._jobhelper.receive(math.inf)
        except PeerError:
            raise JobLostError("the jobhelper died") from None
        if message is None:
            raise JobLostError("the jobhelper ended")
        return message

    def _code(self, status: "envelope_pb2.JobStatus.ValueType") -> str:
        if status == envelope_pb2.JOB_REPLAYED and not self._spares:
            return "failed"  # the replay is our own second attempt
        return JOB_CODES.get(status, "failed")
