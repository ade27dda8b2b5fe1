"""What one token means for one choice of a request: text, stop strings, grammar, the end."""

from dataclasses import dataclass

from tie.assets.tokenizer import Tokenizer
from tie.bones.sampler import Sampled, SampleRow
from tie.proto import runtime_pb2
from tie.runtime.grammar import Grammar
from tie.runtime.request import Request
from tie.runtime.sequence import Sequence
from tie.runtime.stops import StopMatcher


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one sampled token: perhaps tokens to send, perhaps the end."""

    tokens: runtime_pb2.Tokens | None
    finished: runtime_pb2.Finished | None


class Choice:
    """One of a request's n answers, with its sequence. Owned by the step thread.

    Args:
        request: the checked request.
        index: which of its choices.
        max_length: prompt and answer together never grow beyond this many tokens.
        end_ids: the bundle's end-of-turn tokens.
        tokenizer: gives the stream decoder.
        grammar: this choice's own, or None.
        deadline: on the engine's clock, or None.
    """

    def __init__(
        self,
        request: Request,
        index: int,
        *,
        max_length: int,
        end_ids: frozenset[int],
        tokenizer: Tokenizer,
        grammar: Grammar | None,
        deadline: float | None,
    ) -> None:
        self.index = index
        self.sequence = Sequence(
            prompt=request.prompt,
            max_length=min(max_length, len(request.prompt) + request.max_tokens),
            priority=request.priority,
            deadline=deadline,
        )
        self._request = request
        self._grammar = grammar
        self._stops = StopMatcher(request.stop, include_stop=request.include_stop)
        self._decoder = tokenizer.stream_decoder()
        self._end_ids = request.stop_ids if request.ignore_eos else request.stop_ids | end_ids
        # What an answer that is still too short must not end with.
        self._enders: tuple[int, ...] = tuple(sorted(request.stop_ids | end_ids))

    def row(self) -> SampleRow:
        """How to choose the next token.

        Raises:
            GrammarError: the grammar allows none.
        """
        output = self.sequence.output
        return SampleRow(
            params=self._request.params[self.index],
            position=len(output),
            prompt_ids=self.sequence.prompt,
            output_ids=output,
            mask=self._grammar.mask() if self._grammar else None,
            banned=self._enders if len(output) < self._request.min_tokens else (),
            logprobs=self._request.logprobs,
        )

    def accept(self, sampled: Sampled) -> Outcome:
        """Appends the token and says what follows from it.

        Raises:
            GrammarError: the grammar does not allow it.
        """
        token = sampled.token_id
        self.sequence.output.append(token)
        ended = token in self._end_ids
        if self._grammar:
            self._grammar.accept(token)
        # A token that ends the answer is no part of it, unless asked for.
        shown = not ended or self._request.include_stop
        match = self._stops.feed(self._decoder.feed(token)) if shown else None
        # With the stop string complete, what will be dropped must not leave with the token that completed it.
        hold = match.drop_bytes if match else self._stops.hold_bytes
        tokens = self._tokens(token, sampled, hold) if shown else None
        if match:
            return Outcome(tokens, self.finished(runtime_pb2.REASON_STOP_STRING, drop_bytes=match.drop_bytes))
        if ended or (self._grammar and self._grammar.complete):
            return Outcome(tokens, self.finished(runtime_pb2.REASON_STOP_TOKEN))
        if self.sequence.full:
            return Outcome(tokens, self.finished(runtime_pb2.REASON_LENGTH))
        return Outcome(tokens, None)

    def finished(self, reason: "runtime_pb2.Reason.ValueType", *, drop_bytes: int = 0) -> runtime_pb2.Finished:
        """The message that ends this choice."""
        return runtime_pb2.Finished(
            index=self.index,
            reason=reason,
            drop_bytes=drop_bytes,
            prompt_tokens=len(self.sequence.prompt),
            completion_tokens=len(self.sequence.output),
        )

    def _tokens(self, token: int, sampled: Sampled, hold_bytes: int) -> runtime_pb2.Tokens:
        tokens = runtime_pb2.Tokens(index=self.index, token_ids=[token], hold_bytes=hold_bytes)
        if self._request.logprobs is not None:
            tokens.logprobs.add(logprob=sampled.logprob, top_ids=sampled.top_ids, top_logprobs=sampled.top_logprobs)
        return tokens
