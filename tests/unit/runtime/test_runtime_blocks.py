"""The block pool never hands one block to two owners and never loses one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tie.runtime.blocks import BlockPool, OutOfBlocksError


def test_a_refused_allocation_takes_nothing():
    pool = BlockPool(3, 16)
    pool.allocate(2)
    with pytest.raises(OutOfBlocksError):
        pool.allocate(2)
    assert pool.free == 1


def test_a_shared_block_is_read_only_and_freed_by_the_last_holder():
    pool = BlockPool(2, 16)
    (block,) = pool.allocate(1)
    pool.share([block])
    assert not pool.writable(block)
    pool.release([block])
    assert pool.writable(block)
    assert pool.free == 1
    pool.release([block])
    assert pool.free == 2


def test_generations_tell_a_block_from_its_later_namesake():
    pool = BlockPool(1, 16)
    (block,) = pool.allocate(1)
    before = pool.generation(block)
    pool.release([block])
    pool.allocate(1)
    assert pool.generation(block) == before + 1


def test_a_free_block_can_be_neither_released_nor_shared():
    pool = BlockPool(1, 16)
    with pytest.raises(ValueError):
        pool.release([0])
    with pytest.raises(ValueError):
        pool.share([0])


@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "release"]), st.integers(0, 7)), max_size=200))
def test_the_ledger_always_balances(actions):
    pool = BlockPool(8, 4)
    held: list[list[int]] = []  # one list per reference holder
    for action, number in actions:
        if action == "allocate":
            try:
                held.append(pool.allocate(number))
            except OutOfBlocksError:
                assert number > pool.free
        elif held and action == "share":
            copied = list(held[number % len(held)])
            pool.share(copied)
            held.append(copied)
        elif held:
            pool.release(held.pop(number % len(held)))
        statistics = pool.statistics()
        in_use = {block for blocks in held for block in blocks}
        assert statistics.used == len(in_use) == statistics.handed_out - statistics.returned
        assert statistics.free + statistics.used == statistics.total
        assert statistics.shared == sum(sum(block in blocks for blocks in held) > 1 for block in in_use)
