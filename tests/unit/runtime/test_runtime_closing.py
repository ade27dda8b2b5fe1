"""JSON that runs out of tokens is brought to its end, and only then."""

import json
import re

import jsonschema
import numpy as np
import pytest

from collecting import Collect
from tie.app import constraints
from tie.app.schemas import enforceable
from tie.assets.manifest import TOKENIZER_FILE
from tie.assets.sample import make_sample_bundle
from tie.assets.tokenizer import load_tokenizer
from tie.proto import request_pb2
from tie.proto import runtime_pb2 as pb
from tie.runtime.blocks import BlockPool
from tie.runtime.closing import Closing, begins
from tie.runtime.engine import Engine
from tie.runtime.grammar_compiler import GrammarCompiler
from tie.runtime.request import Bounds, check
from tie.runtime.scheduler import Limits

VOCABULARY = 259
END = 2  # <|im_end|> of the sample vocabulary, whose other tokens are bytes
WAIT_S = 30
RAMBLING = {
    "endless text": {"type": "string"},
    "endless list": {"type": "array", "items": {"type": "string"}},
    "endless tree": {"$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}, "$ref": "#/$defs/tree"},
    "endless object": {"type": "object", "additionalProperties": {"type": "string"}},
    "endless addresses": {"type": "array", "items": {"type": "string", "format": "email"}, "minItems": 1},
    "some of it wanted": {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "array", "items": {"type": "string"}}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}

LONG = {
    "by its length": {"type": "string", "minLength": 30},
    "by its pattern": {"type": "string", "pattern": "^.{30,}$"},
}


class Noise:
    """A model that likes nothing in particular, and an end least of all.

    Attributes:
        says: tokens that it begins its next answer with.
    """

    def __init__(self, disliked):
        self.dice, self.disliked, self.says = np.random.default_rng(4), disliked, []

    def forward(self, batch):
        logits = self.dice.standard_normal((sum(part.logits for part in batch.slices), VOCABULARY)).astype(np.float32)
        logits[:, self.disliked] -= 12
        if self.says and len(logits):
            logits[:, self.says.pop(0)] += 100
        return logits


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return make_sample_bundle(tmp_path_factory.mktemp("closing") / "bundle")


@pytest.fixture(scope="module")
def tokens(bundle):
    """Ids of characters."""
    tokenizer = load_tokenizer(bundle)
    return {character: tokenizer.token_id(character) for character in '"]},@(abkzQ'}


@pytest.fixture
def noise(tokens):
    return Noise([tokens['"'], tokens["]"], tokens["}"], END])


@pytest.fixture
def engine(bundle, noise):
    compiler = GrammarCompiler(bundle.read(TOKENIZER_FILE).decode(), VOCABULARY, (END,))
    engine = Engine(
        noise,
        BlockPool(200, 8),
        Limits(step_tokens=64, max_running=8, max_waiting=8),
        Bounds(VOCABULARY, 400),
        tokenizer=load_tokenizer(bundle),
        end_ids=frozenset({END}),
        grammars=compiler,
        on_failure=lambda: None,
    )
    engine.start()
    yield engine
    assert engine.stop(WAIT_S)
    compiler.close()


def answer(engine, **fields):
    fields = {
        "token_ids": [1, 2],
        "max_tokens": 120,
        "sampling": pb.Sampling(temperature=1, seed=3),
        "json": True,
    } | fields
    sink = Collect(WAIT_S)
    engine.submit(check(pb.GenerateRequest(**fields), engine.bounds), sink)
    return sink.tokens(), sink.end.finished


@pytest.mark.parametrize("kind", RAMBLING)
def test_what_would_be_cut_off_ends_validly(engine, bundle, kind):
    grammar = json.dumps({"grammars": [{"json_schema": enforceable(RAMBLING[kind])}]})
    ids, finished = answer(engine, grammar=grammar)
    assert finished.reason == pb.REASON_STOP_TOKEN
    assert kind != "endless text" or len(ids) > 120 - begins(120), "brought to its end too early"
    jsonschema.validate(json.loads(load_tokenizer(bundle).decode(ids)), RAMBLING[kind])


@pytest.mark.parametrize("kind", LONG)
def test_a_string_that_may_not_end_yet_is_written_on_by_the_model(engine, bundle, kind):
    grammar = json.dumps({"grammars": [{"json_schema": enforceable(LONG[kind])}]})
    ids, _ = answer(engine, grammar=grammar, max_tokens=36)
    assert "@@" not in load_tokenizer(bundle).decode(ids)


def called(bundle, ids, text=""):
    """The arguments of the call that an answer consists of, but for the text before it."""
    said = load_tokenizer(bundle).decode(ids)
    assert said.startswith(text)
    (call,) = re.fullmatch(r"<tool_call>\n(.*?)\n</tool_call>.*", said.removeprefix(text), re.DOTALL).groups()
    return json.loads(call)["arguments"]


def calls(choice, schema):
    """The grammar that the app makes for one tool."""
    tool = request_pb2.Tool(name="f", parameters_json=json.dumps(schema))
    request = request_pb2.InferenceRequest(tools=[tool], tool_choice=choice)
    return constraints.grammar(request, tagged_calls=True)


ARGUMENTS = {
    "endless text": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
    "some of it wanted": RAMBLING["some of it wanted"],
    "a tree of it": {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"$ref": "#"}},
        "required": ["a"],
        "additionalProperties": False,
    },
}


