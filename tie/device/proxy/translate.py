"""An API request as the sealed protocol has it: `InferenceRequest`."""

from typing import Final

import msgspec

from tie.device.proxy import images
from tie.device.proxy.failures import invalid
from tie.device.proxy.requests import (
    ChatRequest,
    Common,
    CompletionRequest,
    ImagePart,
    JsonFormat,
    Message,
    NamedChoice,
    SchemaFormat,
    TextPart,
    Tool,
)
from tie.device.request import Options, build
from tie.proto import request_pb2

_SEEDS: Final = 2**64
_SAME_NAME: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "max_tokens",
    "n",
)
_KINDS: Final = frozenset({"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"})  # one says what a schema is of
_MAX_TEMPERATURE: Final = 2.0
_MODES: Final = frozenset({"none", "auto", "required"})


def chat(asked: ChatRequest) -> request_pb2.InferenceRequest:
    """A conversation; without its turn key.

    Raises:
        ApiError: it cannot be put so; the error names the field.
    """
    options = _common(asked)
    if asked.max_completion_tokens is not None:
        if asked.max_tokens not in {None, asked.max_completion_tokens}:
            raise invalid("max_tokens", "is older than max_completion_tokens and says something else: send one")
        options["max_tokens"] = asked.max_completion_tokens
    if asked.top_logprobs is not None and not asked.logprobs:
        raise invalid("top_logprobs", "wants logprobs: true")
    if asked.logprobs:
        options["logprobs"] = asked.top_logprobs or 0
    match asked.response_format:
        case JsonFormat():
            options["json_object"] = True
        case SchemaFormat(json_schema):
            options["json_schema"] = bytes(json_schema.schema).decode()
    if asked.tools:
        options["tools"] = [_tool(position, tool) for position, tool in enumerate(asked.tools)]
    if asked.tool_choice is not None:
        options["tool_choice"] = _choice(asked.tool_choice)
    messages = [_message(f"messages[{position}]", message) for position, message in enumerate(asked.messages)]
    return build(model=asked.model, messages=messages, **options)


def completion(asked: CompletionRequest) -> request_pb2.InferenceRequest:
    """A raw prompt.

    Raises:
        ApiError: it cannot be put so; the error names the field.
    """
    options = _common(asked)
    if asked.logprobs is not None:
        options["logprobs"] = asked.logprobs
    prompts = [asked.prompt] if isinstance(asked.prompt, str) else asked.prompt
    if len(prompts) != 1:
        raise invalid("prompt", "must be one text: ask for each in a request of its own")
    if not prompts[0]:
        raise invalid("prompt", "is empty")
    return build(model=asked.model, prompt=prompts[0], **options)


def _common(asked: Common) -> Options:
    if asked.stream_options is not None and not asked.stream:
        raise invalid("stream_options", "wants stream: true")
    if asked.temperature is not None and not 0 <= asked.temperature <= _MAX_TEMPERATURE:
        raise invalid("temperature", f"must be from 0 to {_MAX_TEMPERATURE:g}")
    options = Options()
    for name in _SAME_NAME:
        value = getattr(asked, name)
        if value is not None:
            options[name] = value
    if asked.seed is not None:
        options["seed"] = asked.seed % _SEEDS
    if asked.stop is not None:
        options["stop"] = asked.stop
    if asked.logit_bias:
        options["logit_bias"] = {_token_id(name): bias for name, bias in asked.logit_bias.items()}
    return options


def _token_id(name: str) -> int:
    if not (name.isascii() and name.isdigit() and len(name) < 10):
        raise invalid("logit_bias", "its keys must be token ids")
    return int(name)


def _message(field: str, message: Message) -> request_pb2.Message:
    parts: list[request_pb2.Part] = []
    match message.content:
        case str(text):
            parts = [request_pb2.Part(text=text)]
        case list(content):
            parts = [_part(f"{field}.content[{position}]", part) for position, part in enumerate(content)]
    calls = message.tool_calls or []
    if not parts and not calls:
        raise invalid(f"{field}.content", "is empty")
    return request_pb2.Message(
        role=message.role,
        parts=parts,
        tool_calls=[
            request_pb2.ToolCall(id=call.id, name=call.function.name, arguments_json=call.function.arguments)
            for call in calls
        ],
        tool_call_id=message.tool_call_id or "",
        name=message.name or "",
    )


def _part(field: str, part: TextPart | ImagePart) -> request_pb2.Part:
    if isinstance(part, TextPart):
        return request_pb2.Part(text=part.text)
    return request_pb2.Part(image=images.from_url(f"{field}.image_url.url", part.image_url.url))


def _tool(position: int, tool: Tool) -> request_pb2.Tool:
    function = tool.function
    return request_pb2.Tool(
        name=function.name,
        description=function.description or "",
        parameters_json=_parameters(f"tools[{position}].function.parameters", bytes(function.parameters)),
    )


def _parameters(field: str, text: bytes) -> str:
    """A tool's parameters. Arguments are an object, which many leave to be understood."""
    if text in {b"", b"null"}:
        return ""
    try:
        schema = msgspec.json.decode(text)
    except RecursionError:
        raise invalid(field, "is nested too deeply") from None
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise invalid(field, 'must be a JSON schema of type "object"')
    if schema.keys().isdisjoint(_KINDS):
        return msgspec.json.encode({"type": "object", **schema}).decode()
    return text.decode()


def _choice(choice: str | NamedChoice) -> str:
    if isinstance(choice, str):
        if choice not in _MODES:
            raise invalid("tool_choice", "must be none, auto, required, or an object that names a function")
        return choice
    name = choice.function.name
    if name in _MODES or not name:
        raise invalid("tool_choice.function.name", "cannot be told from a mode: rename the function")
    return name
