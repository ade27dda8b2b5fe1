"""Routes, and one exchange from its request to its end.

    POST /v1/chat/completions   GET /v1/models
    POST /v1/completions        GET /v1/models/MODEL

A stream's status is said with its first event, so that everything that goes wrong before has a status of its own. What
goes wrong later is an event with an error. Nothing that was asked or answered is logged or kept, but for the names of
turns (tie.device.turns).
"""

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeVar
from urllib.parse import unquote

import msgspec

from tie.daemon import log
from tie.daemon.errors import ProtocolError, TieError
from tie.device.answer import Delta
from tie.device.async_client import AsyncAnswer, AsyncClient
from tie.device.errors import RequestRefusedError
from tie.device.proxy import chat, completions, failures, requests, translate
from tie.device.proxy.access import Access
from tie.device.proxy.answers import Answer, Json
from tie.device.proxy.failures import ApiError
from tie.device.proxy.gathering import Gatherer
from tie.device.proxy.models import Models
from tie.device.turns import Turns
from tie.http.exchange import DisconnectedError, Exchange
from tie.http.limits import Pace
from tie.http.reply import RefusedRequestError, Reply
from tie.proto import request_pb2

MAX_BODY_BYTES: Final = 32 * 1024 * 1024
MAX_UNDER_WAY: Final = 64
_PACE: Final = Pace()
_MODELS: Final = "/v1/models"
_OTHER_MODEL: Final = "STATUS_UNKNOWN_MODEL"

R = TypeVar("R", bound=requests.Common)


@dataclass(frozen=True)
class Settings:
    """What the user chose.

    Attributes:
        models: that may be asked for.
        access: who may ask.
        gather_s: how long pieces of a stream are gathered into one write; each stays an event of its own.
        turns: turn keys of conversations, or None for none.
    """

    models: Models
    access: Access = field(default_factory=Access)
    gather_s: float = 0.0
    turns: Turns | None = field(default_factory=Turns)


@dataclass(frozen=True, repr=False)
class _Job:
    """One request to a node: what goes there, and what becomes of the answer."""

    request: request_pb2.InferenceRequest
    form: Answer
    asked: requests.Common


