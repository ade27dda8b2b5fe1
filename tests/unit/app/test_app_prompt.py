"""From request to generate request: the template's tokens, the context's room, refusals that name their field."""

import dataclasses

import msgspec
import pytest

from tie.app.frames import Limits
from tie.app.outcome import RefusalError
from tie.app.prompt import Model
from tie.assets.chat import ChatTemplate
from tie.assets.sample import make_sample_vision_bundle
from tie.daemon.config import ModelConfig, NodeConfig
from tie.proto import app_pb2, request_pb2

LIMITS = Limits(request_bytes=1 << 20, output_tokens=100, time_s=1.0)
TOOLS_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}"
    "{% if m['tool_calls'] %}{{ m['tool_calls'] | tojson }}{% endif %}{% endfor %}"
)


def message(role: str = "user", *texts: str, **fields) -> request_pb2.Message:
    return request_pb2.Message(role=role, parts=[request_pb2.Part(text=text) for text in texts], **fields)


def chat(*messages: request_pb2.Message, **fields) -> request_pb2.InferenceRequest:
    return request_pb2.InferenceRequest(messages=messages, **fields)


def refused(model: Model, request: request_pb2.InferenceRequest) -> tuple[str, str]:
    with pytest.raises(RefusalError) as caught:
        model.generate_request(request, LIMITS, "r")
    return app_pb2.Status.Name(caught.value.status).removeprefix("STATUS_"), caught.value.detail


@pytest.fixture(scope="module")
def with_tools(sample):
    template = ChatTemplate(TOOLS_TEMPLATE, sample.tokenizer, sample.manifest.tokenizer)
    return dataclasses.replace(sample, _template=template, _template_takes_tools=True)


def test_a_conversation_is_rendered_by_the_template(sample):
    made = sample.generate_request(chat(message("system", "Be ", "brief."), message("user", "Hi")), LIMITS, "r7")
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert list(made.token_ids) == sample.tokenizer.encode(text, special=True)
    assert made.request_id == "r7"
    assert made.n == 1
    assert not made.HasField("grammar")
    assert not made.HasField("logprobs")


def test_a_user_cannot_forge_control_tokens(sample):
    for request in (chat(message("user", "<|im_end|>")), request_pb2.InferenceRequest(prompt="<|im_end|>")):
        ids = list(sample.generate_request(request, LIMITS, "r").token_ids)
        assert ids.count(2) == len(request.messages)


def test_a_raw_prompt_begins_as_the_bundle_says(sample):
    plain = sample.generate_request(request_pb2.InferenceRequest(prompt="ab"), LIMITS, "r").token_ids
    assert list(plain) == sample.tokenizer.encode("ab")
    info = type(sample.manifest.tokenizer)(bos_id=1, add_bos=True, end_of_turn_ids=(2,))
    manifest = dataclasses.replace(sample.bundle, manifest=msgspec.structs.replace(sample.manifest, tokenizer=info))
    with_bos = dataclasses.replace(sample, bundle=manifest)
    assert with_bos.generate_request(request_pb2.InferenceRequest(prompt="ab"), LIMITS, "r").token_ids[:1] == [1]


@pytest.mark.parametrize("text", ["x", "é", "\U0001f600"])
def test_a_hopeless_prompt_is_refused_without_counting_its_tokens(sample, monkeypatch, text):
    def never(*_args, **_kwargs):
        raise AssertionError("tokens were counted")

    monkeypatch.setattr(sample.tokenizer, "encode", never)
    huge = text * 4_000_000
    for request in (request_pb2.InferenceRequest(prompt=huge), chat(message("user", "Hi"), message("user", huge))):
        status, detail = refused(sample, request)
        assert status == "PROMPT_TOO_LONG"
        assert f"{len(huge.encode()) + (2 if request.messages else 0)} bytes" in detail


def test_no_text_that_fits_is_hopeless(sample):
    tokenizer = sample.tokenizer
    longest = max(range(tokenizer.vocab_size), key=lambda one: len(tokenizer.token_bytes(one)))
    text = tokenizer.token_bytes(longest).decode()
    for count in (1, 7, 256):
        assert not tokenizer.surely_over(len(text.encode()) * count, count)
        assert tokenizer.surely_over(len(text.encode()) * count + 1, count)


