"""Merging loses no token, no order and no end."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tie.proto import runtime_pb2 as pb
from tie.runtime.merge import merge

TOKENS = st.builds(
    lambda index, ids, hold: pb.GenerateEvent(tokens=pb.Tokens(index=index, token_ids=ids, hold_bytes=hold)),
    st.integers(0, 2),
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
    st.integers(0, 4),
)
FINISHED = st.builds(lambda index: pb.GenerateEvent(finished=pb.Finished(index=index)), st.integers(0, 2))


def flat(events):
    return [
        (event.tokens.index, token) if event.HasField("tokens") else ("end", event.finished.index)
        for event in events
        for token in (event.tokens.token_ids if event.HasField("tokens") else [None])
    ]


@given(st.lists(st.one_of(TOKENS, FINISHED), max_size=20))
def test_every_token_stays_in_its_place(events):
    before = flat(events)
    holds = [event.tokens.hold_bytes for event in events if event.HasField("tokens")]
    merged = merge(events)
    assert flat(merged) == before
    neighbours = pairwise(merged)
    assert not any(
        a.HasField("tokens") and b.HasField("tokens") and a.tokens.index == b.tokens.index for a, b in neighbours
    )
    if merged and merged[-1].HasField("tokens"):
        assert merged[-1].tokens.hold_bytes == holds[-1]
