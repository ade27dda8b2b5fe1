"""An answer in both of the API's forms: the same in one piece as in chunks."""

import json

import pytest

from tie.device.answer import Delta, Result, TokenLogprob
from tie.device.proxy import chat, completions, requests

RESULT = Result(texts=("", ""), finish=("stop", "length"), prompt_tokens=3, completion_tokens=4, cached_tokens=1)
PIECES = [
    Delta("Grüße ", 0, (TokenLogprob("Grüß".encode(), -1.0, ()), TokenLogprob(b"e ", -2.0, ()))),
    Delta("one", 1, (TokenLogprob(b"one", -3.0, ()),)),
    Delta("", 0),
    Delta("an", 0, (TokenLogprob(b"an", float("-inf"), ()),)),
]


def asked(kind, **fields):
    return requests.decode(json.dumps({"model": "m", "n": 2, **fields}).encode(), kind)


def chunks_of(answer) -> list[dict]:
    return [*answer.begin(), *(chunk for piece in PIECES for chunk in answer.take(piece)), *answer.end(RESULT)]


def test_a_chat_is_the_same_whole_and_in_chunks() -> None:
    answer = chat.answer(
        asked(requests.ChatRequest, messages=[], logprobs=True, stream_options={"include_usage": True})
    )
    *chunks, last = chunks_of(answer)
    whole = answer.whole(RESULT)
    assert {chunk["object"] for chunk in [*chunks, last]} == {"chat.completion.chunk"}
    assert (whole["object"], whole["id"], last["choices"]) == ("chat.completion", last["id"], [])
    assert last["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)
    for index, (text, tokens, reason) in enumerate([("Grüße an", 3, "stop"), ("one", 1, "length")]):
        choice = whole["choices"][index]
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(one["delta"].get("content", "") for one in mine) == choice["message"]["content"] == text
        scored = [token for one in mine if one["logprobs"] for token in one["logprobs"]["content"]]
        assert scored == choice["logprobs"]["content"]
        assert len(scored) == tokens
        assert [one["finish_reason"] for one in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]
        assert choice["finish_reason"] == reason
    assert [message.parts[0].text for message in answer.messages()] == ["Grüße an", "one"]


def test_a_completion_is_the_same_whole_and_in_chunks() -> None:
    answer = completions.answer(asked(requests.CompletionRequest, prompt="x", logprobs=0))
    chunks = chunks_of(answer)
    whole = answer.whole(RESULT)
    assert {chunk["object"] for chunk in [*chunks, whole]} == {"text_completion"}
    assert all("usage" not in chunk for chunk in chunks)
    for index, (text, offsets, reason) in enumerate([("Grüße an", [0, 4, 6], "stop"), ("one", [0], "length")]):
        choice = whole["choices"][index]
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(one["text"] for one in mine) == choice["text"] == text
        for name, values in choice["logprobs"].items():
            assert [value for one in mine if one["logprobs"] for value in one["logprobs"][name]] == values
        assert choice["logprobs"]["text_offset"] == offsets
        assert (mine[-1]["finish_reason"], choice["finish_reason"]) == (reason, reason)
    assert answer.messages() == []


@pytest.mark.parametrize("logprobs", [True, False])
def test_logprobs_come_when_they_were_asked_for(logprobs: bool) -> None:
    answer = chat.answer(asked(requests.ChatRequest, messages=[], logprobs=logprobs))
    scored = [chunk for chunk in chunks_of(answer) if chunk["choices"][0]["logprobs"]]
    assert bool(scored) == bool(answer.whole(RESULT)["choices"][0]["logprobs"]) == logprobs
