"""What may be asked of the proxy: OpenAI's fields, some that other servers have, and nothing else.

What is not declared here is refused by name, as is a declared thing of another type. What a value means is the node's
to judge.
"""

import re
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec

from tie.device.proxy.failures import ApiError, invalid, unsupported

Count = Annotated[int, msgspec.Meta(ge=1, le=128)]
Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]

# Known to the API and without an effect here, because nothing of it goes to a node.
_IGNORED: Final = frozenset({"user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "metadata"})
# Known to the API and not served: refused, unless the value asks for what happens anyway.
_REFUSED: Final = MappingProxyType(
    {
        "audio": (),
        "best_of": (1,),
        "echo": (False,),
        "function_call": (),
        "functions": (),
        "modalities": (["text"],),
        "moderation": (),
        "prediction": (),
        "reasoning_effort": ("none",),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "suffix": ("",),
        "verbosity": ("medium",),
        "web_search_options": (),
    }
)
_PLACE: Final = re.compile(r"^(.*?)(?: - at `(?:key in )?(.*)`)?$", re.DOTALL)
_UNKNOWN: Final = re.compile(r"^Object contains unknown field `(.*)`$", re.DOTALL)
_MISSING: Final = re.compile(r"^Object missing required field `(.*)`$", re.DOTALL)


class TextPart(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """Text."""

    text: str


class ImageUrl(msgspec.Struct, forbid_unknown_fields=True):
    """Where an image is; a model has one way to look at it, so of `detail` only "auto" is taken."""

    url: str
    detail: Literal["auto"] | None = None


class ImagePart(msgspec.Struct, tag_field="type", tag="image_url", forbid_unknown_fields=True):
    """An image."""

    image_url: ImageUrl


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    """What a call calls; the arguments are JSON in a string."""

    name: str
    arguments: str = ""


class Call(msgspec.Struct, forbid_unknown_fields=True):
    """A call that the assistant made."""

    function: CalledFunction
    id: str = ""
    type: Literal["function"] = "function"


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One message. Of an answer that is sent back everything is taken, also the fields that are always empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart | ImagePart] | None = None
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[None], msgspec.Meta(max_length=0)] | None = None


class Function(msgspec.Struct, forbid_unknown_fields=True):
    """A tool; `strict` says what happens anyway."""

    name: str
    description: str | None = None
    parameters: msgspec.Raw = msgspec.Raw()
    strict: bool | None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    """The only kind of tool."""

    type: Literal["function"]
    function: Function


class NamedFunction(msgspec.Struct, forbid_unknown_fields=True):
    """A tool's name."""

    name: str


class NamedChoice(msgspec.Struct, forbid_unknown_fields=True):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class TextFormat(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """Any text."""


class JsonFormat(msgspec.Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    """Any JSON object."""


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    """A schema; `strict` says what happens anyway."""

    schema: msgspec.Raw
    name: str = ""
    description: str | None = None
    strict: bool | None = None


class SchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """JSON under a schema."""

    json_schema: JsonSchema


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """How a stream is sent. Obfuscation is accepted and not needed: what leaves this machine is padded."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Common(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What both kinds of request have."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    max_tokens: Int32 | None = None
    n: Count | None = None
    logit_bias: dict[str, float] | None = None
    # Not OpenAI's; the names are those of other servers of its API.
    top_k: Int32 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int32 | None = None
    ignore_eos: bool | None = None

    @property
    def count(self) -> int:
        """Of choices."""
        return self.n or 1


class ChatRequest(Common, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: Int32 | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None
    response_format: TextFormat | JsonFormat | SchemaFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: str | NamedChoice | None = None
    parallel_tool_calls: bool | None = None


class CompletionRequest(Common, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/completions`."""

    prompt: str | list[str]
    logprobs: Int32 | None = None


R = TypeVar("R", bound=Common)


def decode(body: bytes, kind: type[R]) -> R:
    """The request in an HTTP body.

    Raises:
        ApiError: it is none; the message is for the user alone, as it names what the user wrote.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        kept = {name: value for name, value in fields.items() if name not in _IGNORED and not _harmless(name, value)}
        return msgspec.json.decode(msgspec.json.encode(kept), type=kind)
    except msgspec.ValidationError as error:
        raise _explained(str(error)) from None
    except (msgspec.DecodeError, UnicodeError):
        raise invalid("", "the body is not JSON") from None
    except RecursionError:
        raise invalid("", "the body is nested too deeply") from None


def _harmless(name: str, raw: msgspec.Raw) -> bool:
    """Whether a field that is not served asks for nothing.

    Raises:
        ApiError: it asks for something.
    """
    if name not in _REFUSED:
        return False
    value: Any = msgspec.json.decode(raw)
    if value is None or any(value == fine and type(value) is type(fine) for fine in _REFUSED[name]):
        return True
    raise unsupported(name, "is not supported here")


def _explained(error: str) -> ApiError:
    """A decoder's message as an error that names the field."""
    found = _PLACE.match(error)
    reason, place = (found[1], found[2] or "") if found else ("is not valid", "")
    place = place.removeprefix("$").removeprefix(".")
    if unknown := _UNKNOWN.match(reason):
        return unsupported(f"{place}.{unknown[1]}" if place else unknown[1], "is not known here")
    if missing := _MISSING.match(reason):
        return invalid(f"{place}.{missing[1]}" if place else missing[1], "is required")
    return invalid(place, reason[:1].lower() + reason[1:])
