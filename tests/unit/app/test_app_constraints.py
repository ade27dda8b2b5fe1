"""Constraints: what compiles accepts the right texts, what does not is refused by name, in this process."""

import json

import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from tie.app import constraints
from tie.app.outcome import RefusalError
from tie.proto import app_pb2, request_pb2

WEATHER = request_pb2.Tool(
    name="weather",
    description="of a place",
    parameters_json=json.dumps(
        {"type": "object", "properties": {"at": {"$ref": "#/$defs/place"}}, "required": ["at"],
         "additionalProperties": False, "$defs": {"place": {"type": "string"}}}
    ),
)  # fmt: skip
CLOCK = request_pb2.Tool(name="clock")


def request(tools=(), tool_choice="", **constraint) -> request_pb2.InferenceRequest:
    made = request_pb2.InferenceRequest(tools=tools, tool_choice=tool_choice)
    if constraint:
        made.constraint.CopyFrom(request_pb2.Constraint(**constraint))
    return made


def grammar(*arguments, **options) -> str | None:
    return constraints.grammar(request(*arguments, **options))


class Bytes:
    """One token per byte, as llguidance wants to be told."""

    eos_token_id = 256
    bos_token_id = 256
    tokens = (*(bytes([value]) for value in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, text):
        return list(text if isinstance(text, bytes) else text.encode())


@pytest.fixture(scope="module")
def vocabulary():
    return LLTokenizer(llguidance.TokenizerWrapper(Bytes()), n_vocab=257)


def accepts(vocabulary, made: str | None, text: str) -> bool:
    assert made is not None
    matcher = LLMatcher(vocabulary, made)
    assert not matcher.is_error(), matcher.get_error()
    return all(matcher.consume_token(token) for token in text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        ({"json_schema": '{"type": "integer"}'}, "42", '"42"'),
        ({"json_schema": "true"}, "[1]", "x"),
        ({"json_object": True}, '{"a": 1}', "[1]"),
        ({"regex": "a/b+"}, "a/bb", "a/"),
        ({"regex": r"\d{2}\n"}, "12\n", "12"),
        ({"lark": 'start: "yes" | "no"'}, "no", "maybe"),
        ({"lark": '{"not": "a grammar of grammars"}'}, None, None),
    ],
)
def test_each_kind_says_what_it_means(vocabulary, constraint, good, bad):
    if good is None:
        with pytest.raises(RefusalError):
            grammar(**constraint)
        return
    made = grammar(**constraint)
    assert accepts(vocabulary, made, good)
    assert not accepts(vocabulary, made, bad)


def test_no_constraint_is_no_grammar():
    assert grammar() is None
    assert grammar(json_object=False) is None
    assert grammar([WEATHER]) is None
    assert grammar([WEATHER], "auto") is None
    assert grammar([WEATHER], "none", json_object=True) is not None


def test_a_required_tool_is_a_call_of_any_of_them(vocabulary):
    made = grammar([WEATHER, CLOCK], "required")
    assert accepts(vocabulary, made, '{"name": "weather", "arguments": {"at": "Kyoto"}}')
    assert accepts(vocabulary, made, '{"name": "clock", "arguments": {}}')
    assert not accepts(vocabulary, made, '{"name": "weather", "arguments": {}}')
    assert not accepts(vocabulary, made, '{"name": "other", "arguments": {}}')


def test_a_named_tool_is_a_call_of_that_one(vocabulary):
    made = grammar([WEATHER, CLOCK], "clock")
    assert accepts(vocabulary, made, '{"name": "clock", "arguments": {"zone": 1}}')
    assert not accepts(vocabulary, made, '{"name": "weather", "arguments": {"at": "Kyoto"}}')


CALL = '<tool_call>\n{"name": "weather", "arguments": {"at": "Kyoto"}}\n</tool_call>'


def tagged(tools, choice, **constraint):
    return constraints.grammar(request(tools, choice, **constraint), tagged_calls=True)


def test_a_tagged_call_is_forced_with_its_tags(vocabulary):
    for choice in ("required", "weather"):
        made = tagged([WEATHER, CLOCK], choice)
        assert accepts(vocabulary, made, CALL)
        assert not accepts(vocabulary, made, f"Let me see. {CALL}")
        assert not accepts(vocabulary, made, CALL.removeprefix("<tool_call>\n"))


@pytest.mark.parametrize("choice", ["", "auto"])
def test_text_is_free_and_calls_in_it_are_not(vocabulary, choice):
    made = tagged([WEATHER, CLOCK], choice)
    for text in ("", "Hello.", "a <tool is no <tool_calls", CALL, f"Let me see.\n{CALL}", f"{CALL}\n{CALL} Done."):
        assert accepts(vocabulary, made, text)
    for text in (
        "<tool_call>x",
        CALL.replace("weather", "other"),
        CALL.replace("Kyoto", '", "b": "'),
        f"{CALL}<tool_call>",
    ):
        assert not accepts(vocabulary, made, text)


