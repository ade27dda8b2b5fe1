"""Trying grammars out: hostile ones are refused or compile in good time, and are told why."""

import json
import threading
import time

import pytest

from tie.app import compiling
from tie.app.outcome import RefusalError
from tie.app.schemas import enforceable
from tie.proto import app_pb2


def objects(count: int) -> list:
    return [{"type": "object", "properties": {f"k{i}": {"const": i}}, "required": [f"k{i}"]} for i in range(count)]


def chain(count: int, link) -> dict:
    definitions = {f"d{i}": link(f"#/$defs/d{i + 1}", i) for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{count}": {"type": "object"}}}


def nested(count: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(count):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


BOMBS = {
    "a million items": {"type": "array", "items": {"type": "string"}, "minItems": 10**6, "maxItems": 10**9},
    "repetition": {"type": "string", "pattern": "^(a|b|c){1,5000}$"},
    "nested repetition": {"type": "string", "pattern": "((((a{1,50}){1,50}){1,50}){1,50}){1,50}"},
    "alternations": {"type": "string", "pattern": "|".join(f"({'ab' * 20}{i})" for i in range(2000))},
    "enum": {"enum": [f"value number {i}" for i in range(20_000)]},
    "enum below the cap": {"enum": [f"value number {i}" for i in range(4000)]},
    "enum of objects": {"enum": [{"a": i, "b": [i]} for i in range(5000)]},
    "nesting": nested(60),
    "anyOf": {"anyOf": objects(300)},
    "product of anyOf": {"allOf": [{"anyOf": objects(10)} for _ in range(8)]},
    "reference to itself": {"$ref": "#"},
    "chain of references": chain(3400, lambda ref, _: {"$ref": ref}),
    "doubling references": chain(200, lambda ref, _: {"properties": {"a": {"$ref": ref}, "b": {"$ref": ref}}}),
    "doubling allOf": chain(40, lambda ref, _: {"allOf": [{"$ref": ref}, {"$ref": ref}]}),
    "allOf with itself": chain(30, lambda ref, i: {"allOf": [{"$ref": ref}, {"properties": {f"p{i}": {"$ref": ref}}}]}),
    "common multiples": {"allOf": [{"type": "number", "multipleOf": p} for p in (1e-9, 7, 11, 13, 17, 19, 23, 29, 31)]},
    "a large multiple": {"type": "integer", "multipleOf": 999_999_937},
    "pattern properties": {"patternProperties": {f"^a{i}.*b{i}$": {"type": "string"} for i in range(300)}},
    "properties": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}},
    "a megabyte": {"properties": {f"p{i}": {"type": "object", "description": "d" * 80} for i in range(9000)}},
    "lookback": {"allOf": [{"type": "string", "pattern": f"^.*{chr(97 + i)}.{{{i + 5}}}$"} for i in range(20)]},
    "negations": {"not": {"anyOf": [{"required": [f"a{i}", f"b{i}"]} for i in range(500)]}},
    "dependencies": {"dependentRequired": {f"a{i}": [f"b{i}"] for i in range(200)}, "type": "object"},
}


@pytest.fixture(autouse=True)
def nothing_abandoned_runs():
    """A process has one trial in its life; these tests have many, and an overdue one works on."""
    yield
    for thread in threading.enumerate():
        if isinstance(thread, compiling._Trial):
            thread.join(60)
            assert not thread.is_alive()


def refused(text: str) -> RefusalError | None:
    try:
        assert compiling.check(text, "constraint") == text
    except RefusalError as refusal:
        return refusal
    return None


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_or_compiles_in_good_time(name):
    began = time.process_time()
    refusal = refused(json.dumps({"grammars": [{"json_schema": enforceable(BOMBS[name])}]}))
    # Of processor time, which a busy machine does not stretch; what is abandoned here would end with its process.
    assert time.process_time() - began < compiling.COMPILE_CPU_S + 0.3
    if refusal:
        assert refusal.status == app_pb2.STATUS_GRAMMAR_REFUSED
        assert refusal.detail.startswith("constraint: ")
        assert len(refusal.detail) < 500


@pytest.mark.parametrize(
    "text",
    [
        "start: " + "(" * 50_000 + '"a"' + ")" * 50_000,
        "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(8000)) + '\nr8000: "a"',
        "start: R0\n" + "\n".join(f'R{i}: R{i + 1} "a"' for i in range(6000)) + '\nR6000: "a"',
        "start: T\nT: " + "~(" * 40_000 + "/a/" + ")" * 40_000,
        "start: /" + "(" * 60_000 + "a" + ")" * 60_000 + "/",
    ],
    ids=["brackets", "rules", "terminals", "negations", "groups"],
)
def test_depth_does_not_end_the_process(text):
    refusal = refused(text)
    assert refusal is None or refusal.status == app_pb2.STATUS_GRAMMAR_REFUSED


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"not": {"pattern": "a"}, "contains": {}}, ("contains", "not")),
        ({"if": {"type": "string"}, "then": {"minLength": 1}}, ("if", "then")),
        ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, ("oneOf", "anyOf")),
        ({"type": "string", "pattern": "(?=a)b"}, ("look-ahead",)),
        ({"$ref": "#/nowhere"}, ("/nowhere",)),
    ],
)
def test_the_reason_names_what_is_in_the_way(schema, words):
    with pytest.raises(RefusalError) as caught:
        compiling.check(json.dumps({"grammars": [{"json_schema": enforceable(schema)}]}), "constraint.json_schema")
    assert any(word in caught.value.detail for word in words)
    assert words[0] not in str(caught.value)


def test_a_stack_size_is_left_as_it_was():
    before = threading.stack_size()
    compiling.check('start: "a"', "constraint.lark")
    assert threading.stack_size() == before
