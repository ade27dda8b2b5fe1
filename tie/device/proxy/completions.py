"""An answer as `/v1/completions` gives it: whole, or in chunks while it comes."""

from collections.abc import Sequence

from tie.device.answer import Delta, TokenLogprob
from tie.device.proxy.answers import Answer, Choice, Json, Label, finite
from tie.device.proxy.requests import CompletionRequest


def answer(asked: CompletionRequest) -> Answer:
    """The answer to a request, of which nothing has come yet."""
    label = Label.new("cmpl", "text_completion", "text_completion", asked.model)
    return Answer(label, [_Choice(scored=asked.logprobs is not None) for _ in range(asked.count)], asked)


class _Choice(Choice):
    def __init__(self, *, scored: bool) -> None:
        self._scored = scored
        self._texts: list[str] = []
        self._tokens: list[TokenLogprob] = []
        self._offset = 0  # characters of the tokens so far

    def take(self, piece: Delta) -> list[Json]:
        if not piece.text and not piece.logprobs:
            return []
        self._texts.append(piece.text)
        self._tokens += piece.logprobs
        part = self._part(piece.text, piece.logprobs, self._offset)
        self._offset += sum(map(_size, piece.logprobs))
        return [part]

    def end(self) -> list[Json]:
        return [{"text": "", "logprobs": None}]

    def whole(self) -> Json:
        return self._part("".join(self._texts), self._tokens)

    def _part(self, text: str, tokens: Sequence[TokenLogprob], offset: int = 0) -> Json:
        return {"text": text, "logprobs": _logprobs(tokens, offset) if self._scored else None}


def _logprobs(tokens: Sequence[TokenLogprob], offset: int) -> Json:
    """Logprobs in the API's older form, of tokens that begin `offset` characters after the answer's beginning."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += _size(token)
    return {
        "tokens": [token.token.decode(errors="replace") for token in tokens],
        "token_logprobs": [finite(token.logprob) for token in tokens],
        "top_logprobs": [
            {top.token.decode(errors="replace"): finite(top.logprob) for top in token.top} for token in tokens
        ],
        "text_offset": offsets,
    }


def _size(token: TokenLogprob) -> int:
    return len(token.token.decode(errors="ignore"))
