"""One generation: the runtime's events become text for the sender and, at the end, an outcome."""

from collections.abc import Sequence
from contextlib import aclosing
from types import MappingProxyType
from typing import Final

from tie.app.outcome import Outcome, RefusalError
from tie.app.runtime_link import unavailable
from tie.app.sender import Sender
from tie.app.text import ChoiceText
from tie.assets.tokenizer import Tokenizer
from tie.daemon.errors import PeerDiedError, PeerTimeoutError, ProtocolError
from tie.daemon.triton import TritonClient
from tie.proto import app_pb2, runtime_pb2

_STATUS: Final = MappingProxyType(
    {
        runtime_pb2.CODE_INVALID: app_pb2.STATUS_INVALID_REQUEST,
        runtime_pb2.CODE_PROMPT_TOO_LONG: app_pb2.STATUS_PROMPT_TOO_LONG,
        runtime_pb2.CODE_BUSY: app_pb2.STATUS_BUSY,
        runtime_pb2.CODE_DRAINING: app_pb2.STATUS_BUSY,
        runtime_pb2.CODE_DEADLINE: app_pb2.STATUS_DEADLINE_EXCEEDED,
        runtime_pb2.CODE_GRAMMAR: app_pb2.STATUS_GRAMMAR_REFUSED,
        runtime_pb2.CODE_IMAGE: app_pb2.STATUS_IMAGE_REFUSED,
        runtime_pb2.CODE_UNSUPPORTED: app_pb2.STATUS_UNSUPPORTED,
        runtime_pb2.CODE_REPLACED: app_pb2.STATUS_REPLACED,
    }
)
_FINISH: Final = MappingProxyType(
    {
        runtime_pb2.REASON_STOP_TOKEN: app_pb2.FINISH_STOP,
        runtime_pb2.REASON_STOP_STRING: app_pb2.FINISH_STOP,
        runtime_pb2.REASON_LENGTH: app_pb2.FINISH_LENGTH,
        runtime_pb2.REASON_CANCELLED: app_pb2.FINISH_CANCELLED,
    }
)


