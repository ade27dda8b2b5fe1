"""The numbers of a request: each checked by name before the shared runtime sees them."""

import math
from collections.abc import Iterable
from typing import Final

from tie.app.frames import Limits
from tie.app.outcome import invalid
from tie.proto import request_pb2, runtime_pb2

MAX_CHOICES: Final = 8
MAX_LOGPROBS: Final = 20
MAX_STOPS: Final = 64
MAX_STOP_CHARACTERS: Final = 1024
MAX_TOKEN_RULES: Final = 4096  # entries of logit_bias, allowed_token_ids, bad_token_ids
_TURN_KEY_BYTES: Final = (0, 32)

# Name → (lowest, highest) of the plain numbers; the rules that are not a range are below.
_RANGES: Final[dict[str, tuple[float, float]]] = {
    "temperature": (0.0, 2.0),
    "top_k": (0, 2**31 - 1),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, 10.0),
    "min_tokens": (0, 2**31 - 1),
}
_NOT_ZERO: Final = ("top_p", "repetition_penalty")


def _plain(number: float) -> str:
    """As people write it: 2147483647, not 2.14748e+09."""
    return str(number) if isinstance(number, int) else f"{number:g}"


def sampling(asked: request_pb2.Sampling, vocab_size: int) -> runtime_pb2.Sampling:
    """What the runtime samples with. What was not asked for is off, and the temperature 1.

    Raises:
        RefusalError: INVALID_REQUEST, naming the field.
    """
    given = {field.name: value for field, value in asked.ListFields()}
    for name, (lowest, highest) in _RANGES.items():
        if name in given:
            value = given[name]
            if not math.isfinite(value) or not lowest <= value <= highest or (value == 0 and name in _NOT_ZERO):
                bound = "over" if name in _NOT_ZERO else "from"
                raise invalid(f"sampling.{name}", f"must be {bound} {_plain(lowest)} to {_plain(highest)}")
    for token_id, bias in asked.logit_bias.items():
        if not math.isfinite(bias) or abs(bias) > 100:
            raise invalid("sampling.logit_bias", f"the bias of token {token_id} must be from -100 to 100")
    _check_tokens("sampling.logit_bias", asked.logit_bias, vocab_size)
    _check_tokens("sampling.allowed_token_ids", asked.allowed_token_ids, vocab_size)
    _check_tokens("sampling.bad_token_ids", asked.bad_token_ids, vocab_size)
    if asked.allowed_token_ids and not set(asked.allowed_token_ids) - set(asked.bad_token_ids):
        raise invalid("sampling.bad_token_ids", "forbids every allowed token")
    return runtime_pb2.Sampling(
        temperature=asked.temperature if asked.HasField("temperature") else 1.0,
        top_k=asked.top_k,
        top_p=asked.top_p,
        min_p=asked.min_p,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        repetition_penalty=asked.repetition_penalty,
        seed=asked.seed if asked.HasField("seed") else None,
        logit_bias=asked.logit_bias,
        allowed_token_ids=asked.allowed_token_ids,
        bad_token_ids=asked.bad_token_ids,
    )


def output_tokens(request: request_pb2.InferenceRequest, limits: Limits, free: int) -> int:
    """How many tokens a choice may have: what was asked for, at most the limit and what the context leaves.

    Raises:
        RefusalError: INVALID_REQUEST, naming the field.
    """
    if request.HasField("max_tokens") and request.max_tokens < 1:
        raise invalid("max_tokens", "must be at least 1")
    most = min(limits.output_tokens, free)
    allowed = min(request.max_tokens, most) if request.HasField("max_tokens") else most
    if request.sampling.min_tokens > allowed:
        raise invalid("sampling.min_tokens", f"must be at most the {allowed} tokens that this request may produce")
    return allowed


def check_options(request: request_pb2.InferenceRequest) -> None:
    """Checks the fields that go on as they are.

    Raises:
        RefusalError: INVALID_REQUEST, naming the field.
    """
    if request.HasField("n") and not 1 <= request.n <= MAX_CHOICES:
        raise invalid("n", f"must be from 1 to {MAX_CHOICES}")
    if request.HasField("logprobs") and not 0 <= request.logprobs <= MAX_LOGPROBS:
        raise invalid("logprobs", f"must be from 0 to {MAX_LOGPROBS}")
    if len(request.stop) > MAX_STOPS:
        raise invalid("stop", f"must be at most {MAX_STOPS} strings")
    for position, stop in enumerate(request.stop):
        if not 0 < len(stop) <= MAX_STOP_CHARACTERS:
            raise invalid(f"stop[{position}]", f"must have 1 to {MAX_STOP_CHARACTERS} characters")
    if len(request.turn_key) not in _TURN_KEY_BYTES:
        raise invalid("turn_key", "must be 32 bytes, or empty")
    if request.priority not in request_pb2.Priority.values():
        raise invalid("priority", "is not one of the known priorities")


def _check_tokens(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    ids = list(token_ids)
    if len(ids) > MAX_TOKEN_RULES:
        raise invalid(name, f"must have at most {MAX_TOKEN_RULES} entries")
    if any(token_id >= vocab_size for token_id in ids):
        raise invalid(name, f"token ids must be below {vocab_size}")
