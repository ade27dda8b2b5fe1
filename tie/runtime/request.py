"""From a GenerateRequest, which another process wrote, to a checked Request that the engine can trust.

Every value is checked here, so that nothing a request carries can make a step fail: a step is shared with others.
"""

import hashlib
import math
import secrets
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kvxfer.tickets import TICKET_BYTES
from tie.assets.images import MAX_IMAGE_BYTES, MAX_IMAGES, Placeholders, Size
from tie.bones.sampler import SamplingParams
from tie.proto import runtime_pb2
from tie.runtime.grammar_compiler import MAX_GRAMMAR_BYTES
from tie.runtime.sequence import Priority
from tie.runtime.stops import MAX_STOP_CHARACTERS, MAX_STOPS

MAX_CHOICES: Final = 8
MAX_LOGPROBS: Final = 20
_MAX_IDS: Final = 4096  # entries in logit_bias, allowed and bad token ids, stop token ids


class RequestRefusedError(Exception):
    """The request cannot be served as it is.

    Attributes:
        code: which of the closed set of reasons.
        detail: names the field; no user data.
    """

    def __init__(self, code: "runtime_pb2.Code.ValueType", detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Bounds:
    """What this runtime can serve: the model's vocabulary and the longest sequence, in tokens.

    `placeholders` stand for images; None: the model takes none.
    """

    vocab_size: int
    max_length: int
    placeholders: Placeholders | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """A checked request. `params` has one entry per choice; `grammar` is None for unconstrained.

    `json` says that the grammar is of JSON, or of calls, which hold JSON among other text. `prompt` has one token for
    each of the `images`. `sizes` are what is known of them, none or one for each, and `prompt_length` the tokens that
    the prompt has with these.
    """

    prompt: tuple[int, ...]
    params: tuple[SamplingParams, ...]
    max_tokens: int
    min_tokens: int
    stop: tuple[str, ...]
    stop_ids: frozenset[int]
    ignore_eos: bool
    include_stop: bool
    logprobs: int | None
    grammar: str | None
    json: bool
    priority: Priority
    deadline_s: float | None
    import_ticket: bytes = b""
    export_ticket: bytes = b""
    images: tuple[bytes, ...] = ()
    sizes: tuple[Size | None, ...] = ()
    prompt_length: int = 0


def check(message: runtime_pb2.GenerateRequest, bounds: Bounds) -> Request:
    """Checks every field.

    Raises:
        RequestRefusedError: a field is impossible, or a wish that this runtime does not fulfil.
    """
    _require(bool(message.token_ids), "token_ids: empty")
    _ids_in_vocabulary("token_ids", message.token_ids, bounds)
    if len(message.token_ids) >= bounds.max_length:
        raise RequestRefusedError(
            runtime_pb2.CODE_PROMPT_TOO_LONG,
            f"token_ids: {len(message.token_ids)} tokens leave no room for an answer within {bounds.max_length}",
        )
    sizes, length = _images(message, bounds)
    for field in ("import_ticket", "export_ticket"):
        _require(len(getattr(message, field)) in {0, TICKET_BYTES}, f"{field}: {TICKET_BYTES} bytes, or empty")
    _require(message.max_tokens >= 1, "max_tokens: at least 1")
    _require(message.min_tokens <= message.max_tokens, "min_tokens: more than max_tokens")
    _require(message.n <= MAX_CHOICES, f"n: at most {MAX_CHOICES}")
    _require(len(message.stop) <= MAX_STOPS, f"stop: at most {MAX_STOPS}")
    _require(all(1 <= len(stop) <= MAX_STOP_CHARACTERS for stop in message.stop), "stop: an entry is empty or too long")
    _ids_in_vocabulary("stop_token_ids", message.stop_token_ids, bounds, most=_MAX_IDS)
    logprobs = message.logprobs if message.HasField("logprobs") else None
    _require(logprobs is None or logprobs <= MAX_LOGPROBS, f"logprobs: at most {MAX_LOGPROBS}")
    grammar = message.grammar if message.HasField("grammar") else None
    if grammar is not None and len(grammar.encode()) > MAX_GRAMMAR_BYTES:
        raise RequestRefusedError(runtime_pb2.CODE_GRAMMAR, f"grammar: larger than {MAX_GRAMMAR_BYTES} bytes")
    return Request(
        prompt=tuple(message.token_ids),
        params=_sampling(message.sampling, max(1, message.n), bounds),
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop=tuple(message.stop),
        stop_ids=frozenset(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        include_stop=message.include_stop,
        logprobs=logprobs,
        grammar=grammar,
        json=message.json,
        priority=_priority(message),
        deadline_s=message.deadline_ms / 1000 if message.deadline_ms else None,
        import_ticket=message.import_ticket,
        export_ticket=message.export_ticket,
        images=tuple(message.images),
        sizes=sizes,
        prompt_length=length,
    )


def _images(message: runtime_pb2.GenerateRequest, bounds: Bounds) -> tuple[tuple[Size | None, ...], int]:
    """Each has its place, and each place its image. What is in them is seen where they are decoded."""
    if bounds.placeholders is None:
        if message.images:
            raise RequestRefusedError(runtime_pb2.CODE_UNSUPPORTED, "images: this model takes none")
        return (), len(message.token_ids)
    _require(len(message.images) <= MAX_IMAGES, f"images: at most {MAX_IMAGES}")
    _require(all(len(image) <= MAX_IMAGE_BYTES for image in message.images), f"images: {MAX_IMAGE_BYTES} bytes at most")
    places = sum(token == bounds.placeholders.token_id for token in message.token_ids)
    _require(places == len(message.images), "images: as many as there are image tokens")
    _require(len(message.image_sizes) in {0, places}, "image_sizes: none, or one for each image")
    sizes = tuple((size.rows, size.columns) if size.known else None for size in message.image_sizes)
    _require(all(map(bounds.placeholders.possible, filter(None, sizes))), "image_sizes: impossible")
    return sizes, len(bounds.placeholders.expanded(message.token_ids, sizes or [None] * places).ids)


def _sampling(sampling: runtime_pb2.Sampling, choices: int, bounds: Bounds) -> tuple[SamplingParams, ...]:
    _range("temperature", sampling.temperature, 0, 100)
    _range("top_p", sampling.top_p, 0, 1)
    _range("min_p", sampling.min_p, 0, 1)
    _range("presence_penalty", sampling.presence_penalty, -10, 10)
    _range("frequency_penalty", sampling.frequency_penalty, -10, 10)
    _range("repetition_penalty", sampling.repetition_penalty, 0, 10)
    _ids_in_vocabulary("logit_bias", sampling.logit_bias, bounds, most=_MAX_IDS)
    for bias in sampling.logit_bias.values():
        _range("logit_bias", bias, -1000, 1000)
    _ids_in_vocabulary("allowed_token_ids", sampling.allowed_token_ids, bounds)
    _ids_in_vocabulary("bad_token_ids", sampling.bad_token_ids, bounds)
    allowed, bad = frozenset(sampling.allowed_token_ids), frozenset(sampling.bad_token_ids)
    _require(not allowed or bool(allowed - bad), "bad_token_ids: no allowed token is left")
    _require(len(bad) < bounds.vocab_size, "bad_token_ids: no token is left")
    seed = sampling.seed if sampling.HasField("seed") else secrets.randbits(64)
    return tuple(
        SamplingParams(
            temperature=sampling.temperature,
            top_k=min(sampling.top_k, bounds.vocab_size),
            top_p=sampling.top_p or 1.0,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty or 1.0,
            seed=_choice_seed(seed, index),
            logit_bias=dict(sampling.logit_bias),
            allowed_ids=allowed or None,
            bad_ids=bad,
        )
        for index in range(choices)
    )


def _choice_seed(seed: int, index: int) -> int:
    """The first choice has the request's own, so that it is the answer that n = 1 gives; the others one derived."""
    if index == 0:
        return seed
    derived = hashlib.blake2b(struct.pack("<QI", seed, index), digest_size=8).digest()
    return int.from_bytes(derived, "little")


def _priority(message: runtime_pb2.GenerateRequest) -> Priority:
    if message.canary:
        # Ahead of everybody, so it must stay as small as a canary is.
        _require(len(message.token_ids) <= 16 and message.max_tokens == 1 and message.n <= 1, "canary: too large")
        return Priority.CANARY
    return Priority.BATCH if message.batch_priority else Priority.INTERACTIVE


def _require(condition: bool, detail: str) -> None:  # noqa: FBT001 (reads as an assertion)
    if not condition:
        raise RequestRefusedError(runtime_pb2.CODE_INVALID, detail)


def _range(field: str, value: float, least: float, most: float) -> None:
    _require(math.isfinite(value) and least <= value <= most, f"{field}: between {least} and {most}")


def _ids_in_vocabulary(field: str, ids: Iterable[int], bounds: Bounds, *, most: int | None = None) -> None:
    ids = tuple(ids)
    _require(most is None or len(ids) <= most, f"{field}: at most {most} entries")
    _require(max(ids, default=0) < bounds.vocab_size, f"{field}: an id is outside the vocabulary")
