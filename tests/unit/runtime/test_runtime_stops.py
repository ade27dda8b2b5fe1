"""Stop strings against a naive search over the whole text."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tie.runtime.stops import StopMatcher

# Few letters, so that stops overlap, repeat and nest; and characters of two, three and four bytes.
TEXT = st.text(alphabet="abé→🙂", max_size=40)
STOPS = st.lists(st.text(alphabet="abé→🙂", min_size=1, max_size=5), min_size=1, max_size=5)


def naive_end(text: str, stops: list[str]) -> tuple[int, int] | None:
    """(start, end) of the stop string that ends first; the longest of those that end together."""
    ends = [
        (end, end - len(stop), end)
        for stop in stops
        for end in range(len(stop), len(text) + 1)
        if text[end - len(stop) : end] == stop
    ]
    return min(ends)[1:] if ends else None


def naive_hold(text: str, stops: list[str]) -> str:
    """The longest end of the text that is the beginning of a stop string."""
    return next(
        (text[start:] for start in range(len(text)) if any(stop.startswith(text[start:]) for stop in stops)), ""
    )


def pieces(text: str, cuts: list[int]) -> list[str]:
    borders = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in pairwise(borders)]


@given(TEXT, STOPS, st.lists(st.integers(0, 100), max_size=10), st.booleans())
def test_finds_what_a_search_over_the_whole_text_finds(text, stops, cuts, include):
    matcher = StopMatcher(stops, include_stop=include)
    expected = naive_end(text, stops)
    fed = ""
    for piece in pieces(text, cuts):
        match = matcher.feed(piece)
        fed += piece
        if match:
            assert expected is not None
            start, end = expected
            answer = text[:end] if include else text[:start]
            assert fed.encode()[: len(fed.encode()) - match.drop_bytes].decode() == answer
            return
        assert naive_end(fed, stops) is None
        assert matcher.hold_bytes == len(naive_hold(fed, stops).encode())
    assert expected is None


@given(TEXT, STOPS, st.lists(st.integers(0, 100), max_size=10))
def test_what_was_not_held_back_is_never_part_of_a_stop(text, stops, cuts):
    matcher = StopMatcher(stops)
    fed, sent = b"", 0
    for piece in pieces(text, cuts):
        match = matcher.feed(piece)
        fed += piece.encode()
        if match:
            assert sent <= len(fed) - match.drop_bytes
            return
        sent = len(fed) - matcher.hold_bytes


def test_without_stops_nothing_is_held_back():
    matcher = StopMatcher([])
    assert matcher.feed("anything") is None
    assert matcher.hold_bytes == 0


@pytest.mark.parametrize(("include", "dropped"), [(False, len("END more")), (True, len(" more"))])
def test_text_after_the_stop_in_the_same_piece_is_dropped(include, dropped):
    matcher = StopMatcher(["END"], include_stop=include)
    assert matcher.feed("the E") is None
    assert matcher.hold_bytes == 1
    match = matcher.feed("ND more")
    assert match is not None
    assert match.drop_bytes == dropped
