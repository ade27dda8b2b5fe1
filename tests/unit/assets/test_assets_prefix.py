"""The shared beginning of a prompt: what the app leaves out of a conversation's cache is what the runtime has."""

from hypothesis import given
from hypothesis import strategies as st

from tie.assets.prefix import shared_prefix
from tie.runtime.prefix_trie import PrefixTrie

TOKENS = st.lists(st.integers(0, 2), max_size=12)


@given(st.lists(TOKENS, max_size=4), TOKENS, st.integers(1, 4))
def test_app_and_runtime_agree(registered, prompt, size):
    found = shared_prefix(registered, prompt, size)
    assert found.blocks == len(PrefixTrie(registered, size).match(prompt))
    assert len(found.sha256) == (32 if found.blocks else 0)


def test_blocks_of_no_tokens_share_nothing():
    assert shared_prefix([[1, 2]], [1, 2, 3], 0).blocks == 0


@given(TOKENS, TOKENS)
def test_the_hash_names_the_tokens(one, other):
    registered = [one, other]
    first, second = shared_prefix(registered, [*one, 9], 2), shared_prefix(registered, [*other, 9], 2)
    same = one[: first.blocks * 2] == other[: second.blocks * 2]
    assert (first == second) == same
