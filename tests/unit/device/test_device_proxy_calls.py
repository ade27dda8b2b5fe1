"""Calls are found in a model's text however it is cut, and what is none stays text."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tie.device.proxy.tool_calls import Arguments, Begun, CallReader, Text

NAMES = frozenset({"weather", "clock"})


def read(pieces, *, single: bool = False) -> tuple[str, list[tuple[str, str]]]:
    """The text and the calls."""
    reader = CallReader(NAMES, single=single)
    text, calls = "", []
    for event in [event for piece in pieces for event in reader.feed(piece)] + reader.finish():
        match event:
            case Text(more):
                text += more
            case Begun(number, name):
                assert number == len(calls)
                calls.append([name, ""])
            case Arguments(number, more):
                assert number == len(calls) - 1
                calls[number][1] += more
    return text, [(name, arguments) for name, arguments in calls]


def tagged(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("said", "text", "calls"),
    [
        ("", "", []),
        ("just text", "just text", []),
        (tagged("clock", "{}"), "", [("clock", "{}")]),
        (f"Well.\n{tagged('clock', '{}')}\n{tagged('weather', '{}')}", "Well.", [("clock", "{}"), ("weather", "{}")]),
        (tagged("clock", '{"a": "}<tool_call>\\""}'), "", [("clock", '{"a": "}<tool_call>\\""}')]),
        ('{"name": "weather", "parameters": {"x": [1, {}]}}', "", [("weather", '{"x": [1, {}]}')]),
        ('\n { "name" : "weather" , "arguments" : {} } \n', "", [("weather", "{}")]),
        ('{"name": "weather", "arguments": {"cut": ', "", [("weather", '{"cut": ')]),
        ('{"name": "stranger", "arguments": {}}', '{"name": "stranger", "arguments": {}}', []),
        ('{"colours": ["red"]}', '{"colours": ["red"]}', []),
        ('{"name": "weather"}', '{"name": "weather"}', []),
        (tagged("stranger", "{}"), tagged("stranger", "{}"), []),
        ("<tool_call>never mind", "<tool_call>never mind", []),
        ("a <tool_ca", "a <tool_ca", []),
        ("spaces after \n ", "spaces after \n ", []),
    ],
)
def test_texts_and_calls(said, text, calls) -> None:
    assert read([said]) == (text, calls)
    assert read(said) == (text, calls)


def test_only_the_first_call_when_only_one_is_wanted() -> None:
    said = tagged("clock", "{}") + tagged("weather", "{}") + "more"
    assert read(said, single=True) == ("", [("clock", "{}")])


def test_arguments_stream_while_they_come() -> None:
    reader = CallReader(NAMES)
    reader.feed('{"name": "weather", "arguments": ')
    assert reader.feed('{"a": "long') == [Begun(0, "weather"), Arguments(0, '{"a": "long')]
    assert reader.feed(" text") == [Arguments(0, " text")]


PARTS = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", '{"name": "', "weather", '", "arguments": ', "{", "}", "\n", '"', "\\"]
    )
    | st.text(max_size=5),
    max_size=14,
)


@given(PARTS, st.lists(st.integers(0, 60), max_size=6))
def test_how_the_text_is_cut_makes_no_difference(parts, cuts) -> None:
    said = "".join(parts)
    places = [0, *sorted(min(cut, len(said)) for cut in cuts), len(said)]
    assert read([said[a:b] for a, b in itertools.pairwise(places)]) == read([said])


@given(st.dictionaries(st.text(max_size=6), st.text(max_size=6) | st.lists(st.integers()), max_size=4), st.booleans())
def test_arguments_come_out_as_they_went_in(value, plain) -> None:
    arguments = json.dumps(value, ensure_ascii=plain)
    assert read(tagged("weather", arguments)) == ("", [("weather", arguments)])


@given(st.text(alphabet=st.characters(exclude_characters="<{")))
def test_text_without_calls_is_untouched(said) -> None:
    assert read(said) == (said, [])
