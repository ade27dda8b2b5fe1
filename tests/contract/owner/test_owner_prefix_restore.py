"""A runtime that restores a prefix pool: what the one before it has computed is served, and not computed again."""

import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefix_runtime import BLOCKS, BYTES, FORMAT, PROMPTS, TOKENS, mappings, restarted
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
    assert "w" not in mappings()[first.pool.pools[0]._address]


def test_two_ranks_restore_only_what_all_of_them_have(path, pool_owner):
    first = restarted(path, ranks=2).warm()
    assert first.computed == [PROMPTS["one"], PROMPTS["two"]], "once for all ranks"
    assert first.sound()
    second = restarted(path, ranks=2)
    assert (second.prefixes.state, second.prefixes.restored) == (State.SEALED, True)
    assert second.sound()
    second.warm()
    assert (second.computed, pool_owner.pools.seals) == ([], 2)
    pools = pool_owner.pools._pools
    assert {rank: pool.header.block_bytes for rank, pool in pools.items()} == {0: BYTES, 1: BYTES // 2}
    pools.pop(1).close()  # a rank is missing: what the other has is of no use
    third = restarted(path, ranks=2)
    assert (third.prefixes.state, pool_owner.pools._pools) == (State.COLD, {})
    assert third.warm().sound()


def test_a_pool_of_one_rank_is_none_of_two_and_the_other_way_round(path, pool_owner):
    for ranks in (1, 2, 1):
        runtime = restarted(path, ranks=ranks)
        assert (runtime.prefixes.state, runtime.pool) == (State.COLD, None)
        assert runtime.warm().sound()
        assert len(pool_owner.pools._pools) == ranks


SIZES = (BYTES, BYTES // 2)
EXPECTED = Expected(tuple(replace(FORMAT, block_bytes=size).header(0, BLOCKS) for size in SIZES), b"trie")
STATES = [
    {
        "stage": pb.POOL_STAGE_SEALED,
        "world_size": 2,
        "format": format_of(header),
        "pool_bytes": header.buffer_bytes,
        "trie_sha256": EXPECTED.trie_sha256,
    }
    for header in EXPECTED.headers
]


def test_agreement_is_of_all_ranks():
    first, second = (pb.PoolState(**state) for state in STATES)
    assert disagreement([first, second], EXPECTED) == ""
    assert disagreement([second, first], EXPECTED) == "block-bytes"
    assert disagreement([first], EXPECTED) == "rank-missing"
    assert disagreement([first, pb.PoolState(stage=pb.POOL_STAGE_EMPTY)], EXPECTED) == "rank-not-ready"
    assert disagreement([pb.PoolState(stage=pb.POOL_STAGE_EMPTY)] * 2, EXPECTED) == "empty"
    assert disagreement([first, pb.PoolState(**(STATES[1] | {"pool_bytes": 1}))], EXPECTED) == "pool-bytes"
    assert disagreement([first, pb.PoolState()], EXPECTED) == "rank-not-ready"


@given(st.binary(max_size=300))
def test_no_bytes_of_the_owner_are_taken_for_agreement(data):
    state = pb.PoolState()
    try:
        state.ParseFromString(data)
    except Exception:  # noqa: BLE001 (not a message)
        return
    sound = pb.PoolState(**STATES[0])
    assert (disagreement([sound, state], EXPECTED) == "") == (
        all(getattr(state, name) == value for name, value in STATES[1].items())
    )


def test_a_client_of_another_size_is_not_believed(path):
    """The owner's descriptors are checked before they are mapped."""
    trie = PrefixTrie(PROMPTS.values(), TOKENS)
    identity = Identity(bytes(32), "0", "layout", TOKENS, 1)
    assert restore(path, Expected((FORMAT.header(0, BLOCKS),), trie.encode(identity))) is None
    client = PoolClient(path, Place())
    for descriptor in client.allocate(FORMAT.header(0, BLOCKS), len(metadata_of(b"", [bytes(32)] * BLOCKS))):
        os.close(descriptor)
    client.close()
