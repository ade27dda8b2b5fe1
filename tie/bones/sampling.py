"""What a request asks of the sampler, and what it gets.

None of these has a telling `repr`: what a request asked and was answered belongs in no traceback.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tie.bones.errors import InputError

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_GREEDY_BELOW = 1e-5
_LARGEST = 1e9


@dataclasses.dataclass(frozen=True, repr=False)
class SamplingParams:
    """What a request asks of the sampler. The defaults are greedy.

    Attributes:
        temperature: 0 (below 1e-5) is greedy.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the likeliest tokens that together have this probability (Holtzman et al. 2020, arXiv 1904.09751);
            0 or 1 keeps all.
        min_p: keep tokens at least this likely, relative to the likeliest (Nguyen et al. 2024, arXiv 2407.01082).
        presence_penalty: subtracted once from the logit of every token in the output so far.
        frequency_penalty: subtracted as often as the token is in the output.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt and output (Keskar et
            al. 2019, arXiv 1909.05858); 0 or 1 is off.
        seed: of the randomness, 64 bits.
        logit_bias: added to logits, by token id.
        allowed_ids: None, or the only tokens that may be chosen.
        bad_ids: tokens that may not be chosen.

    Raises:
        InputError: a value outside its range. The message never holds the value.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    allowed_ids: frozenset[int] | None = None
    bad_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        """Raises InputError where a value is outside its range."""
        numbers = (
            *(self.temperature, self.top_p, self.min_p),
            *(self.presence_penalty, self.frequency_penalty, self.repetition_penalty),
            *self.logit_bias.values(),
        )
        if not all(abs(number) <= _LARGEST for number in numbers):  # NaN is not
            raise InputError("sampling parameters must be finite numbers of ordinary size")
        if self.temperature < 0:
            raise InputError("temperature must not be negative")
        if self.top_k < 0:
            raise InputError("top_k must not be negative")
        if not 0 <= self.top_p <= 1:
            raise InputError("top_p must be from 0 to 1")
        if not 0 <= self.min_p <= 1:
            raise InputError("min_p must be from 0 to 1")
        if self.repetition_penalty < 0:
            raise InputError("repetition_penalty must not be negative")
        if not 0 <= self.seed < 1 << 64:
            raise InputError("seed must be an unsigned number of 64 bits")
        if self.allowed_ids is not None and not self.allowed_ids:
            raise InputError("allowed_ids must not be empty")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always chosen."""
        return self.temperature < _GREEDY_BELOW

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises InputError where a token id is outside a vocabulary of `vocab_size`."""
        for ids in (self.bias[0], self.bad, self.allowed):
            check_ids(ids, vocab_size)

    # What stays the same in every step of a request is made once, as arrays.

    @functools.cached_property
    def bias(self) -> tuple[Ids, Floats]:
        """`logit_bias` as ids and values."""
        return as_ids(list(self.logit_bias)), np.array(list(self.logit_bias.values()), dtype=np.float32)

    @functools.cached_property
    def bad(self) -> Ids:
        """`bad_ids` as an array."""
        return as_ids(list(self.bad_ids))

    @functools.cached_property
    def allowed(self) -> Ids:
        """`allowed_ids` as an array; empty where all are allowed."""
        return as_ids(list(self.allowed_ids or ()))

    @functools.cached_property
    def repetition(self) -> np.float32:
        """`repetition_penalty`, 1 where it is off."""
        return np.float32(self.repetition_penalty or 1.0)

    @functools.cached_property
    def edits(self) -> bool:
        """Whether anything here changes logits, temperature aside."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition != 1
            or self.logit_bias
            or self.bad_ids
            or self.allowed_ids is not None
        )


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class SampleRow:
    """One row of logits and how to choose from it.

    Attributes:
        params: of the request.
        position: of the token to choose, within its output; no two tokens of one seed share one.
        prompt_ids: tokens of the prompt; used by the repetition penalty only.
        output_ids: tokens chosen so far; used by the penalties only.
        mask: None, or the grammar's: bit i % 32 of int32 word i // 32 allows token i; a token that it does not cover is
            not allowed.
        banned: more tokens that may not be chosen now, such as the end of the turn before `min_tokens`.
        logprobs: None, or how many of the likeliest tokens to report next to the chosen one's log-probability.
    """

    params: SamplingParams
    position: int
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    mask: npt.NDArray[np.int32] | None = None
    banned: Sequence[int] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        """Raises InputError where a number is negative."""
        if self.position < 0 or (self.logprobs or 0) < 0:
            raise InputError("position and logprobs must not be negative")

    @property
    def edited(self) -> bool:
        """Whether anything changes the logits before one is chosen."""
        return self.params.edits or self.mask is not None or len(self.banned) > 0


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Sampled:
    """The outcome of one row.

    Attributes:
        token_id: the chosen token.
        logprob: its natural log-probability under the model's own distribution, before penalties, masks and
            temperature; None where not asked.
        top_ids: the likeliest tokens under that distribution, likeliest first.
        top_logprobs: their log-probabilities.
    """

    token_id: int
    logprob: float | None = None
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


def as_ids(values: Sequence[int]) -> Ids:
    """Token ids as an array, or InputError."""
    try:
        return np.array(values, dtype=np.int64).reshape(-1)
    except (ValueError, TypeError, OverflowError) as error:
        raise InputError("token ids must be whole numbers") from error


def check_ids(ids: Ids, vocab_size: int) -> Ids:
    """Raises InputError where an id is outside a vocabulary of `vocab_size`; returns `ids`."""
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        raise InputError("a token id is outside the vocabulary")
    return ids
