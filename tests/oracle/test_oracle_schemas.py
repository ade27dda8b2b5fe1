"""Real-world JSON schemas: how many compile, and whether each admits what is valid and nothing else.

The schemas and their instances are those of the public MaskBench collection, which names no licence and so is not part
of this project; schemas of our own are in tests/unit/app. Validity is jsonschema's word and the collection's.
"""

import json
import random
from pathlib import Path

import jsonschema
import llguidance
import pytest
from llguidance import LLMatcher, LLTokenizer

from tie.app import constraints
from tie.app.compiling import _Bytes
from tie.app.outcome import RefusalError
from tie.proto import app_pb2, request_pb2

CORPUS = Path(__file__).parents[3] / "shared" / "data" / "json-schemas.jsonl"

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(not CORPUS.exists(), reason="no ../shared/data/json-schemas.jsonl beside this checkout"),
]


@pytest.fixture(scope="module")
def vocabulary():
    return LLTokenizer(llguidance.TokenizerWrapper(_Bytes()), n_vocab=257)


@pytest.fixture(scope="module")
def corpus():
    """Entries with their grammar, and entries with their refusal."""
    compiled, refused = [], []
    for line in CORPUS.read_text().splitlines():
        entry = json.loads(line)
        constraint = request_pb2.Constraint(json_schema=json.dumps(entry["schema"]))
        try:
            compiled.append((entry, constraints.grammar(request_pb2.InferenceRequest(constraint=constraint))))
        except RefusalError as refusal:
            refused.append((entry, refusal))
    return compiled, refused


def test_most_compile_and_each_refusal_names_its_reason(corpus):
    compiled, refused = corpus
    assert len(compiled) + len(refused) == 300
    assert len(compiled) >= 261  # llguidance by itself: 237
    reasons = ("not", "oneOf", "contains", "if", "intersection", "disjoint")
    for _, refusal in refused:
        assert refusal.status == app_pb2.STATUS_GRAMMAR_REFUSED
        assert refusal.detail.startswith("constraint.json_schema: ")
        assert any(reason in refusal.detail for reason in reasons), refusal.detail


def test_every_valid_instance_is_admitted_and_no_other(corpus, vocabulary):
    valid = invalid = 0
    for entry, grammar in corpus[0]:
        start = LLMatcher(vocabulary, grammar)
        for test in entry["tests"]:
            admitted = any(admits(start, text) for text in formattings(entry["schema"], test["data"]))
            assert admitted == test["valid"], entry["id"]
            valid += test["valid"]
            invalid += not test["valid"]
    assert valid >= 281
    assert invalid >= 317


def test_what_a_grammar_writes_at_random_is_valid(corpus, vocabulary):
    rng = random.Random(3)  # noqa: S311 (no secret)
    finished = 0
    for entry, grammar in corpus[0]:
        for _ in range(3):
            text = written(LLMatcher(vocabulary, grammar), rng)
            if text is not None:
                validator(entry["schema"]).validate(json.loads(text))
                finished += 1
    assert finished > 600


def validator(schema):
    return jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)(schema)


def admits(start, text: str) -> bool:
    matcher = start.deep_copy()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def formattings(schema, instance):
    """The ways to write an instance: with its keys as they come and as the schema lists them, dense, usual and long."""
    places = {name: place for place, name in enumerate(names(schema))}
    for value in (instance, ordered(instance, places)):
        yield json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        yield json.dumps(value, ensure_ascii=False)
        yield json.dumps(value, ensure_ascii=False, indent=2)


def names(schema):
    if isinstance(schema, dict):
        properties = schema.get("properties")
        yield from properties if isinstance(properties, dict) else ()
        for value in schema.values():
            yield from names(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from names(value)


def ordered(value, places):
    if isinstance(value, dict):
        keys = sorted(value, key=lambda name: places.get(name, len(places)))
        return {key: ordered(value[key], places) for key in keys}
    return [ordered(item, places) for item in value] if isinstance(value, list) else value


def written(matcher, rng: random.Random, most: int = 2000) -> str | None:
    """A text that the grammar admits, byte by byte at random; None where it does not end."""
    out = bytearray()
    for _ in range(most):
        bits = matcher.compute_bitmask()
        if matcher.is_stopped():
            return out.decode()
        allowed = [token for token in range(257) if bits[token >> 3] >> (token & 7) & 1]
        closing = [token for token in allowed if token == 256 or chr(token) in '"]},']
        token = rng.choice(closing if closing and rng.random() < 0.7 else allowed)
        if token == 256:
            return out.decode()
        assert matcher.consume_token(token)
        out.append(token)
    return None
