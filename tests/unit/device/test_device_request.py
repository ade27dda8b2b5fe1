"""Plain Python values become an InferenceRequest."""

import pytest

from tie.device.request import build
from tie.proto import request_pb2


def test_messages_and_options() -> None:
    request = build(
        model="m",
        messages=[{"role": "system", "content": "be kind"}, request_pb2.Message(role="user")],
        temperature=0.0,
        top_k=5,
        seed=2**63,
        logit_bias={5: -1.0},
        bad_token_ids=[7],
        stop="end",
        max_tokens=-1,
        n=2,
        logprobs=0,
        json_schema="{}",
        turn_key=b"k" * 32,
        batch=True,
    )
    assert [message.role for message in request.messages] == ["system", "user"]
    assert request.messages[0].parts[0].text == "be kind"
    assert request.sampling.HasField("temperature")
    assert not request.sampling.HasField("top_p")
    assert (request.sampling.seed, request.sampling.logit_bias[5]) == (2**63, -1.0)
    assert (list(request.stop), request.max_tokens, request.n) == (["end"], -1, 2)
    assert request.HasField("logprobs")
    assert request.constraint.json_schema == "{}"
    assert request.priority == request_pb2.PRIORITY_BATCH


def test_a_prompt() -> None:
    request = build(model="m", prompt="once", stop=["a", "b"])
    assert (request.prompt, list(request.stop), len(request.messages)) == ("once", ["a", "b"], 0)


def test_nothing_said_is_nothing_sent() -> None:
    request = build(model="m", prompt="once")
    assert not request.HasField("sampling")
    assert not request.HasField("constraint")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"temprature": 1.0}, TypeError),
        ({"temperature": "warm"}, TypeError),
        ({"n": 2**40}, ValueError),
        ({"regex": "a", "lark": "b"}, ValueError),
    ],
)
def test_mistakes_of_the_caller(options: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error):
        build(model="m", prompt="x", **options)  # type: ignore[arg-type]


def test_a_message_with_another_field() -> None:
    with pytest.raises(TypeError, match="name"):
        build(model="m", messages=[{"role": "user", "content": "x", "name": "y"}])
