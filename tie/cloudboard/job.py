"""One admitted request between its client and a jobhelper; and a second jobhelper when the first one was dead."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Final

from tie.cloudboard.replies import JOB_CODES, UNREAD
from tie.cloudboard.standby import Jobhelper, NoJobhelperError, StandbyPool
from tie.cloudboard.uploads import Upload
from tie.daemon import log
from tie.daemon.errors import PeerError, PeerTimeoutError
from tie.envelope.frames import frame
from tie.http.exchange import Exchange
from tie.http.reply import RefusedRequestError
from tie.proto import envelope_pb2

_STEP_BYTES: Final = 64 * 1024  # of a request on its way to a jobhelper


class JobLostError(PeerError):
    """The jobhelper ended, or has no app to serve the request.

    Attributes:
        code: what to tell the client when there is no second chance: "busy", that nobody has read anything of the
            request, or else "failed".
    """

    def __init__(self, message: str, *, code: str = "failed") -> None:
        super().__init__(message)
        self.code = code


class Job:
    """Carries one whole sealed request to a jobhelper and the sealed answer back.

    A jobhelper that stood by may turn out dead, or without its app, when its request comes. As long as nothing has been
    accepted the same sealed request goes to a new one, once: should the first have had it opened after all, it does not
    open again.
    """

    def __init__(self, exchange: Exchange, order: envelope_pb2.JobOpen, upload: Upload, pool: StandbyPool) -> None:
        self._exchange = exchange
        self._order = order
        self._upload = upload
        self._pool = pool

    async def run(self) -> None:
        """Returns when the answer has ended. A cancelled call stops the app.

        Raises:
            DisconnectedError: the client does not take its answer.
            RefusedRequestError: the request cannot be served; see the code.
        """
        first = await self._try(self._pool.take)
        if first is None:
            return
        if self._exchange.started:
            raise RefusedRequestError(first.code)
        try:
            # Not one that stood by: what killed the first may have killed them all.
            second = await self._try(self._pool.new)
        except RefusedRequestError as refusal:
            raise RefusedRequestError(_of_both(first.code, refusal.code)) from None
        if second is not None:
            raise RefusedRequestError(_of_both(first.code, second.code))

    async def _try(self, source: Callable[[], Awaitable[Jobhelper]]) -> JobLostError | None:
        try:
            await self._attempt(source)
        except JobLostError as lost:
            log.failure("request.job-lost", lost)
            return lost
        return None

    async def _attempt(self, source: Callable[[], Awaitable[Jobhelper]]) -> None:
        """Raises `JobLostError`, and as `run`."""
        try:
            jobhelper = await source()
        except NoJobhelperError as error:
            log.failure("request.no-jobhelper", error)
            raise RefusedRequestError("busy") from None
        # Beside the reading: a jobhelper that refuses the request does not read it to its end.
        sending = asyncio.create_task(self._send(jobhelper))
        try:
            while not await self._pass_on(jobhelper):
                pass
        finally:
            jobhelper.close()  # before the answer's end this is what stops the app
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _send(self, jobhelper: Jobhelper) -> None:
        try:
            await jobhelper.send(envelope_pb2.JobIn(open=self._order))
            for start in range(0, len(self._upload.body), _STEP_BYTES):
                await jobhelper.send_frames(bytes(self._upload.body[start : start + _STEP_BYTES]))
        except PeerTimeoutError as error:
            log.failure("request.job-stuck", error)
            jobhelper.close()  # whoever reads sees its end, and decides
        except PeerError:
            return  # whoever reads sees it as well

    async def _pass_on(self, jobhelper: Jobhelper) -> bool:
        """Passes on one message; True at the answer's end. Raises as `_attempt`."""
        message = await self._receive(jobhelper)
        match message.WhichOneof("kind"), self._exchange.started:
            case "salt", False:
                self._upload.drop()
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
                raise RefusedRequestError(JOB_CODES.get(status, "failed"))
        raise JobLostError("the jobhelper spoke out of order")

    async def _receive(self, jobhelper: Jobhelper) -> envelope_pb2.JobOut:
        try:
            # The request's deadline bounds this wait: it may be long before a model's first token.
            message = await jobhelper.receive(math.inf)
        except PeerError:
            raise JobLostError("the jobhelper died") from None
        if message is None:
            raise JobLostError("the jobhelper ended")
        return message


def _of_both(first: str, second: str) -> str:
    """What to tell the client after two attempts, from the code of each.

    That nobody has read anything of the request is said only when it is true of both. And when the envelope has been
    opened before, it is our own first attempt that did.
    """
    return first if second == "replayed" or (second in UNREAD and first not in UNREAD) else second
