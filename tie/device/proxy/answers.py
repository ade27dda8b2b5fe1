"""What both kinds of answers have: numbers, reasons, logprobs, as OpenAI's API writes them."""

import math
import secrets
import time
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from tie.device.answer import Result, TokenLogprob

Json = dict[str, Any]

_LEAST: Final = -9999.0  # the API's stand-in for minus infinity
# What the sealed protocol says more precisely than the API can.
_REASONS: Final = MappingProxyType({"stop": "stop", "length": "length"})


@dataclass(frozen=True)
class Label:
    """What all parts of one answer begin with.

    Attributes:
        kind: of object.
        model: as asked for.
        id: random.
        created: seconds since 1970.
    """

    kind: str
    model: str
    id: str
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def new(cls, prefix: str, kind: str, model: str) -> "Label":
        """Of an answer that begins now."""
        return cls(kind, model, f"{prefix}-{secrets.token_hex(12)}")

    def around(self, choices: list[Json], *, chunk: bool = False, **more: object) -> Json:
        """The object with its choices."""
        kind = f"{self.kind}.chunk" if chunk and self.kind.startswith("chat") else self.kind
        label = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**label, "choices": choices, **more}


def usage(result: Result) -> Json:
    """Tokens, as the node counted them."""
    return {
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": result.completion_tokens,
        "total_tokens": result.prompt_tokens + result.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": result.cached_tokens},
    }


def reason(finish: str) -> str:
    """Why a choice ended; one that the node cut counts as too long."""
    return _REASONS.get(finish, "length")


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
