"""What comes back: pieces of text, and at the end how it ended."""

from dataclasses import dataclass

from tie.proto import app_pb2


@dataclass(frozen=True)
class TopLogprob:
    """One alternative: a token's bytes and its log probability."""

    token: bytes
    logprob: float


@dataclass(frozen=True)
class TokenLogprob:
    """One token of the answer, with its alternatives."""

    token: bytes
    logprob: float
    top: tuple[TopLogprob, ...]


@dataclass(frozen=True)
class Delta:
    """A piece of the answer.

    Attributes:
        text: whole characters; may be empty where only logprobs came.
        index: which of the `n` choices.
        logprobs: of the tokens in this piece, when asked for.
    """

    text: str
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()

    @classmethod
    def of(cls, delta: app_pb2.Delta) -> "Delta":
        """From the wire."""
        logprobs = tuple(
            TokenLogprob(
                token=one.token,
                logprob=one.logprob,
                top=tuple(TopLogprob(token=top.token, logprob=top.logprob) for top in one.top),
            )
            for one in delta.logprobs
        )
        return cls(text=delta.text, index=delta.index, logprobs=logprobs)


@dataclass(frozen=True)
class Result:
    """How an answer ended.

    Attributes:
        texts: the whole text of each choice.
        finish: why each choice ended: "stop", "length", "cancelled", "error" or "unspecified".
        prompt_tokens: of the rendered prompt.
        completion_tokens: of all choices.
        cached_tokens: of the prompt, not computed again.
    """

    texts: tuple[str, ...]
    finish: tuple[str, ...]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.texts[0]

    @classmethod
    def of(cls, done: app_pb2.Done, texts: dict[int, str]) -> "Result":
        """From the wire, and what has been gathered of each choice."""
        reasons = {finish.index: _finish_name(finish.reason) for finish in done.finish}
        choices = range(1 + max([0, *texts, *reasons]))
        return cls(
            texts=tuple(texts.get(index, "") for index in choices),
            finish=tuple(reasons.get(index, "unspecified") for index in choices),
            prompt_tokens=done.usage.prompt_tokens,
            completion_tokens=done.usage.completion_tokens,
            cached_tokens=done.usage.cached_tokens,
        )


def _finish_name(reason: int) -> str:
    known = reason in app_pb2.FinishReason.values()
    return app_pb2.FinishReason.Name(reason).removeprefix("FINISH_").lower() if known else "unspecified"  # type: ignore[arg-type]
