"""A runtime that restores a prefix pool: what the one before it has computed is served, and not computed again."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefix_runtime import BLOCKS, FORMAT, PROMPTS, TOKENS, Runtime, mappings, restarted
from tie.proto import owner_pb2 as pb
from tie.runtime.prefix_pool import Place, PoolClient, format_of
from tie.runtime.prefix_restore import Expected, disagreement, metadata_of, restore
from tie.runtime.prefix_trie import Identity, PrefixTrie
from tie.runtime.prefixes import State


def test_the_first_runtime_computes_and_the_next_does_not(path, pool_owner):
    first = restarted(path)
    assert first.prefixes.state is State.COLD
    first.warm()
    assert first.prefixes.state is State.SEALED
    assert first.computed == [PROMPTS["one"], PROMPTS["two"]]
    assert first.sound()
    second = restarted(path)
    assert (second.prefixes.state, second.prefixes.restored) == (State.SEALED, True)
    assert second.sound()
    second.warm()
    assert second.computed == []
    assert (pool_owner.pools.seals, pool_owner.pools.restores, pool_owner.pools.resets) == (1, 1, 0)


def test_a_restored_pool_is_mapped_for_reading_only(path):
    restarted(path).warm()
    second = restarted(path)
    with pytest.raises(TypeError):
        second.pool.block(0)[0] = 1


def test_who_filled_the_pool_can_write_it_no_more(path):
    first = restarted(path).warm()
    with pytest.raises(TypeError):
        first.pool.block(0)[0] = 1
    assert "w" not in mappings()[first.pool._address]


def test_two_ranks_restore_only_what_all_of_them_have(path, pool_owner):
    places = [Place(0, 2), Place(1, 2)]
    ranks = [Runtime(path, place=place) for place in places]
    ranks[0].warm()
    # One rank is missing: the first that looks discards everything, and both compute.
    assert Runtime(path, place=places[0]).prefixes.restore() is None
    assert pool_owner.pools._pools == {}
    for rank in [Runtime(path, place=place) for place in places]:
        rank.warm()
    again = [restarted(path, place=place) for place in places]
    assert [rank.prefixes.state for rank in again] == [State.SEALED] * 2
    assert all(rank.sound() for rank in again)
    # Each has its own slice.
    assert bytes(again[0].pool.block(0)) != bytes(again[1].pool.block(0))


EXPECTED = Expected(FORMAT.header(0, BLOCKS), b"trie", Place(0, 2))
STATE = {
    "stage": pb.POOL_STAGE_SEALED,
    "world_size": 2,
    "format": format_of(EXPECTED.header),
    "pool_bytes": EXPECTED.header.buffer_bytes,
    "trie_sha256": EXPECTED.trie_sha256,
}


def test_agreement_is_of_all_ranks():
    sound = pb.PoolState(**STATE)
    assert disagreement([sound, sound], EXPECTED) == ""
    assert disagreement([sound], EXPECTED) == "rank-missing"
    assert disagreement([sound, pb.PoolState(stage=pb.POOL_STAGE_EMPTY)], EXPECTED) == "rank-not-ready"
    assert disagreement([pb.PoolState(stage=pb.POOL_STAGE_EMPTY)] * 2, EXPECTED) == "empty"
    assert disagreement([sound, pb.PoolState(**(STATE | {"pool_bytes": 1}))], EXPECTED) == "pool-bytes"
    assert disagreement([sound, pb.PoolState()], EXPECTED) == "rank-not-ready"


@given(st.binary(max_size=300))
def test_no_bytes_of_the_owner_are_taken_for_agreement(data):
    state = pb.PoolState()
    try:
        state.ParseFromString(data)
    except Exception:  # noqa: BLE001 (not a message)
        return
    sound = pb.PoolState(**STATE)
    assert (disagreement([sound, state], EXPECTED) == "") == (
        all(getattr(state, name) == STATE[name] for name in STATE)
    )


def test_a_client_of_another_size_is_not_believed(path):
    """The owner's descriptors are checked before they are mapped."""
    trie = PrefixTrie(PROMPTS.values(), TOKENS)
    identity = Identity(bytes(32), "0", "layout", TOKENS, 1)
    assert restore(path, Expected(FORMAT.header(0, BLOCKS), trie.encode(identity), Place())) is None
    client = PoolClient(path, Place())
    for descriptor in client.allocate(FORMAT.header(0, BLOCKS), len(metadata_of(b"", [bytes(32)] * BLOCKS))):
        os.close(descriptor)
    client.close()
