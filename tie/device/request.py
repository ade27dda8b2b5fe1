"""An InferenceRequest from plain Python values."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypedDict, Unpack

from tie.proto import request_pb2

Message = Mapping[str, str] | request_pb2.Message


class Options(TypedDict, total=False):
    """What may be said about how to answer; what is absent is the node's choice."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    bad_token_ids: Sequence[int]
    min_tokens: int
    stop: str | Sequence[str]
    max_tokens: int
    n: int
    ignore_eos: bool
    include_stop: bool
    logprobs: int
    json_schema: str
    regex: str
    lark: str
    json_object: bool
    tools: Sequence[request_pb2.Tool]
    tool_choice: str
    turn_key: bytes
    batch: bool


_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "min_tokens",
)
_PLAIN = ("max_tokens", "n", "ignore_eos", "include_stop", "logprobs", "tool_choice", "turn_key")
_CONSTRAINTS = ("json_schema", "regex", "lark", "json_object")


def build(
    *, model: str, messages: Iterable[Message] = (), prompt: str = "", **options: Unpack[Options]
) -> request_pb2.InferenceRequest:
    """Builds the request. What the values mean is the node's to judge; only their types are checked here.

    Args:
        model: the model id.
        messages: `{"role": …, "content": …}`, or whole messages.
        prompt: raw text to complete, instead of messages.
        options: see `Options`.

    Raises:
        TypeError: an option of another name or type.
        ValueError: a number that its field cannot hold, or more than one constraint.
    """
    unknown = options.keys() - Options.__annotations__.keys()
    if unknown:
        raise TypeError(f"unknown options: {', '.join(sorted(unknown))}")
    values: dict[str, object] = dict(options)
    request = request_pb2.InferenceRequest(model=model, prompt=prompt, messages=[_message(one) for one in messages])
    for name in _PLAIN:
        if name in values:
            setattr(request, name, values[name])
    for name in _SAMPLING:
        if name in values:
            setattr(request.sampling, name, values[name])
    if "logit_bias" in options:
        request.sampling.logit_bias.update(options["logit_bias"])
    if "allowed_token_ids" in options:
        request.sampling.allowed_token_ids.extend(options["allowed_token_ids"])
    if "bad_token_ids" in options:
        request.sampling.bad_token_ids.extend(options["bad_token_ids"])
    stop = options.get("stop", ())
    request.stop.extend([stop] if isinstance(stop, str) else stop)
    request.tools.extend(options.get("tools", ()))
    constraints = [name for name in _CONSTRAINTS if name in values]
    if len(constraints) > 1:
        raise ValueError(f"one constraint at a time: {', '.join(constraints)}")
    for name in constraints:
        setattr(request.constraint, name, values[name])
    if options.get("batch"):
        request.priority = request_pb2.PRIORITY_BATCH
    return request


def with_images(text: str, images: Iterable[bytes]) -> request_pb2.Message:
    """A user's message: images, and then text.

    Args:
        text: what is asked about them.
        images: the files, as they are.
    """
    parts = [request_pb2.Part(image=image) for image in images]
    return request_pb2.Message(role="user", parts=[*parts, request_pb2.Part(text=text)])


def _message(message: Message) -> request_pb2.Message:
    if isinstance(message, request_pb2.Message):
        return message
    unknown = message.keys() - {"role", "content"}
    if unknown:
        raise TypeError(f"a message has a role and a content, not: {', '.join(sorted(unknown))}")
    return request_pb2.Message(role=message["role"], parts=[request_pb2.Part(text=message["content"])])