class Handler:
    """Serves exchanges: `tie.http.server.Server`'s handler.

    Args:
        client: to the nodes.
        settings: the user's.
    """

    def __init__(self, client: AsyncClient, settings: Settings) -> None:
        self._client = client
        self._settings = settings
        self._created = int(time.time())
        self._under_way = 0

    async def __call__(self, exchange: Exchange) -> None:
        """Serves one exchange; cancelled when its client goes away, which ends the node's work."""
        with contextlib.suppress(DisconnectedError):
            error = await self._outcome(exchange)
            if error is not None:
                await _fail(exchange, error)

    async def _outcome(self, exchange: Exchange) -> ApiError | None:
        """Answers; what went wrong, if anything did."""
        try:
            await self._dispatch(exchange)
        except ApiError as error:
            return error
        except RefusedRequestError as refusal:
            return failures.fault(refusal.code)
        except DisconnectedError:
            raise
        except Exception as error:  # noqa: BLE001 (its text may quote the request: only its type and place are logged)
            log.failure("proxy.failed", error)
            return failures.internal()
        return None

    async def _dispatch(self, exchange: Exchange) -> None:
        self._settings.access.check(exchange)
        match exchange.method, exchange.path:
            case "POST", "/v1/chat/completions":
                await self._ask(exchange, requests.ChatRequest, translate.chat, chat.answer)
            case "POST", "/v1/completions":
                await self._ask(exchange, requests.CompletionRequest, translate.completion, completions.answer)
            case "GET", str(path) if path == _MODELS or path.startswith(_MODELS + "/"):
                await self._models(exchange, unquote(path.removeprefix(_MODELS).removeprefix("/")))
            case _, "/v1/chat/completions" | "/v1/completions" | "/v1/models":
                raise failures.fault("bad_method")
            case _:
                raise failures.fault("not_found")

    async def _models(self, exchange: Exchange, name: str) -> None:
        if name:
            await self._check_model(name)
            await _send(exchange, self._model(name))
        else:
            models = [self._model(each) for each in await self._settings.models.names()]
            await _send(exchange, {"object": "list", "data": models})

    def _model(self, name: str) -> Json:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "tie"}

    async def _ask(
        self,
        exchange: Exchange,
        kind: type[R],
        translated: Callable[[R], request_pb2.InferenceRequest],
        form: Callable[[R], Answer],
    ) -> None:
        with self._place():
            asked = requests.decode(await _body(exchange), kind)
            await self._check_model(asked.model)
            job = _Job(translated(asked), form(asked), asked)
            if self._settings.turns is not None and job.request.messages:
                job.request.turn_key = self._settings.turns.key(job.request)
            await self._answer(exchange, job)

    async def _answer(self, exchange: Exchange, job: _Job) -> None:
        accepted = False
        try:
            answer = await self._client.send(job.request)
            accepted = True
            try:
                await (self._stream if job.asked.stream else self._whole)(exchange, answer, job)
            finally:
                await answer.close()
        except TieError as error:
            if isinstance(error, RequestRefusedError) and error.status == _OTHER_MODEL:
                self._settings.models.doubt()  # the node was given another one since
                await self._check_model(job.asked.model)
            raise failures.from_error(error, accepted=accepted) from None

    async def _whole(self, exchange: Exchange, answer: AsyncAnswer, job: _Job) -> None:
        async for delta in _pieces(answer, job.asked.count):
            job.form.take(delta)
        result = await answer.result()
        job.form.end(result)
        self._remember(job)
        await _send(exchange, job.form.whole(result))

    async def _stream(self, exchange: Exchange, answer: AsyncAnswer, job: _Job) -> None:
        async with Gatherer(_pieces(answer, job.asked.count), self._settings.gather_s) as lists:
            async for deltas in lists:
                chunks = [] if exchange.started else job.form.begin()
                for delta in deltas:
                    chunks += job.form.take(delta)
                await _write(exchange, chunks)
        result = await answer.result()
        chunks = [] if exchange.started else job.form.begin()
        chunks += job.form.end(result)
        self._remember(job)  # before the client can know that it is, and go on
        await _write(exchange, chunks)
        await exchange.write(b"data: [DONE]\n\n")
        await exchange.finish()

    def _remember(self, job: _Job) -> None:
        """The turn that an answer ends."""
        if self._settings.turns is not None:
            self._settings.turns.answered(job.request, job.form.messages())

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        """A place among the requests under way: their bodies and answers are what this process holds."""
        if self._under_way >= MAX_UNDER_WAY:
            raise failures.overloaded()
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1

    async def _check_model(self, name: str) -> None:
        known, names = await self._settings.models.known(name)
        if not known:
            raise failures.no_model(name, ", ".join(names))


def replies(code: str) -> Reply:
    """What the HTTP server answers by itself."""
    return failures.fault(code).reply


async def _pieces(answer: AsyncAnswer, count: int) -> AsyncIterator[Delta]:
    async for delta in answer:
        if delta.index >= count:
            raise ProtocolError("the answer has a choice that was not asked for")
        yield delta


async def _body(exchange: Exchange) -> bytes:
    declared = exchange.header(b"content-length")
    if declared.isdigit() and int(declared) > MAX_BODY_BYTES:
        raise failures.fault("too_large")
    body = bytearray()
    async for data in exchange.chunks(_PACE):
        body += data
        if len(body) > MAX_BODY_BYTES:
            raise failures.fault("too_large")
    return bytes(body)


async def _send(exchange: Exchange, value: Json) -> None:
    await exchange.reply(Reply(200, msgspec.json.encode(value)))


async def _write(exchange: Exchange, chunks: list[Json]) -> None:
    """Server-sent events, one for each chunk, in one piece."""
    if not exchange.started:
        await exchange.start("text/event-stream; charset=utf-8")
    data = b"".join(b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks)
    if data:
        await exchange.write(data)


async def _fail(exchange: Exchange, error: ApiError) -> None:
    if not exchange.started:
        await exchange.reply(error.reply)
    elif not exchange.ended:
        await exchange.write(b"data: " + error.body + b"\n\n")
        await exchange.finish()
