"""The life of one tie-cloud-app: connect, say ready, serve at most one request, say how it ended."""

import asyncio
import contextlib
import gc
import importlib
import time
from typing import TYPE_CHECKING

from tie.app.frames import Incoming, Limits
from tie.app.inference import Generation
from tie.app.outcome import Outcome, RefusalError
from tie.app.prompt import Model, image_parts
from tie.app.racing import unless
from tie.app.runtime_link import RuntimeLink, connect
from tie.app.sender import Sender
from tie.daemon import log
from tie.daemon.config import NodeConfig
from tie.daemon.errors import PeerDiedError, PeerTimeoutError, ProtocolError
from tie.daemon.frames import parse
from tie.daemon.padding import PaddingError
from tie.daemon.service import EXIT_FAILURE, EXIT_OK
from tie.envelope.secret import Secret
from tie.proto import app_pb2, request_pb2, runtime_pb2

if TYPE_CHECKING:
    from tie.app.placed import Prompt
    from tie.app.reuse import Reuse
    from tie.warden.keys import ConversationKey


class Session:
    """Serves the jobhelper at the other end of the accepted connection.

    Args:
        config: the node's.
        reader: the connection, one way.
        writer: and the other.
        stopping: set when this process is asked to end.
    """

    def __init__(
        self, config: NodeConfig, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stopping: asyncio.Event
    ) -> None:
        self._config = config
        self._incoming = Incoming(reader, config.app)
        self._sender = Sender(writer, config.app)
        self._writer = writer
        writer.transport.set_write_buffer_limits(0)  # drained means: the kernel has it, and this process may end
        self._stopping = stopping
        self._request_id = ""
        self._dek = Secret(b"")
        self._generation: Generation | None = None
        self._reuse: Reuse | None = None
        self._prompt: Prompt | None = None

    async def run(self) -> int:
        """Lives one life and gives the exit code. A jobhelper that is still there gets one `done`, whatever happens."""
        try:
            outcome = await unless(self._serve(), self._stopped())
        except RefusalError as refusal:
            outcome = self._ended(refusal.status, refusal.detail)
        except (PeerDiedError, PeerTimeoutError):
            log.event("app.jobhelper-gone", request_id=self._request_id)
            return EXIT_OK
        except Exception as error:  # noqa: BLE001 (its text may quote the request: only its type and place are logged)
            log.failure("app.failed", error, request_id=self._request_id)
            outcome = self._ended(app_pb2.STATUS_INTERNAL, "the node failed to serve this request")
        if outcome is None:
            return EXIT_OK
        await self._say(outcome)
        if outcome.status == app_pb2.STATUS_OK:
            await self._save()
        return EXIT_FAILURE if outcome.status == app_pb2.STATUS_INTERNAL else EXIT_OK

    async def _serve(self) -> Outcome | None:
        async with connect(self._config) as runtime:
            # Blocking: a quarter of a second in which nothing can have been asked yet.
            model = Model.load(self._config)
            runtime.check_serves(model.manifest)
            await self._sender.ready()
            # Neither `ready` nor, as a rule, a request waits for these: the first brings the cryptography library, a
            # tenth of a second.
            importlib.import_module("tie.app.reuse")
            await asyncio.to_thread(_rehearse, model, self._config)
            gc.freeze()
            gc.enable()
            return await unless(self._request(runtime, model), runtime.watch())

    async def _request(self, runtime: RuntimeLink, model: Model) -> Outcome | None:
        opened = await self._incoming.open()
        if opened is None:
            return None  # connected ahead of time and never used
        self._request_id = opened.request_id
        limits = Limits.of(self._config.app, opened.limits)
        deadline = time.monotonic() + limits.time_s
        self._dek = Secret(opened.dek)
        name = opened.model or model.manifest.model
        del opened  # its copy of the key can be let go of, and not be wiped
        try:
            async with asyncio.timeout(limits.time_s):
                model.check_name(name)
                body = await self._incoming.body(limits.request_bytes)
                return await unless(
                    self._generate(runtime, model, body, limits, deadline), self._incoming.watch(), self._sender.run()
                )
        except TimeoutError:
            raise RefusalError(app_pb2.STATUS_DEADLINE_EXCEEDED, "the time limit of the request passed") from None
        finally:
            self._dek.close()

    async def _generate(
        self, runtime: RuntimeLink, model: Model, body: bytes, limits: Limits, deadline: float
    ) -> Outcome:
        # In a thread: a long prompt takes seconds to tokenize, and an abort must be seen meanwhile.
        asked, images, turn_key = await asyncio.to_thread(_understand, model, body, limits, self._request_id)
        key = self._key(turn_key)
        self._dek.close()  # what is left to do takes minutes
        if key:
            from tie.app.placed import Prompt
            from tie.app.reuse import Reuse

            self._prompt = Prompt(tuple(asked.token_ids), tuple(asked.images), model.placeholders)
            self._reuse = await Reuse.begin(
                key, runtime, asked, prompt=self._prompt, manifest=model.manifest, config=self._config
            )
        self._generation = Generation(asked, model.tokenizer, self._sender, images)
        return await self._generation.run(runtime.triton, timeout=max(0.001, deadline - time.monotonic()))

    def _key(self, turn_key: bytes) -> "ConversationKey | None":
        """What the request's KV cache is sealed under; None: it is not cached."""
        from tie.warden.keys import ConversationKey, Root

        if turn_key:
            return ConversationKey(Root.TURN, turn_key)
        if self._config.app.cache_without_turn_key:
            return ConversationKey(Root.REQUEST, self._dek.reveal())
        return None

    async def _save(self) -> None:
        """Files the conversation for its next turn. The answer is with the jobhelper, and the connection has ended."""
        self._writer.close()
        if self._reuse and self._generation and self._prompt:
            # Asked to end, the process ends: there is nothing here that a user waits for.
            with contextlib.suppress(RefusalError):
                if whole := self._prompt.whole(self._generation.looked):
                    tokens, images = whole
                    await unless(self._reuse.save((*tokens, *self._generation.tokens), images), self._stopped())
            self._reuse.close()

    async def _stopped(self) -> None:
        await self._stopping.wait()
        raise RefusalError(app_pb2.STATUS_BUSY, "the node is stopping: try again")

    def _ended(self, status: app_pb2.Status.ValueType, detail: str) -> Outcome:
        return self._generation.outcome(status, detail) if self._generation else Outcome(status, detail)

    async def _say(self, outcome: Outcome) -> None:
        log.event("app.done", request_id=self._request_id, status=app_pb2.Status.Name(outcome.status))
        try:
            await self._sender.done(outcome)
            if outcome.status != app_pb2.STATUS_OK:
                self._writer.write_eof()
                await self._incoming.linger()
        except (PeerDiedError, PeerTimeoutError):
            log.event("app.jobhelper-gone", request_id=self._request_id)
        except PaddingError as error:
            log.failure("app.unpadded", error)  # fail closed: the jobhelper sees the connection end instead


def _rehearse(model: Model, config: NodeConfig) -> None:
    """Does once what a request will need: first times take longer (2 ms in all), and nobody waits for this one."""
    from tie.warden.keys import ConversationKey, Root

    hello = request_pb2.Message(role="user", parts=[request_pb2.Part(text="Hello")])
    body = request_pb2.InferenceRequest(messages=[hello]).SerializeToString()
    with contextlib.suppress(RefusalError):  # what the model's template has against it concerns no user
        _understand(model, body, Limits.of(config.app, app_pb2.Limits()), "")
    with ConversationKey(Root.REQUEST, bytes(32)) as key:
        key.index()


def _understand(
    model: Model, body: bytes, limits: Limits, request_id: str
) -> tuple[runtime_pb2.GenerateRequest, list[str], bytes]:
    """What the runtime is asked for, the fields that images came in, and the conversation's turn key, if it has one."""
    try:
        request = parse(body, request_pb2.InferenceRequest)
    except ProtocolError:
        raise RefusalError(app_pb2.STATUS_INVALID_REQUEST, "the body is not an InferenceRequest") from None
    fields = [field for field, _ in image_parts(request)]
    return model.generate_request(request, limits, request_id), fields, request.turn_key