class Generation:
    """The choices of one request as they grow.

    Attributes:
        tokens: ids of the first choice's answer so far, as the runtime sends them.
        looked: what the runtime says of the images.

    Args:
        request: what the runtime is asked for.
        tokenizer: the bundle's.
        sender: takes the text.
        image_fields: where the user has the images, in order: the runtime knows them by number.
    """

    def __init__(
        self,
        request: runtime_pb2.GenerateRequest,
        tokenizer: Tokenizer,
        sender: Sender,
        image_fields: Sequence[str] = (),
    ) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._sender = sender
        self._image_fields = image_fields
        self._texts = [ChoiceText(tokenizer.stream_decoder()) for _ in range(request.n)]
        self.tokens: list[int] = []
        self.looked: Sequence[runtime_pb2.ImageSize] = ()
        self._counts = [0] * request.n
        self._finished: dict[int, runtime_pb2.Finished] = {}

    async def run(self, triton: TritonClient, *, timeout: float) -> Outcome:
        """Generates to the end. Cancelling it cancels the request in the runtime.

        Args:
            triton: the runtime.
            timeout: seconds for all of it.

        Raises:
            RefusalError: the runtime refused, failed, died, or did not finish in time.
            ProtocolError: it sent what it must not.
        """
        self._request.deadline_ms = max(1, int(timeout * 1000))
        try:
            async with aclosing(triton.generate(self._request, timeout=timeout)) as events:
                async for event in events:
                    self._take(event)
        except PeerTimeoutError:
            raise RefusalError(app_pb2.STATUS_DEADLINE_EXCEEDED, "the time limit of the request passed") from None
        except PeerDiedError:
            raise unavailable() from None
        if len(self._finished) < self._request.n:
            raise ProtocolError("the runtime ended the stream before all choices were finished")
        if all(end.reason == runtime_pb2.REASON_CANCELLED for end in self._finished.values()):
            raise RefusalError(app_pb2.STATUS_CANCELLED, "the node ended this request: try again")
        return self.outcome(app_pb2.STATUS_OK)

    def outcome(self, status: app_pb2.Status.ValueType, detail: str = "") -> Outcome:
        """How the request stands now, ended with `status`."""
        unfinished = (
            app_pb2.FINISH_CANCELLED
            if status in {app_pb2.STATUS_CANCELLED, app_pb2.STATUS_DEADLINE_EXCEEDED, app_pb2.STATUS_REPLACED}
            else app_pb2.FINISH_ERROR
        )
        ends = [self._finished.get(index) for index in range(self._request.n)]
        return Outcome(
            status=status,
            detail=detail,
            finishes=tuple(
                app_pb2.Finish(index=index, reason=_FINISH.get(end.reason, unfinished) if end else unfinished)
                for index, end in enumerate(ends)
            ),
            usage=app_pb2.Usage(
                # The runtime counts more where there are images: it knows how many tokens each takes.
                prompt_tokens=max(
                    [len(self._request.token_ids), *(end.prompt_tokens for end in self._finished.values())]
                ),
                completion_tokens=sum(
                    end.completion_tokens if end else count for end, count in zip(ends, self._counts, strict=True)
                ),
                cached_tokens=max((end.cached_tokens for end in self._finished.values()), default=0),
            ),
        )

    def _take(self, event: runtime_pb2.GenerateEvent) -> None:
        match event.WhichOneof("kind"):
            case "tokens":
                self._tokens(event.tokens)
            case "finished":
                self._finish(event.finished)
            case "looked":
                self.looked = event.looked.sizes
            case "failed":
                status = _STATUS.get(event.failed.code, app_pb2.STATUS_INTERNAL)
                raise RefusalError(status, self._named(event.failed.detail))
            case _:
                raise ProtocolError("the runtime sent an empty event")

    def _named(self, detail: str) -> str:
        """With the user's own name of an image's field."""
        for number, field in enumerate(self._image_fields):
            if detail.startswith(f"images[{number}]:"):
                return field + detail.removeprefix(f"images[{number}]")
        return detail

    def _tokens(self, tokens: runtime_pb2.Tokens) -> None:
        text = self._choice(tokens.index)
        if tokens.logprobs and len(tokens.logprobs) != len(tokens.token_ids):
            raise ProtocolError("the runtime sent more or fewer logprobs than tokens")
        for position, token_id in enumerate(tokens.token_ids):
            text.add(token_id, self._scored(token_id, tokens.logprobs[position]) if tokens.logprobs else None)
        self._counts[tokens.index] += len(tokens.token_ids)
        if tokens.index == 0:
            self.tokens.extend(tokens.token_ids)
        self._sender.put(tokens.index, *text.release(tokens.hold_bytes))

    def _finish(self, finished: runtime_pb2.Finished) -> None:
        text = self._choice(finished.index)
        self._finished[finished.index] = finished
        stopped = finished.reason == runtime_pb2.REASON_STOP_STRING
        self._sender.put(finished.index, *text.finish(finished.drop_bytes, stopped=stopped))

    def _choice(self, index: int) -> ChoiceText:
        if index >= self._request.n or index in self._finished:
            raise ProtocolError("the runtime sent an event for a choice that is not running")
        return self._texts[index]

    def _scored(self, token_id: int, logprob: runtime_pb2.Logprob) -> app_pb2.TokenLogprob:
        return app_pb2.TokenLogprob(
            token=self._tokenizer.token_bytes(token_id),
            logprob=logprob.logprob,
            top=self._top(logprob.top_ids, logprob.top_logprobs),
        )

    def _top(self, ids: Sequence[int], logprobs: Sequence[float]) -> list[app_pb2.TopLogprob]:
        if len(ids) != len(logprobs):
            raise ProtocolError("the runtime sent logprobs without tokens")
        return [
            app_pb2.TopLogprob(token=self._tokenizer.token_bytes(token_id), logprob=value)
            for token_id, value in zip(ids, logprobs, strict=True)
        ]
