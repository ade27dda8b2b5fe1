"""Schemas: what is made of one admits the same JSON, to an independent validator and to the grammar itself."""

import json
import random

import jsonschema
import llguidance
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from tie.app.compiling import _Bytes
from tie.app.schemas import ENFORCED_FORMATS, enforceable

DIALECT = jsonschema.Draft202012Validator


@pytest.fixture(scope="module")
def vocabulary():
    return LLTokenizer(llguidance.TokenizerWrapper(_Bytes()), n_vocab=257)


def matcher(vocabulary, schema, *, raw=False):
    made = schema if raw else enforceable(schema)
    return LLMatcher(vocabulary, json.dumps({"grammars": [{"json_schema": made}]}), log_level=0)


def compiled(vocabulary, schema):
    made = matcher(vocabulary, schema)
    assert not made.is_error(), made.get_error()
    return made


def admits(vocabulary, schema, text: str) -> bool:
    made = compiled(vocabulary, schema)
    data = list(text.encode())
    return made.try_consume_tokens(data) == len(data) and made.is_accepting()


def valid_to_the_standard(schema, instance) -> bool:
    dialect = jsonschema.validators.validator_for(schema, default=DIALECT)
    return dialect(schema, format_checker=dialect.FORMAT_CHECKER).is_valid(instance)


def written(made, rng: random.Random, most: int = 3000) -> str | None:
    """A text that the grammar admits, chosen at random byte by byte; None where it does not end in time."""
    out = bytearray()
    for _ in range(most):
        bits = made.compute_bitmask()
        if made.is_stopped():
            return out.decode()
        allowed = [token for token in range(257) if bits[token >> 3] >> (token & 7) & 1]
        # Ends where it may, and prefers what closes: otherwise hardly any text would be finished.
        token = 256 if 256 in allowed else rng.choice([byte for byte in allowed if chr(byte) in '"]},'] or allowed)
        if rng.random() < 0.3 and token != 256:
            token = rng.choice(allowed)
        if token == 256:
            return out.decode()
        assert made.consume_token(token)
        out.append(token)
    return None


# Each with instances that are valid and instances that are not, beyond what llguidance takes as it is.
SCHEMAS = {
    "unknown format": ({"type": "string", "format": "semver"}, ["1.2.3", ""], [1]),
    "formats of the standard": (
        {"type": "object", "properties": {"a": {"type": "string", "format": "uri-reference"}}, "required": ["a"]},
        [{"a": "../x"}],
        [{}, {"a": 1}],
    ),
    "a property called format": (
        {"type": "object", "properties": {"format": {"const": "semver"}}, "required": ["format"]},
        [{"format": "semver"}],
        [{"format": "other"}, {}],
    ),
    "format inside a constant": ({"const": {"format": "semver"}}, [{"format": "semver"}], [{}]),
    "enforced format": ({"type": "string", "format": "date"}, ["2026-02-03"], ["tomorrow"]),
    "not a type": ({"not": {"type": ["string", "array", "object"]}}, [1, None, True, 1.5], ["x", [], {}]),
    "not twice": ({"not": {"not": {"type": "integer"}}}, [3], ["x", 1.5]),
    "not required": (
        {"type": "object", "properties": {"a": {}, "b": {"type": "integer"}}, "not": {"required": ["a"]}},
        [{"b": 1}, {}],
        [{"a": 1}, {"a": 1, "b": 1}],
    ),
    "not both": (
        {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}, "additionalProperties": False,
         "not": {"required": ["a", "b"]}},
        [{}, {"a": None}, {"b": None}],
        [{"a": None, "b": None}],
    ),
    "neither": (
        {"not": {"anyOf": [{"type": "string"}, {"required": ["a"]}]}, "type": ["string", "object"]},
        [{}, {"b": 1}],
        ["x", {"a": 1}],
    ),
    "not everything": ({"anyOf": [{"not": {}}, {"type": "null"}]}, [None], [1, "x"]),
    "dependencies": (
        {"type": "object", "properties": {"card": {"type": "integer"}, "address": {"type": "string"}},
         "dependencies": {"card": ["address"]}, "$schema": "http://json-schema.org/draft-07/schema#"},
        [{}, {"address": "x"}, {"card": 1, "address": "x"}],
        [{"card": 1}],
    ),
    "dependentSchemas": (
        {"type": "object", "properties": {"kind": {"type": "string"}, "size": {}},
         "dependentSchemas": {"kind": {"properties": {"size": {"type": "integer"}}, "required": ["size"]}}},
        [{}, {"size": "any"}, {"kind": "x", "size": 1}],
        [{"kind": "x"}, {"kind": "x", "size": "any"}],
    ),
    "void keywords": (
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": False, "unevaluatedItems": True,
         "minContains": 2, "then": {"type": "string"}, "$dynamicAnchor": "here", "deprecated": True},
        [[], [1, 1]],
        ["x"],
    ),
    "uniqueness of one": ({"type": "array", "maxItems": 1, "uniqueItems": True}, [[], [1]], [[1, 1]]),
    "a tree": (
        {"$ref": "#/$defs/node",
         "$defs": {"node": {"type": "object", "properties": {
             "name": {"type": "string", "format": "slug"},
             "inner": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
             "required": ["name"], "additionalProperties": False}}},
        [{"name": "a"}, {"name": "a", "inner": [{"name": "b", "inner": []}]}],
        [{"name": "a", "inner": [{}]}, {"inner": []}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
def test_own_schemas_admit_what_is_valid_and_nothing_else(vocabulary, name):
    schema, valid, invalid = SCHEMAS[name]
    before = json.dumps(schema)
    for instances, expected in ((valid, True), (invalid, False)):
        for instance in instances:
            assert valid_to_the_standard(schema, instance) is expected
            assert valid_to_the_standard(enforceable(schema), instance) is expected
            assert admits(vocabulary, schema, json.dumps(instance)) is expected
            assert admits(vocabulary, schema, json.dumps(instance, indent=4)) is expected
            assert admits(vocabulary, schema, json.dumps(instance, separators=(",", ":"))) is expected
    assert json.dumps(schema) == before


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_written_at_random_by_the_grammar_is_valid(vocabulary, name):
    schema = SCHEMAS[name][0]
    rng = random.Random(name)  # noqa: S311 (no secret)
    texts = [written(compiled(vocabulary, schema), rng) for _ in range(20)]
    finished = [text for text in texts if text is not None]
    assert finished
    for text in finished:
        DIALECT(schema).validate(json.loads(text))


@pytest.mark.parametrize("name", [*sorted(ENFORCED_FORMATS), "semver", "uri-reference", "regex", "unknown"])
def test_the_formats_that_stay_are_those_that_llguidance_enforces(vocabulary, name):
    made = matcher(vocabulary, {"type": "string", "format": name}, raw=True)
    if name in ENFORCED_FORMATS:
        assert not made.is_error()
        assert made.try_consume_tokens(list(b'"\xc3\xa9"')) < 4  # no such format admits this letter alone
        assert enforceable({"format": name})["format"] == name
    else:
        assert "format" not in enforceable({"format": name})


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"pattern": "a"}},
        {"not": {"type": "integer"}},
        {"not": {"required": ["a"], "minProperties": 2}},
        {"not": {"enum": [1]}},
        {"type": "array", "uniqueItems": True},
        {"type": "array", "uniqueItems": True, "maxItems": 2},
        {"contains": {"type": "integer"}},
        {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
        {"oneOf": [{"type": "integer"}, {"minimum": 2}]},
        {"unevaluatedProperties": False},
        {"propertyNames": {"pattern": "^a"}},
        {"$dynamicRef": "#here", "$dynamicAnchor": "here"},
        {"$ref": "https://example.com/schema"},
        {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}},
        {"oneOf": [{"type": "integer"}, {"minimum": 2}], "x-guidance": {"coerce_one_of": True}},
        {"format": 7},
        {"dependencies": {"a": 7}},
        {"allOf": 7, "not": {"type": "string"}},
    ],
)
def test_assertions_that_cannot_be_kept_are_not_dropped(vocabulary, schema):
    assert matcher(vocabulary, schema).is_error()


