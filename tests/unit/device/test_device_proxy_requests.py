"""What the proxy makes of HTTP bodies: every field is known or refused by name, and nothing breaks the parser."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tie.device.proxy import translate
from tie.device.proxy.failures import ApiError
from tie.device.proxy.requests import ChatRequest, CompletionRequest, decode
from tie.proto import request_pb2

HELLO = [{"role": "user", "content": "hello"}]


def chat(**fields: object) -> request_pb2.InferenceRequest:
    body = {"model": "m", "messages": HELLO, **fields}
    return translate.chat(decode(json.dumps(body).encode(), ChatRequest))


def attempt(parse):
    """What it gives, or the refusal."""
    try:
        return parse()
    except ApiError as error:
        return error


def refused(**fields: object) -> ApiError:
    with pytest.raises(ApiError) as raised:
        chat(**fields)
    return raised.value


def test_every_parameter_arrives_in_the_sealed_request() -> None:
    schema = '{"type": "object",  "x-order": 1.50}'
    body = (
        '{"model":"m","messages":[{"role":"system","content":"s"},{"role":"user","content":[{"type":"text","text":"a"},'
        '{"type":"text","text":"b"}]},{"role":"assistant","content":null,"tool_calls":[{"id":"c","type":"function",'
        '"function":{"name":"f","arguments":"{}"}}]},{"role":"tool","tool_call_id":"c","content":"r"}],'
        '"temperature":0.5,"top_p":0.25,"presence_penalty":1,"frequency_penalty":-1,"seed":-1,"stop":["x","y"],'
        '"max_completion_tokens":9,"n":2,"logit_bias":{"7":-100},"logprobs":true,"top_logprobs":3,"top_k":4,"min_p":0.5,'
        '"repetition_penalty":2,"min_tokens":1,"ignore_eos":true,"stream":true,"stream_options":{"include_usage":true},'
        '"response_format":{"type":"json_schema","json_schema":{"name":"n","schema":' + schema + ',"strict":true}},'
        '"tools":[{"type":"function","function":{"name":"f","description":"d","parameters":{"$ref" : "#/a"}}}],'
        '"tool_choice":{"type":"function","function":{"name":"f"}},"user":"u","store":false}'
    )
    made = translate.chat(decode(body.encode(), ChatRequest))
    part = request_pb2.Part
    assert made == request_pb2.InferenceRequest(
        model="m",
        messages=[
            request_pb2.Message(role="system", parts=[part(text="s")]),
            request_pb2.Message(role="user", parts=[part(text="a"), part(text="b")]),
            request_pb2.Message(
                role="assistant", tool_calls=[request_pb2.ToolCall(id="c", name="f", arguments_json="{}")]
            ),
            request_pb2.Message(role="tool", parts=[part(text="r")], tool_call_id="c"),
        ],
        sampling=request_pb2.Sampling(
            temperature=0.5, top_p=0.25, presence_penalty=1, frequency_penalty=-1, seed=2**64 - 1, logit_bias={7: -100},
            top_k=4, min_p=0.5, repetition_penalty=2, min_tokens=1,
        ),
        stop=["x", "y"], max_tokens=9, n=2, logprobs=3, ignore_eos=True,
        constraint=request_pb2.Constraint(json_schema=schema),
        tools=[request_pb2.Tool(name="f", description="d", parameters_json='{"$ref" : "#/a"}')],
        tool_choice="f",
    )  # fmt: skip


def test_null_is_as_good_as_absent() -> None:
    optional = [name for name in ChatRequest.__struct_fields__ if name not in {"model", "messages"}]
    refusable = ["audio", "echo", "functions", "suffix", "store"]
    assert chat(**dict.fromkeys(optional + refusable)) == chat()
    assert chat(tools=[{"type": "function", "function": {"name": "f", "parameters": None, "strict": None}}]).tools


@pytest.mark.parametrize(
    ("parameters", "sent"),
    [
        ({}, {"type": "object"}),
        ({"properties": {}}, {"type": "object", "properties": {}}),
        ({"type": "object", "x": 1}, {"type": "object", "x": 1}),
        ({"anyOf": []}, {"anyOf": []}),
    ],
)
def test_parameters_are_of_an_object(parameters, sent) -> None:
    (tool,) = chat(tools=[{"type": "function", "function": {"name": "f", "parameters": parameters}}]).tools
    assert json.loads(tool.parameters_json) == sent


def test_what_an_answer_held_may_be_sent_back() -> None:
    message = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "tool_calls": None,
    }
    assert chat(messages=[message]).messages[0].parts[0].text == "x"


@pytest.mark.parametrize(
    ("fields", "param", "status"),
    [
        ({"temperatur": 1}, "temperatur", 400),
        ({"messages": [{"role": "user", "content": "x", "extra": 1}]}, "messages[0].extra", 400),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", 400),
        ({"messages": [{"role": "user"}]}, "messages[0].content", 400),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", 400),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages[0].content[0].type", 400),
        ({"messages": "hello"}, "messages", 400),
        ({"n": 0}, "n", 400),
        ({"n": 10**9}, "n", 400),
        ({"n": True}, "n", 400),
        ({"max_tokens": 10**12}, "max_tokens", 400),
        ({"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens", 400),
        ({"seed": 2**70}, "seed", 400),
        ({"temperature": "1"}, "temperature", 400),
        ({"temperature": 2.5}, "temperature", 400),
        ({"temperature": -0.5}, "temperature", 400),
        ({"logit_bias": {"-1": 1}}, "logit_bias", 400),
        ({"logit_bias": {"²": 1}}, "logit_bias", 400),
        ({"top_logprobs": 2}, "top_logprobs", 400),
        ({"stream_options": {"include_usage": True}}, "stream_options", 400),
        ({"tool_choice": "sometimes"}, "tool_choice", 400),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type", 400),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
         "tools[0].function.parameters", 400),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": "{}"}}]},
         "tools[0].function.parameters", 400),
        ({"response_format": {"type": "yaml"}}, "response_format.type", 400),
        ({"best_of": 2}, "best_of", 400),
        ({"store": True}, "store", 400),
        ({"store": 0}, "store", 400),
        ({"functions": []}, "functions", 400),
        ({"modalities": ["text", "audio"]}, "modalities", 400),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].image_url", 400),
        *[
            ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]},
             "messages[0].content[0].image_url.url", 400)
            for url in ("https://example.com/a.png", "x", "", "file:///etc/passwd", "data:,x", "data:image/png,x",
                        "data:image/png;base64,", "data:image/png;base64,!", "data:;base64,YQ==é", "data:;base64,YQ")
        ],
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:;base64,YQ==",
          "detail": "high"}}]}]}, "messages[0].content[0].image_url.detail", 400),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
         "messages[0].content[0].type", 400),
    ],
)  # fmt: skip
def test_refusals_name_the_field_and_show_nothing_in_the_exception(fields, param, status) -> None:
    error = refused(**fields)
    assert (error.param, error.status) == (param, status)
    assert error.param.partition("[")[0] in json.loads(error.body)["error"]["message"]
    assert str(error) == f"the request ends with status {status}, {error.code}"


def test_images_go_on_as_they_are_and_in_order() -> None:
    parts = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,/+8A", "detail": "auto"}},
        {"type": "image_url", "image_url": {"url": "DATA:application/x-what;charset=x;BASE64,YQ=="}},
        {"type": "text", "text": "b"},
    ]
    made = chat(messages=[{"role": "user", "content": parts}]).messages[0].parts
    assert [part.WhichOneof("kind") for part in made] == ["text", "image", "image", "text"]
    assert [part.image for part in made[1:3]] == [b"\xff\xef\0", b"a"]


@pytest.mark.parametrize("prompt", ["", [], ["a", "b"], [1, 2], 7])
def test_raw_prompts_are_one_text(prompt) -> None:
    with pytest.raises(ApiError) as raised:
        translate.completion(decode(json.dumps({"model": "m", "prompt": prompt}).encode(), CompletionRequest))
    assert raised.value.param.startswith("prompt")
    body = json.dumps({"model": "m", "prompt": ["one"], "logprobs": 2}).encode()
    assert translate.completion(decode(body, CompletionRequest)).prompt == "one"


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b"{", b'{"model":"\xff"}', b'{"model":"\\ud800"}', b"[" * 10**6])
def test_bodies_that_are_no_request(body) -> None:
    with pytest.raises(ApiError) as raised:
        decode(body, ChatRequest)
    assert raised.value.status == 400


def test_depth_has_an_end() -> None:
    for nested in (b'{"a":' * 10**5, b"[" * 10**5):
        with pytest.raises(ApiError):
            decode(b'{"model":"m","messages":[],"metadata":' + nested, ChatRequest)
        with pytest.raises(ApiError):
            decode(b'{"model":"m","messages":[],"tools":' + nested, ChatRequest)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from([*ChatRequest.__struct_fields__, "user", "store", "echo"]) | st.text(max_size=6)


@given(fields=st.dictionaries(NAMES, JSON, max_size=6), messages=st.just(HELLO) | JSON)
def test_any_json_is_a_request_or_is_refused(fields, messages) -> None:
    body = msgspec.json.encode({"model": "m", "messages": messages, **fields})
    for kind, make in ((ChatRequest, translate.chat), (CompletionRequest, translate.completion)):
        outcome = attempt(lambda kind=kind, make=make: make(decode(body, kind)))
        if isinstance(outcome, ApiError):
            assert outcome.status in {400, 422}
            assert json.loads(outcome.body)["error"]["message"]
        else:
            assert outcome.SerializeToString()


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_taken(body) -> None:
    outcome = attempt(lambda: decode(body, ChatRequest))
    assert not isinstance(outcome, ApiError) or outcome.status == 400
