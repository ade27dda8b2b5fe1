"""The runtime's stop strings against the app's text: both count bytes of the same text, and must agree to the byte."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tie.app.text import ChoiceText
from tie.assets.tokenizer import Tokenizer
from tie.bones.sampler import Sampled
from tie.proto import runtime_pb2
from tie.runtime.choice import Choice
from tie.runtime.request import Bounds, check

# Few letters, so that stop strings occur, nearly occur and overlap; one of them of several bytes.
texts = st.text("abé", min_size=1, max_size=24)
stop_lists = st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3)


def expected(text: str, stops: list[str], *, include: bool) -> str:
    """The text up to the stop string that is complete first; of those complete at once, the longest."""
    for end in range(1, len(text) + 1):
        matched = [stop for stop in stops if text[:end].endswith(stop)]
        if matched:
            return text[:end] if include else text[: end - max(map(len, matched))]
    return text


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> Tokenizer:
    return tokenizer


def spoken(
    tokenizer: Tokenizer, text: str, stops: list[str], *, include: bool
) -> tuple[list[runtime_pb2.Tokens], runtime_pb2.Finished]:
    """What the runtime says when the model says `text`: its messages for one choice, to the end."""
    ids = tokenizer.encode(text)
    message = runtime_pb2.GenerateRequest(token_ids=[5], max_tokens=len(ids), stop=stops, include_stop=include)
    bounds = Bounds(vocab_size=tokenizer.vocab_size, max_length=1000)
    choice = Choice(
        check(message, bounds),
        0,
        max_length=1000,
        end_ids=frozenset(),
        tokenizer=tokenizer,
        grammar=None,
        closing=None,
        deadline=None,
    )
    said = []
    for token_id in ids:
        outcome = choice.accept(Sampled(token_id, 0.0, (), ()))
        assert outcome.tokens is not None
        said.append(outcome.tokens)
        if outcome.finished is not None:
            return said, outcome.finished
    raise AssertionError("the choice did not end with its last token")


@settings(max_examples=300, deadline=None)
@given(text=texts, stops=stop_lists, include=st.booleans(), group=st.integers(1, 4))
def test_what_the_app_sends_is_the_text_before_the_stop_string(vocabulary, text, stops, include, group):
    """`group`: how many messages are merged into one, as they are when the server lags behind."""
    said, finished = spoken(vocabulary, text, stops, include=include)
    choice = ChoiceText(vocabulary.stream_decoder())
    sent: list[str] = []
    for start in range(0, len(said), group):
        merged = said[start : start + group]
        for tokens in merged:
            for token_id in tokens.token_ids:
                choice.add(token_id)
        sent.append(choice.release(merged[-1].hold_bytes)[0])
    stopped = finished.reason == runtime_pb2.REASON_STOP_STRING
    sent.append(choice.finish(finished.drop_bytes, stopped=stopped)[0])
    assert "".join(sent) == expected(text, stops, include=include)