def test_the_answer_gets_what_the_context_leaves(sample):
    made = sample.generate_request(request_pb2.InferenceRequest(prompt="x" * 250), LIMITS, "r")
    assert made.max_tokens == 6
    status, detail = refused(sample, request_pb2.InferenceRequest(prompt="x" * 256))
    assert status == "PROMPT_TOO_LONG"
    assert detail.startswith("prompt:")
    assert "256 tokens" in detail
    status, detail = refused(sample, chat(message("user", "x" * 300)))
    assert (status, detail.split(":")[0]) == ("PROMPT_TOO_LONG", "messages")


def test_options_go_on(sample):
    request = request_pb2.InferenceRequest(
        model="sample", prompt="x", max_tokens=5, n=3, stop=["a"], include_stop=True, ignore_eos=True, logprobs=2,
        priority=request_pb2.PRIORITY_BATCH, turn_key=bytes(32), sampling=request_pb2.Sampling(min_tokens=2),
        constraint=request_pb2.Constraint(json_object=True), padding=bytes(50),
    )  # fmt: skip
    made = sample.generate_request(request, LIMITS, "r")
    assert (made.max_tokens, made.min_tokens, made.n, list(made.stop), made.logprobs) == (5, 2, 3, ["a"], 2)
    assert made.include_stop
    assert made.ignore_eos
    assert made.batch_priority
    assert "json_schema" in made.grammar


@pytest.mark.parametrize(
    ("request_", "status", "field"),
    [
        (chat(), "INVALID_REQUEST", "messages"),
        (chat(message(), prompt="x"), "INVALID_REQUEST", "prompt"),
        (chat(message(), model="other"), "UNKNOWN_MODEL", "model"),
        (chat(message("user", "a"), message("root", "b")), "INVALID_REQUEST", "messages[1].role"),
        (chat(message("", "b")), "INVALID_REQUEST", "messages[0].role"),
        (chat(message()), "INVALID_REQUEST", "messages[0].parts"),
        (chat(request_pb2.Message(role="user", parts=[request_pb2.Part()])), "INVALID_REQUEST", "messages[0].parts[0]"),
        (
            chat(request_pb2.Message(role="user", parts=[request_pb2.Part(text="a"), request_pb2.Part(image=b"i")])),
            "UNSUPPORTED",
            "messages[0].parts[1].image",
        ),
        (
            chat(message("user", "a", tool_calls=[request_pb2.ToolCall(name="t")])),
            "INVALID_REQUEST",
            "messages[0].tool_calls",
        ),
        (
            chat(message("assistant", tool_calls=[request_pb2.ToolCall(name="t", arguments_json="[]")])),
            "INVALID_REQUEST",
            "messages[0].tool_calls[0].arguments_json",
        ),
        (
            chat(message("assistant", tool_calls=[request_pb2.ToolCall()])),
            "INVALID_REQUEST",
            "messages[0].tool_calls[0].name",
        ),
        (chat(message("user", "a"), tools=[request_pb2.Tool(name="t")]), "UNSUPPORTED", "tools"),
        (request_pb2.InferenceRequest(prompt="a", tools=[request_pb2.Tool(name="t")]), "UNSUPPORTED", "tools"),
    ],
)
def test_what_cannot_be_is_refused_by_name(sample, request_, status, field):
    assert (refused(sample, request_)[0], refused(sample, request_)[1].split(":")[0]) == (status, field)


def test_tools_go_to_a_template_that_takes_them(with_tools):
    tool = request_pb2.Tool(name="clock", description="tells")
    text = with_tools.tokenizer.decode(
        with_tools.generate_request(chat(message("user", "a"), tools=[tool]), LIMITS, "r").token_ids
    )
    assert '"name": "clock"' in text
    untold = with_tools.generate_request(chat(message("user", "a"), tools=[tool], tool_choice="none"), LIMITS, "r")
    assert "clock" not in with_tools.tokenizer.decode(untold.token_ids)


def test_tool_calls_and_their_results_are_rendered(with_tools):
    call = request_pb2.ToolCall(id="c1", name="clock", arguments_json='{"zone": "é"}')
    request = chat(
        message("user", "a"), message("assistant", tool_calls=[call]), message("tool", "12:00", tool_call_id="c1")
    )
    text = with_tools.tokenizer.decode(with_tools.generate_request(request, LIMITS, "r").token_ids)
    assert '"arguments": {"zone": "é"}' in text
    assert "[tool]12:00" in text


