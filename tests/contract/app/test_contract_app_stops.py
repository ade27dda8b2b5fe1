"""The runtime's stop strings against the app's text: both count bytes of the same text, and must agree to the byte."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tie.app.text import ChoiceText
from tie.assets.tokenizer import Tokenizer
from tie.runtime.stops import StopMatcher

# Few letters, so that stop strings occur, nearly occur and overlap; one of them of several bytes.
texts = st.text("abé", max_size=24)
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


@settings(max_examples=300)
@given(text=texts, stops=stop_lists, include=st.booleans(), group=st.integers(1, 4))
def test_what_the_app_sends_is_the_text_before_the_stop_string(vocabulary, text, stops, include, group):
    """`group`: how many tokens come in one event, as they do when the server lags behind."""
    ids = vocabulary.encode(text)
    matcher = StopMatcher(stops, include_stop=include)
    theirs = vocabulary.stream_decoder()
    choice = ChoiceText(vocabulary.stream_decoder())
    said: list[str] = []
    match = None
    for position, token_id in enumerate(ids, start=1):
        match = matcher.feed(theirs.feed(token_id))
        choice.add(token_id)
        if match or position % group == 0:
            said.append(choice.release(matcher.hold_bytes)[0])
        if match:
            break
    said.append(choice.finish(match.drop_bytes if match else 0, stopped=match is not None)[0])
    assert "".join(said) == expected(text, stops, include=include)