def test_auto_promises_nothing_that_cannot_be_enforced():
    hostile = request_pb2.Tool(name="odd", parameters_json='{"not": {"pattern": "a"}}')
    assert tagged([hostile], "auto") is None
    assert tagged([hostile], "none") is None
    with pytest.raises(RefusalError) as caught:
        tagged([hostile], "required")
    assert caught.value.status == GRAMMAR
    assert "not" in caught.value.detail


def test_a_constraint_goes_before_tools_that_may_be_called(vocabulary):
    made = tagged([CLOCK], "auto", json_object=True)
    assert accepts(vocabulary, made, "{}")
    assert not accepts(vocabulary, made, "text")


def deep(levels: int) -> str:
    return '{"items": ' * levels + "{}" + "}" * levels


INVALID, UNSUPPORTED, GRAMMAR = (
    app_pb2.STATUS_INVALID_REQUEST,
    app_pb2.STATUS_UNSUPPORTED,
    app_pb2.STATUS_GRAMMAR_REFUSED,
)


@pytest.mark.parametrize(
    ("constraint", "status"),
    [
        ({"json_schema": ""}, INVALID),
        ({"json_schema": "{"}, INVALID),
        ({"json_schema": "[1]"}, INVALID),
        ({"json_schema": '{"minimum": NaN}'}, INVALID),
        ({"json_schema": '{"const": "\\ud800"}'}, INVALID),
        ({"json_schema": deep(65)}, INVALID),
        ({"json_schema": deep(100_000)}, INVALID),
        ({"json_schema": '{"const": ' + "9" * 5000 + "}"}, INVALID),
        ({"json_schema": '{"type": "wish"}'}, GRAMMAR),
        ({"json_schema": '{"not": {"pattern": "a"}}'}, GRAMMAR),
        ({"json_schema": '{"$ref": "https://example.com/schema"}'}, GRAMMAR),
        ({"json_schema": json.dumps({"const": "x" * 300_000})}, GRAMMAR),
        ({"regex": ""}, INVALID),
        ({"regex": "("}, GRAMMAR),
        ({"regex": "(?=look)ahead"}, GRAMMAR),
        ({"lark": "  "}, INVALID),
        ({"lark": "start: missing"}, GRAMMAR),
    ],
)
def test_what_cannot_be_is_refused_by_name(constraint, status):
    with pytest.raises(RefusalError) as caught:
        grammar(**constraint)
    assert caught.value.status == status
    assert caught.value.detail.startswith(f"constraint.{next(iter(constraint))}:")


def test_a_forced_tool_and_a_constraint_at_once_are_unsupported():
    with pytest.raises(RefusalError) as caught:
        grammar([CLOCK], "required", json_object=True)
    assert caught.value.status == UNSUPPORTED


@pytest.mark.parametrize(
    ("tools", "choice", "field"),
    [
        ([request_pb2.Tool(name="")], "", "tools[0].name"),
        ([request_pb2.Tool(name='a", "b')], "", "tools[0].name"),
        ([CLOCK, CLOCK], "", "tools[1].name"),
        ([request_pb2.Tool(name="a", parameters_json="[]")], "", "tools[0].parameters_json"),
        ([request_pb2.Tool(name="a", parameters_json="{")], "", "tools[0].parameters_json"),
        ([CLOCK], "weather", "tool_choice"),
        ([], "required", "tool_choice"),
        ([request_pb2.Tool(name=f"t{number}") for number in range(129)], "", "tools"),
    ],
)
def test_tools_that_cannot_be_are_refused_by_name(tools, choice, field):
    with pytest.raises(RefusalError) as caught:
        constraints.tools(request(tools, choice))
    assert caught.value.status == INVALID
    assert caught.value.detail.split(":")[0] == field


def test_the_model_is_not_told_of_tools_that_it_must_not_use():
    assert constraints.tools(request([CLOCK], "none")) == []
    assert constraints.tools(request([CLOCK], "auto")) == [CLOCK]


@settings(deadline=None)  # the first example imports the compiler
@given(st.text(max_size=60))
def test_any_text_as_any_constraint_gives_a_grammar_or_a_refusal(text):
    for kind in ("json_schema", "regex", "lark"):
        try:
            made = json.loads(grammar(**{kind: text}) or "")
            detail = ""
        except RefusalError as refusal:
            made, detail = {}, refusal.detail
        assert "grammars" in made or detail.startswith(f"constraint.{kind}:")