def test_a_template_s_refusal_and_a_model_without_one(sample):
    refusing = ChatTemplate("{{ raise_exception('no') }}", sample.tokenizer, sample.manifest.tokenizer)
    status, detail = refused(dataclasses.replace(sample, _template=refusing), chat(message("user", "a")))
    assert (status, detail.split(":")[0]) == ("INVALID_REQUEST", "messages")
    status, detail = refused(dataclasses.replace(sample, _template=None), chat(message("user", "a")))
    assert (status, detail.split(":")[0]) == ("UNSUPPORTED", "messages")


@pytest.mark.parametrize(
    ("fields", "json"),
    [
        ({}, False),
        ({"constraint": request_pb2.Constraint(json_schema="{}")}, True),
        ({"constraint": request_pb2.Constraint(json_object=True)}, True),
        ({"constraint": request_pb2.Constraint(json_object=False)}, False),
        ({"constraint": request_pb2.Constraint(regex="[a-z]+")}, False),
        ({"constraint": request_pb2.Constraint(lark='start: %json {"type": "string"}')}, False),
        ({"tools": [request_pb2.Tool(name="t")], "tool_choice": "t"}, True),
        ({"tools": [request_pb2.Tool(name="t")]}, False),  # calls of this template cannot be told from text
    ],
)
def test_the_runtime_is_told_what_may_be_brought_to_its_end(with_tools, fields, json):
    assert with_tools.generate_request(chat(message("user", "a"), **fields), LIMITS, "r").json is json


# --- images ---


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    directory = tmp_path_factory.mktemp("seeing") / "bundle"
    make_sample_vision_bundle(directory, context_tokens=512)
    return Model.load(NodeConfig(model=ModelConfig(bundle=str(directory))))


def shown(*parts: str | bytes, role: str = "user") -> request_pb2.Message:
    kinds = [request_pb2.Part(text=part) if isinstance(part, str) else request_pb2.Part(image=part) for part in parts]
    return request_pb2.Message(role=role, parts=kinds)


def test_images_go_on_in_order_each_with_a_place(seeing):
    request = chat(shown("a", b"not a picture", "b<image>", b"\0"), message("assistant", "c"), shown(b"third"))
    made = seeing.generate_request(request, LIMITS, "r")
    assert list(made.images) == [b"not a picture", b"\0", b"third"]
    token = seeing.manifest.images.token_id
    text = seeing.tokenizer.encode
    start, end, place = text("<|im_start|>", special=True), text("<|im_end|>", special=True), [token]
    user = [*start, *text("user\n")]
    assert list(made.token_ids) == [
        *user, *text("a"), *place, *text("b<image>"), *place, *end, *text("\n"),
        *start, *text("assistant\nc"), *end, *text("\n"), *user, *place, *end, *text("\n"),
        *start, *text("assistant\n"),
    ]  # fmt: skip


def test_a_model_that_takes_images_takes_text(seeing):
    made = seeing.generate_request(chat(message("system", "Be ", "brief."), message("user", "Hi")), LIMITS, "r")
    assert not made.images
    assert seeing.tokenizer.decode(made.token_ids) == "system\nBe brief.\nuser\nHi\nassistant\n"


@pytest.mark.parametrize(
    ("request_", "status", "field"),
    [
        (chat(shown(b"x", role="assistant")), "UNSUPPORTED", "messages[0].parts[0].image"),
        (chat(message("user", "a"), shown("b", b"x", role="system")), "UNSUPPORTED", "messages[1].parts[1].image"),
        (chat(shown("a", b"")), "INVALID_REQUEST", "messages[0].parts[1].image"),
        (chat(shown(bytes(8 * 1024 * 1024 + 1))), "IMAGE_REFUSED", "messages[0].parts[0].image"),
        (chat(shown(*[b"x"] * 9)), "INVALID_REQUEST", "messages[0].parts[8].image"),
    ],
)
def test_images_that_cannot_be_are_refused_by_name(seeing, request_, status, field):
    kind, detail = refused(seeing, request_)
    assert kind == status
    assert detail.startswith(f"{field}: ")


def test_a_template_without_places_for_images_is_said(seeing):
    source = "{% for m in messages %}{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endfor %}"
    blind = dataclasses.replace(seeing, _template=ChatTemplate(source, seeing.tokenizer, seeing.manifest.tokenizer))
    assert refused(blind, chat(shown(b"x", "a")))[0] == "UNSUPPORTED"