@pytest.mark.parametrize("schema", ARGUMENTS.values(), ids=ARGUMENTS)
def test_a_demanded_call_that_would_be_cut_off_ends_validly(engine, bundle, schema):
    ids, finished = answer(engine, grammar=calls("required", schema), max_tokens=200)
    assert finished.reason == pb.REASON_STOP_TOKEN
    assert len(ids) > 200 - begins(200), "brought to its end too early"
    jsonschema.validate(called(bundle, ids), schema)


@pytest.mark.parametrize("schema", ARGUMENTS.values(), ids=ARGUMENTS)
def test_a_call_among_text_is_brought_to_its_end_and_the_text_goes_on(engine, noise, bundle, schema):
    noise.says = load_tokenizer(bundle).encode("So: <tool_call>")
    ids, finished = answer(engine, grammar=calls("auto", schema), max_tokens=200)
    assert (finished.reason, len(ids)) == (pb.REASON_LENGTH, 200)
    jsonschema.validate(called(bundle, ids, "So: "), schema)


def test_text_beside_calls_is_left_alone(engine, bundle):
    ids, finished = answer(engine, grammar=calls("auto", {}))
    assert (finished.reason, len(ids)) == (pb.REASON_LENGTH, 120)
    assert '"' not in load_tokenizer(bundle).decode(ids), "it has no string that might end"


def test_other_grammars_and_requests_that_forbid_tokens_are_left_alone(engine, tokens):
    schema = json.dumps({"grammars": [{"json_schema": enforceable({"type": "string"})}]})
    forbidding = pb.Sampling(temperature=1, seed=3, bad_token_ids=[tokens["}"]])
    for fields in ({"grammar": "start: /[a-z}]+/", "json": False}, {"grammar": schema, "sampling": forbidding}):
        ids, finished = answer(engine, **fields)
        assert finished.reason == pb.REASON_LENGTH
        assert len(ids) == 120


def test_ends_come_before_leads_and_leads_before_all_else(bundle, tokens):
    closing = Closing(load_tokenizer(bundle), {END}, VOCABULARY)

    def mask(*tokens):
        bits = np.zeros(-(-VOCABULARY // 32) * 32, dtype=np.uint8)
        bits[list(tokens)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    brace, comma, letter = tokens["}"], tokens[","], tokens["a"]
    assert (closing.narrowed(mask(letter, comma, brace)) == mask(brace)).all()
    assert (closing.narrowed(mask(letter, comma, END)) == mask(END)).all()
    assert (closing.narrowed(mask(letter, comma)) == mask(comma)).all()
    assert (closing.narrowed(mask(letter)) == mask(letter)).all()
    within = [tokens[letter] for letter in "akzQ"]
    for nearest in ('"', "@"):
        assert (closing.narrowed(mask(*within, brace, comma, tokens[nearest])) == mask(tokens[nearest])).all()
    free = mask(*within, tokens["@"], tokens["("])
    assert (closing.narrowed(free) == free).all(), "only where there is a format"
    assert (closing.narrowed(mask(*within, brace)) == mask(*within, brace)).all(), "within a string it ends nothing"
    text = mask(*within, tokens['"'], END)
    assert (closing.narrowed(text) == text).all(), "what may end anywhere is no string"
