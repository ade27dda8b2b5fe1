"""An answer as `/v1/completions` gives it: whole, or in chunks while it comes."""

from tie.device.answer import Delta, Result, TokenLogprob
from tie.device.proxy.answers import Json, Label, finite, reason, usage
from tie.device.proxy.requests import CompletionRequest


class _Choice:
    """One of the `n` answers as it grows."""

    def __init__(self) -> None:
        self.text = ""
        self.tokens: list[TokenLogprob] = []
        self._offset = 0  # characters of the tokens so far

    def scored(self, tokens: tuple[TokenLogprob, ...]) -> Json:
        """Logprobs in the API's older form, for the next tokens."""
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token.token.decode(errors="ignore"))
        self.tokens += tokens
        return _logprobs(tokens, offsets)


class CompletionAnswer:
    """One answer. Feed it all that comes; it gives chunks, and at the end the whole."""

    def __init__(self, asked: CompletionRequest) -> None:
        self._label = Label.new("cmpl", "text_completion", asked.model)
        self._choices = [_Choice() for _ in range(max(1, asked.n or 1))]
        self._scored = asked.logprobs is not None
        self._usage: Json = {"usage": None} if asked.stream_options and asked.stream_options.include_usage else {}

    def begin(self) -> list[Json]:
        """The chunks before any text: none."""
        return []

    def take(self, piece: Delta) -> list[Json]:
        """The chunks of a piece."""
        choice = self._choices[piece.index]
        choice.text += piece.text
        logprobs = choice.scored(piece.logprobs) if self._scored else None
        if not piece.text and not piece.logprobs:
            return []
        return [self._chunk(piece.index, piece.text, logprobs)]

    def end(self, result: Result) -> list[Json]:
        """The last chunks."""
        chunks = [self._chunk(index, "", None, _reason(result, index)) for index in range(len(self._choices))]
        if self._usage:
            chunks.append(self._label.around([], usage=usage(result)))
        return chunks

    def whole(self, result: Result) -> Json:
        """The answer in one, after `end`."""
        choices = [
            {
                "index": index,
                "text": choice.text,
                "logprobs": _Choice().scored(tuple(choice.tokens)) if self._scored else None,
                "finish_reason": _reason(result, index),
            }
            for index, choice in enumerate(self._choices)
        ]
        return self._label.around(choices, usage=usage(result))

    def _chunk(self, index: int, text: str, logprobs: Json | None, finish: str | None = None) -> Json:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return self._label.around([choice], **self._usage)


def _reason(result: Result, index: int) -> str:
    return reason(result.finish[index] if index < len(result.finish) else "")


def _logprobs(tokens: tuple[TokenLogprob, ...], offsets: list[int]) -> Json:
    return {
        "tokens": [token.token.decode(errors="replace") for token in tokens],
        "token_logprobs": [finite(token.logprob) for token in tokens],
        "top_logprobs": [
            {top.token.decode(errors="replace"): finite(top.logprob) for top in token.top} for token in tokens
        ],
        "text_offset": offsets,
    }
