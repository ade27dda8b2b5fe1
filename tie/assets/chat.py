"""Chat templates: messages to token ids, as Hugging Face's `apply_chat_template` does, without forged control tokens.

A template is Jinja from the bundle, run in Jinja's immutable sandbox. What a user wrote must never become a control
token (`<|im_end|>`), so every control token inside the messages is put between marks before rendering: a string of
private-use characters, drawn at random for each rendering, which no text can contain by accident or on purpose. A text
that begins or ends with a part of a control token, or is one, gets a mark there, lest a neighbour complete it. After rendering,
control tokens outside marks are the template's own; all between them is encoded as plain text.
"""

import datetime as dt
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NoReturn, get_args

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec

from tie.assets.bundle import Bundle
from tie.assets.manifest import CHAT_TEMPLATE_FILE, TokenizerInfo
from tie.assets.tokenizer import Tokenizer, load_tokenizer
from tie.daemon.errors import BundleError, UserError

_MARK_LENGTH: Final = 12  # of 6400 private-use characters: over 150 random bits
_PRIVATE_USE: Final = range(0xE000, 0xF900)

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
        self._tokenizer = tokenizer
        self._special_tokens = info.special_tokens
        # Longest first: a token takes priority over one that it contains.
        longest_first = sorted(tokenizer.control_tokens, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._starts = frozenset(token[:cut] for token in longest_first for cut in range(1, len(token)))
        self._ends = frozenset(token[cut:] for token in longest_first for cut in range(1, len(token)))
        self._tokens = longest_first
        self._longest = max(map(len, longest_first), default=0)

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
        values: dict[str, Any] = {"messages": [_plain(message) for message in messages], "tools": list(tools) or None}
        mark = "".join(chr(secrets.choice(_PRIVATE_USE)) for _ in range(_MARK_LENGTH))
        marked = _map_strings(values, lambda text: self._marked(text, mark))
        if marked == values:
            return self._tokenizer.encode(self._render(values, add_generation_prompt), special=True)
        rendered = self._render(marked, add_generation_prompt)
        # A template that asks tojson for ASCII writes the marks as escapes.
        rendered = rendered.replace(json.dumps(mark)[1:-1], mark)
        return self._encode_marked(rendered, mark)

    def _marked(self, text: str, mark: str) -> str:
        core = text.strip()  # templates trim; a mark outside the spaces would hinder them
        if not core:
            return text
        lengths = range(1, min(self._longest, len(core) + 1))
        inside = any(core in token for token in self._tokens)
        before = mark if inside or any(core[:length] in self._ends for length in lengths) else ""
        after = mark if inside or any(core[-length:] in self._starts for length in lengths) else ""
        inner = self._control.sub(lambda found: f"{mark}{found[0]}{mark}", core)
        return text.replace(core, f"{before}{inner}{after}", 1) if before or after or inner != core else text

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

    def _encode_marked(self, rendered: str, mark: str) -> list[int]:
        """Control tokens outside marks by id; the text between them, without the marks, as plain text."""
        ids: list[int] = []
        plain: list[str] = []

        def flush() -> None:
            if text := "".join(plain):
                ids.extend(self._tokenizer.encode(text))
            plain.clear()

        # A template's string methods can part the two marks of a token: a lone mark just breaks the text.
        quoted = re.compile(f"{mark}(?P<user>{self._control.pattern}){mark}|{mark}|(?P<own>{self._control.pattern})")
        position = 0
        for found in quoted.finditer(rendered):
            plain.append(rendered[position : found.start()])
            position = found.end()
            if found["own"] is not None:
                flush()
                ids.append(self._tokenizer.control_tokens[found["own"]])
            elif found["user"] is not None:
                plain.append(found["user"])
        plain.append(rendered[position:])
        flush()
        return ids


def _plain(message: ChatMessage) -> dict[str, Any]:
    """The message as templates expect it: plain values, absent where there is nothing to say."""
    content = message.content if isinstance(message.content, str) else [dict(part) for part in message.content]
    plain: dict[str, Any] = {"role": message.role, "content": content}
    if message.tool_calls:
        plain["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            | ({"id": call.id} if call.id else {})
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        plain["tool_call_id"] = message.tool_call_id
    if message.name:
        plain["name"] = message.name
    return plain


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_map_strings(item, change) for item in value]
    return value


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