def test_white_space_is_free_and_ends(vocabulary):
    schema = {"type": "array", "items": {"type": "integer"}}
    for text in ("[1,2]", "[1, 2]", "[\n\t1,\r\n    2\n]", "[ 1 , 2 ]", "[\n" + " " * 64 + "1]"):
        assert admits(vocabulary, schema, text)
    for space in (" ", "\t", "\n", "\r\n", " \n"):
        assert not admits(vocabulary, schema, f"[{space * 80}1]")


def scalars():
    return st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.5, "a", "b", ""])


NAMES = st.sampled_from(["a", "b", "c"])
INSTANCES = st.recursive(
    scalars(), lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=4
)
TYPES = st.sampled_from(["null", "boolean", "number", "integer", "string", "array", "object"])


def keywords(inner):
    return {
        "type": TYPES | st.lists(TYPES, min_size=1, max_size=3, unique=True),
        "required": st.lists(NAMES, max_size=2, unique=True),
        "properties": st.dictionaries(NAMES, inner, max_size=2),
        "items": inner,
        "minimum": st.integers(-2, 2),
        "const": scalars(),
        "anyOf": st.lists(inner, min_size=1, max_size=2),
        "allOf": st.lists(inner, min_size=1, max_size=2),
        "not": inner,
        "if": inner,
        "then": inner,
        "uniqueItems": st.booleans(),
        "maxItems": st.integers(0, 2),
        "unevaluatedProperties": st.just(True),
        "propertyNames": st.sampled_from([True, {}, {"type": "string"}]),
        "format": st.just("nonsense"),
        "title": st.just("a title"),
        "dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, max_size=2, unique=True), max_size=2),
        "dependentSchemas": st.dictionaries(NAMES, inner, max_size=2),
        "minContains": st.integers(0, 2),
    }


SUBSCHEMAS = st.recursive(
    st.booleans() | st.builds(lambda name: {"type": name}, TYPES) | st.builds(lambda name: {"required": [name]}, NAMES),
    lambda inner: st.fixed_dictionaries({}, optional=keywords(inner)),
    max_leaves=6,
)


@given(SUBSCHEMAS, st.lists(INSTANCES, min_size=1, max_size=8))
def test_the_schema_that_is_compiled_admits_exactly_the_same(schema, instances):
    made = enforceable(schema)
    for instance in instances:
        assert DIALECT(made).is_valid(instance) == DIALECT(schema).is_valid(instance)
