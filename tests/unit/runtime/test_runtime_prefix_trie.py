"""The trie of registered prompts, against the plain definition of what it should find."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tie.proto import owner_pb2
from tie.runtime.prefix_trie import Identity, PrefixTrie

IDENTITY = Identity(hashlib.sha256(b"bundle").digest(), "1", "layout", 2, 1)
TOKENS = st.lists(st.integers(0, 2), max_size=12)


def naive(prompts, tokens, size):
    """How many of the first blocks of `tokens` some prompt has as whole blocks of its own."""
    return max(
        (
            count
            for prompt in prompts
            for count in range(1, len(prompt) // size + 1)
            if list(tokens[: count * size]) == list(prompt[: count * size]) and count * size <= len(tokens) - 1
        ),
        default=0,
    )


@given(st.lists(TOKENS, max_size=5), TOKENS, st.integers(1, 4))
def test_the_longest_match_of_whole_blocks(prompts, tokens, size):
    trie = PrefixTrie(prompts, size)
    assert len(trie.match(tokens)) == naive(prompts, tokens, size)
    distinct = {tuple(prompt[: count * size]) for prompt in prompts for count in range(1, len(prompt) // size + 1)}
    assert len(trie) == len(distinct)


@given(st.lists(TOKENS, max_size=5))
def test_every_prompt_has_its_path_and_prompts_share_what_they_share(prompts):
    trie = PrefixTrie(prompts, 2)
    paths = [trie.path(prompt) for prompt in prompts]
    assert [len(path) for path in paths] == [len(prompt) // 2 for prompt in prompts]
    for one, path in zip(prompts, paths, strict=True):
        for other, other_path in zip(prompts, paths, strict=True):
            same = sum(
                one[: (index + 1) * 2] == other[: (index + 1) * 2] for index in range(min(len(path), len(other_path)))
            )
            assert path[:same] == other_path[:same]
            assert not set(path[same:]) & set(other_path[same:])
    assert sorted({node for path in paths for node in path}) == list(range(len(trie)))


def test_the_last_token_of_a_request_is_always_computed():
    trie = PrefixTrie([(1, 2, 3, 4)], 2)
    assert trie.match((1, 2, 3, 4)) == (0,)
    assert trie.match((1, 2, 3, 4, 5)) == (0, 1)
    assert trie.path((1, 2, 3, 4)) == (0, 1)
    assert trie.match(()) == trie.match((1,)) == ()


def test_a_request_that_differs_in_a_block_matches_before_it():
    trie = PrefixTrie([(1, 2, 3, 4, 5, 6)], 2)
    assert trie.match((1, 2, 3, 9, 5, 6, 7)) == (0,)
    assert trie.match((9, 2, 3, 4, 5, 6, 7)) == ()


def test_parents_come_first_in_what_is_written_down():
    message = owner_pb2.PrefixTrie.FromString(PrefixTrie([(1, 2, 3, 4), (1, 2, 5, 6)], 2).encode(IDENTITY))
    assert [(node.parent, list(node.token_ids)) for node in message.nodes] == [(0, [1, 2]), (1, [3, 4]), (1, [5, 6])]


@pytest.mark.parametrize(
    "changes",
    [
        {"manifest_sha256": bytes(32)},
        {"software": "2"},
        {"layout": "other"},
        {"block_tokens": 3},
        {"world_size": 2},
    ],
)
def test_whatever_makes_blocks_differ_makes_the_bytes_differ(changes):
    trie = PrefixTrie([(1, 2, 3, 4)], 2)
    fields = {name: getattr(IDENTITY, name) for name in IDENTITY.__dataclass_fields__}
    assert trie.encode(Identity(**(fields | changes))) != trie.encode(IDENTITY) == trie.encode(IDENTITY)
    assert PrefixTrie([(1, 2, 3, 5)], 2).encode(IDENTITY) != trie.encode(IDENTITY)
