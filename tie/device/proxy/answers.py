"""What both kinds of answers have: their parts and order, numbers, reasons, logprobs, as OpenAI's API writes them."""

import math
import secrets
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from tie.device.answer import Delta, Result, TokenLogprob
from tie.device.proxy.requests import Common
from tie.proto import request_pb2

Json = dict[str, Any]

_LEAST: Final = -9999.0  # the API's stand-in for minus infinity
# What the sealed protocol says more precisely than the API can.
_REASONS: Final = MappingProxyType({"stop": "stop", "length": "length"})


@dataclass(frozen=True)
class Label:
    """What all parts of one answer begin with.

    Attributes:
        kind: of object, when it comes whole.
        chunk_kind: of object, in chunks.
        model: as asked for.
        id: random.
        created: seconds since 1970.
    """

    kind: str
    chunk_kind: str
    model: str
    id: str
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def new(cls, prefix: str, kind: str, chunk_kind: str, model: str) -> "Label":
        """Of an answer that begins now."""
        return cls(kind, chunk_kind, model, f"{prefix}-{secrets.token_hex(12)}")

    def around(self, choices: list[Json], *, chunk: bool = False, **more: object) -> Json:
        """The object with its choices."""
        kind = self.chunk_kind if chunk else self.kind
        label = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**label, "choices": choices, **more}


class Choice(ABC):
    """One of the `n` answers as it grows, in one of the two forms: all of it but its number and why it ended."""

    def begin(self) -> list[Json]:
        """What its chunks bring before any text."""
        return []

    @abstractmethod
    def take(self, piece: Delta) -> list[Json]:
        """What the chunks of a piece bring."""

    @abstractmethod
    def end(self) -> list[Json]:
        """What the last chunks bring; the very last says why the choice ended."""

    @abstractmethod
    def whole(self) -> Json:
        """The choice in one, after `end`."""

    def reason(self, finish: str) -> str:
        """Why it ended; what the node cut counts as too long."""
        return _REASONS.get(finish, "length")

    def message(self) -> request_pb2.Message | None:
        """As it will be sent back in the conversation's next request; None where there is no conversation."""
        return None


class Answer:
    """One answer. Feed it all that comes; it gives chunks, and at the end the whole."""

    def __init__(self, label: Label, choices: list[Choice], asked: Common) -> None:
        self._label = label
        self._choices = choices
        self._usage: Json = {"usage": None} if asked.stream_options and asked.stream_options.include_usage else {}

    def begin(self) -> list[Json]:
        """The chunks before any text."""
        return [self._chunk(index, part) for index, choice in enumerate(self._choices) for part in choice.begin()]

    def take(self, piece: Delta) -> list[Json]:
        """The chunks of a piece."""
        return [self._chunk(piece.index, part) for part in self._choices[piece.index].take(piece)]

    def end(self, result: Result) -> list[Json]:
        """The last chunks."""
        chunks = []
        for index, choice in enumerate(self._choices):
            *parts, last = choice.end()
            chunks += [self._chunk(index, part) for part in parts]
            chunks.append(self._chunk(index, last, choice.reason(_finish(result, index))))
        if self._usage:
            chunks.append(self._label.around([], chunk=True, usage=usage(result)))
        return chunks

    def whole(self, result: Result) -> Json:
        """The answer in one, after `end`."""
        choices = [
            {"index": index, **choice.whole(), "finish_reason": choice.reason(_finish(result, index))}
            for index, choice in enumerate(self._choices)
        ]
        return self._label.around(choices, usage=usage(result))

    def messages(self) -> list[request_pb2.Message]:
        """The choices as the conversation's next request may bring them back."""
        return [message for choice in self._choices if (message := choice.message()) is not None]

    def _chunk(self, index: int, part: Json, finish: str | None = None) -> Json:
        return self._label.around([{"index": index, **part, "finish_reason": finish}], chunk=True, **self._usage)


def usage(result: Result) -> Json:
    """Tokens, as the node counted them."""
    return {
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": result.completion_tokens,
        "total_tokens": result.prompt_tokens + result.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": result.cached_tokens},
    }


def finite(logprob: float) -> float:
    """JSON has no infinity."""
    return logprob if math.isfinite(logprob) else _LEAST


def scored(token: TokenLogprob) -> Json:
    """One token with its alternatives, as chat answers have it."""
    return {
        **_scored(token.token, token.logprob),
        "top_logprobs": [_scored(top.token, top.logprob) for top in token.top],
    }


def _scored(token: bytes, logprob: float) -> Json:
    return {"token": token.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(token)}


def _finish(result: Result, index: int) -> str:
    return result.finish[index] if index < len(result.finish) else ""
