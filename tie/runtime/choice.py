"""What a token means for one choice of a request: text, stop strings, grammar, the end."""

from collections.abc import Iterable
from dataclasses import dataclass

from tie.assets.tokenizer import Tokenizer
from tie.bones.sampler import Sampled, SampleRow
from tie.proto import runtime_pb2
from tie.runtime.closing import Closing
from tie.runtime.closing import begins as closing_begins
from tie.runtime.grammar import Grammar, Mask
from tie.runtime.request import Request
from tie.runtime.sequence import Sequence
from tie.runtime.stops import StopMatcher


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of new tokens: perhaps some to send, perhaps the end."""

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
        closing: brings JSON to its end where tokens run out; None where none is wanted.
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
        closing: Closing | None,
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
        self._closing: Closing | None = None
        self._closes_within = closing_begins(self.sequence.max_length - len(request.prompt))
        self._cached = 0
        self._stops = StopMatcher(request.stop, include_stop=request.include_stop)
        self._decoder = tokenizer.stream_decoder()
        self._end_ids = request.stop_ids if request.ignore_eos else request.stop_ids | end_ids
        # What an answer that is still too short must not end with.
        self._enders: tuple[int, ...] = tuple(sorted(request.stop_ids | end_ids))
        if grammar:
            # What has no logits has no logprobs, and to forbid a token is the sampler's business.
            params = request.params[index]
            forbids = bool(params.bad_ids) or params.allowed_ids is not None or request.min_tokens > 0
            grammar.forces = request.logprobs is None and not forbids
            self._closing = closing if request.json and not forbids else None
            grammar.begin()  # while the prompt is computed

    def restore(self, tokens: int) -> None:
        """Says that the first `tokens` tokens need not be computed: they will be copied in once there are blocks."""
        self.sequence.restored = tokens
        self._cached = max(self._cached, tokens)

    def share(self, prefix: tuple[int, ...], tokens: int) -> None:
        """Says that the first `tokens` tokens come from these nodes of the prefix trie."""
        self.sequence.prefix = prefix
        self._cached = max(self._cached, tokens)

    def ready(self, timeout: float) -> bool:
        """Whether `forced` and `row` answer at once, after waiting for the grammar for at most `timeout` seconds.

        Raises:
            GrammarError: it takes too long.
        """
        return self._grammar is None or self._grammar.ready(timeout)

    def forced(self) -> Outcome | None:
        """Appends the tokens that the grammar forces, if any, and says what follows from them.

        Their place in the text is known without the model, their keys and values are not: these are computed in the
        next step, like a prompt's.

        Raises:
            GrammarError: the grammar allows no token.
        """
        ids = self._grammar.forced() if self._grammar else ()
        return self._append([Sampled(token) for token in ids]) if ids else None

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
            mask=self._mask(),
            banned=self._enders if len(output) < self._request.min_tokens else (),
            logprobs=self._request.logprobs,
        )

    def _mask(self) -> Mask | None:
        mask = self._grammar.mask() if self._grammar else None
        if mask is not None and self._closing and self.sequence.room <= self._closes_within:
            return self._closing.narrowed(mask)
        return mask

    def accept(self, sampled: Sampled) -> Outcome:
        """Appends the token and says what follows from it.

        Raises:
            GrammarError: the grammar does not allow it.
        """
        return self._append([sampled])

    def _append(self, new: Iterable[Sampled]) -> Outcome:
        tokens = runtime_pb2.Tokens(index=self.index)
        finished = None
        for sampled in new:
            finished = self._append_one(sampled, tokens)
            if finished:
                break
        else:
            if self._grammar:
                self._grammar.begin()  # while the next step runs
        return Outcome(tokens if tokens.token_ids else None, finished)

    def _append_one(self, sampled: Sampled, tokens: runtime_pb2.Tokens) -> runtime_pb2.Finished | None:
        """One token: into the sequence, into `tokens` where it is shown. Returns the end, if that is it."""
        token = sampled.token_id
        self.sequence.output.append(token)
        ended = token in self._end_ids
        if self._grammar:
            self._grammar.accept(token)
        # A token that ends the answer is no part of it, unless asked for.
        shown = not ended or self._request.include_stop
        match = self._stops.feed(self._decoder.feed(token)) if shown else None
        if shown:
            tokens.token_ids.append(token)
            # With the stop string complete, what will be dropped must not leave with the token that completed it.
            tokens.hold_bytes = match.drop_bytes if match else self._stops.hold_bytes
            if self._request.logprobs is not None:
                tokens.logprobs.add(logprob=sampled.logprob, top_ids=sampled.top_ids, top_logprobs=sampled.top_logprobs)
        if match:
            return self.finished(runtime_pb2.REASON_STOP_STRING, drop_bytes=match.drop_bytes)
        if ended or (self._grammar and self._grammar.complete):
            return self.finished(runtime_pb2.REASON_STOP_TOKEN)
        return self.finished(runtime_pb2.REASON_LENGTH) if self.sequence.full else None

    def finished(self, reason: "runtime_pb2.Reason.ValueType", *, drop_bytes: int = 0) -> runtime_pb2.Finished:
        """The message that ends this choice."""
        return runtime_pb2.Finished(
            index=self.index,
            reason=reason,
            drop_bytes=drop_bytes,
            prompt_tokens=len(self.sequence.prompt),
            completion_tokens=len(self.sequence.output),
            cached_tokens=self._cached,
        )
