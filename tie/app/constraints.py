"""A JSON schema, regular expression, grammar or forced tool call as one llguidance grammar.

It is compiled here first, in the process that lives for this request alone: what does not compile never reaches the
runtime that others share.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, Final

from tie.app import compiling
from tie.app.outcome import RefusalError, invalid, unsupported
from tie.app.schemas import enforceable
from tie.proto import request_pb2

MAX_TOOLS: Final = 128
MAX_NESTING: Final = 64
CALL_TAGS: Final = ("<tool_call>\n", "\n</tool_call>")  # as the templates of Hermes and Qwen have them
_TOOL_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MODES: Final = ("", "none", "auto", "required")


def tools(request: request_pb2.InferenceRequest) -> list[request_pb2.Tool]:
    """The tools that the model is told of: none where the choice is "none".

    Raises:
        RefusalError: INVALID_REQUEST, naming the field.
    """
    if len(request.tools) > MAX_TOOLS:
        raise invalid("tools", f"must be at most {MAX_TOOLS}")
    names = [tool.name for tool in request.tools]
    for position, tool in enumerate(request.tools):
        if not _TOOL_NAME.fullmatch(tool.name):
            raise invalid(f"tools[{position}].name", "must be 1 to 64 letters, digits, _ or -")
        if tool.name in names[:position]:
            raise invalid(f"tools[{position}].name", "is taken by an earlier tool")
        parameters(tool, position)
    if request.tool_choice not in _MODES and request.tool_choice not in names:
        raise invalid("tool_choice", "names none of the tools")
    if request.tool_choice == "required" and not names:
        raise invalid("tool_choice", "requires a tool, and there is none")
    return [] if request.tool_choice == "none" else list(request.tools)


def parameters(tool: request_pb2.Tool, position: int) -> dict[str, Any]:
    """A tool's parameters as a JSON schema; any object where it declares none.

    Raises:
        RefusalError: INVALID_REQUEST, naming the field.
    """
    name = f"tools[{position}].parameters_json"
    schema = json_value(tool.parameters_json or '{"type": "object"}', name)
    if not isinstance(schema, dict):
        raise invalid(name, "must be a JSON object")
    return schema


def grammar(request: request_pb2.InferenceRequest, *, tagged_calls: bool = False) -> str | None:
    """The grammar that the answer must follow, or None for any answer.

    A tool choice of "auto" promises nothing: where calls are tagged, and so told from text, they are kept to the tools'
    schemas if these can be enforced.

    Args:
        request: the user's.
        tagged_calls: whether the model writes a call between `CALL_TAGS`; else an answer is a call or it is none.

    Raises:
        RefusalError: INVALID_REQUEST, UNSUPPORTED or GRAMMAR_REFUSED, naming the field.
    """
    constraint = request.constraint
    kind = constraint.WhichOneof("kind")
    if kind == "json_object" and not constraint.json_object:
        kind = None
    tags = CALL_TAGS if tagged_calls else ("", "")
    forced = _forced_tools(request)
    if forced and kind:
        raise unsupported("constraint", f"cannot be combined with tool_choice {request.tool_choice}")
    if forced:
        return _compiled({"lark_grammar": "\n".join(["start: call", *_call(forced, tags)])}, "tools")
    if kind is None and tagged_calls and request.tools and request.tool_choice != "none":
        try:
            return _compiled({"lark_grammar": _text_with_calls(list(enumerate(request.tools)))}, "tools")
        except RefusalError:
            return None
    if kind is None:
        return None
    field = f"constraint.{kind}"
    match kind:
        case "json_schema":
            schema = json_value(constraint.json_schema, field)
            if not isinstance(schema, dict | bool):
                raise invalid(field, "must be a JSON schema: an object or a boolean")
            return _compiled({"json_schema": enforceable(schema)}, field)
        case "json_object":
            return _compiled({"json_schema": enforceable({"type": "object"})}, field)
        case "regex":
            if not constraint.regex:
                raise invalid(field, "is empty")
            from llguidance import LLMatcher  # late, as most requests do without

            return compiling.check(LLMatcher.grammar_from_regex(constraint.regex), field)
        case "lark":
            if not constraint.lark.strip():
                raise invalid(field, "is empty")
            return _compiled({"lark_grammar": constraint.lark}, field)


def of_json(request: request_pb2.InferenceRequest) -> bool:
    """Whether its grammar, if it has one, is of JSON or of calls, which hold JSON."""
    return request.constraint.WhichOneof("kind") not in {"regex", "lark"}


def json_value(text: str, field: str) -> Any:
    """Parses JSON that the user wrote.

    Raises:
        RefusalError: INVALID_REQUEST, naming `field`.
    """
    try:
        value = json.loads(text, parse_constant=_no_constant)
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except RecursionError:
        raise invalid(field, "is nested too deeply") from None
    except ValueError:
        raise invalid(field, "is not JSON") from None
    if _deeper_than(MAX_NESTING, value):
        raise invalid(field, "is nested too deeply")
    return value


def _deeper_than(levels: int, value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels == 0 or any(_deeper_than(levels - 1, item) for item in inner)


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def _forced_tools(request: request_pb2.InferenceRequest) -> list[tuple[int, request_pb2.Tool]]:
    if request.tool_choice in {"", "none", "auto"}:
        return []
    return [
        (position, tool)
        for position, tool in enumerate(request.tools)
        if request.tool_choice in {"required", tool.name}
    ]


def _call(offered: Sequence[tuple[int, request_pb2.Tool]], tags: tuple[str, str]) -> list[str]:
    """Rules for `call`, of one of the tools: {"name": …, "arguments": …}, the arguments by the tool's own schema.

    Each schema is a grammar of its own, so that its "#/…" references go to its own root.
    """
    opening, closing = map(json.dumps, tags)
    lines = [f"call: {opening} (" + " | ".join(f"tool_{position}" for position, _ in offered) + f") {closing}"]
    for position, tool in offered:
        head = json.dumps(f'{{"name": "{tool.name}", "arguments": ')
        lines += [
            f'tool_{position}: {head} arguments_{position} "}}"',
            f"arguments_{position}: %json {json.dumps(enforceable(parameters(tool, position)))}",
        ]
    return lines


def _text_with_calls(offered: Sequence[tuple[int, request_pb2.Tool]]) -> str:
    """Any text; but the opening tag opens a call."""
    opening, closing = CALL_TAGS
    trigger = opening.rstrip()
    lines = [
        "start: (head call)* text",
        f"head[lazy]: TEXT {json.dumps(trigger)}",
        "text: TEXT",
        "TEXT: /(?s:.*)/",
    ]
    return "\n".join([*lines, *_call(offered, (opening.removeprefix(trigger), closing))])


def _compiled(body: dict[str, Any], field: str) -> str:
    return compiling.check(json.dumps({"grammars": [body]}), field)
