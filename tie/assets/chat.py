"""Chat templates: messages to token ids, as Hugging Face's `apply_chat_template` does, without forged control tokens.

A template is Jinja from the bundle, run in Jinja's immutable sandbox; tie.assets.marking keeps what users wrote from
becoming control tokens.
"""

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn, get_args

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec

from tie.assets.bundle import Bundle
from tie.assets.manifest import CHAT_TEMPLATE_FILE, TokenizerInfo
from tie.assets.marking import Marker
from tie.assets.tokenizer import Tokenizer, load_tokenizer
from tie.daemon.errors import BundleError, UserError

Role = Literal["system", "developer", "user", "assistant", "tool"]


class ChatError(UserError):
    """The model's template refuses these messages. The text is static: a template may quote what it refuses."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that the assistant made; `arguments` is a decoded JSON object, or the text as the model wrote it."""

    name: str
    arguments: dict[str, Any] | str
    id: str = ""


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message.

    Attributes:
        role: from a closed set: templates build control tokens around it.
        content: the text, or parts as templates for images expect them: {"type": "text", "text": …}, {"type": "image"}.
        tool_calls: what the assistant called.
        tool_call_id: which call a tool message answers.
        name: who speaks, or which tool answers.
    """

    role: Role
    content: str | tuple[dict[str, str], ...] = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""


class ChatTemplate:
    """A bundle's chat template together with its tokenizer."""

    def __init__(self, source: str, tokenizer: Tokenizer, info: TokenizerInfo) -> None:
        """Compiles the template.

        Raises:
            BundleError: the template is not Jinja.
        """
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise BundleError(f"{CHAT_TEMPLATE_FILE} is no valid template") from error
        self._marker = Marker(tokenizer)
        self._special_tokens = info.special_tokens

    @classmethod
    def load(cls, bundle: Bundle, tokenizer: Tokenizer | None = None) -> "ChatTemplate":
        """The bundle's template.

        Args:
            bundle: where it is.
            tokenizer: the bundle's tokenizer when the caller has it: loading it twice costs a tenth of a second.

        Raises:
            BundleError: the bundle has none (a base model takes raw prompts only) or it is damaged.
        """
        source = bundle.read(CHAT_TEMPLATE_FILE).decode("utf-8", "strict")
        return cls(source, tokenizer or load_tokenizer(bundle), bundle.manifest.tokenizer)

    def encode(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Token ids of a conversation. Equal to `transformers`' unless a message contains a control token.

        Args:
            messages: the conversation, oldest first.
            tools: {"type": "function", "function": {"name", "description", "parameters"}} each.
            add_generation_prompt: end with the header of the assistant's answer.

        Raises:
            ChatError: the template refuses the messages.
        """
        if any(message.role not in get_args(Role) for message in messages):
            raise ChatError("a message has an unknown role", hint=f"roles are {', '.join(get_args(Role))}")
        mark = self._marker.new_mark()
        values = {
            "messages": [self._marked(message, mark) for message in messages],
            "tools": self._marker.mark_tree(tools, mark) or None,
        }
        return self._marker.encode(self._render(values, add_generation_prompt), mark)

    def _marked(self, message: ChatMessage, mark: str) -> dict[str, Any]:
        """The message as templates expect it: plain values, absent where there is nothing to say; marked."""

        def text(value: str) -> str:
            return self._marker.mark(value, mark, words=True)

        def part(value: Mapping[str, str]) -> dict[str, str]:
            return {key: text(item) if key == "text" else item for key, item in value.items()}

        content = message.content
        plain: dict[str, Any] = {
            "role": message.role,
            "content": text(content) if isinstance(content, str) else [part(value) for value in content],
        }
        if message.tool_calls:
            calls: list[dict[str, Any]] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                | ({"id": call.id} if call.id else {})
                for call in message.tool_calls
            ]
            plain["tool_calls"] = self._marker.mark_tree(calls, mark)
        if message.tool_call_id:
            plain["tool_call_id"] = text(message.tool_call_id)
        if message.name:
            plain["name"] = text(message.name)
        return plain

    def _render(self, values: Mapping[str, Any], add_generation_prompt: bool) -> str:  # noqa: FBT001 (private)
        try:
            return self._template.render(
                **self._special_tokens, **values, documents=None, add_generation_prompt=add_generation_prompt
            )
        except Exception:  # noqa: BLE001 (a template can fail in any way, and its message may quote the user)
            raise ChatError(
                "the model's chat template refuses these messages",
                hint="check the order of roles, and whether this model takes system messages, tools or images",
            ) from None


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}`, which marks the assistant's part for training: here just its content."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own form)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The environment that templates on Hugging Face are written for."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 (templates pass it by position as well)
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return dt.datetime.now().strftime(pattern)  # noqa: DTZ005 (templates want the node's local date)
