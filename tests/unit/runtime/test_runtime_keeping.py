"""What a runtime keeps for an export: whole blocks, and never more than half of the pool."""

from kv_memory import TOKENS
from tie.runtime.blocks import BlockPool
from tie.runtime.keeping import Keeping
from tie.runtime.sequence import Sequence


def test_no_more_than_half_of_the_pool_is_ever_kept():
    pool = BlockPool(8, TOKENS)
    notes = []
    keeping = Keeping(pool, notes.append)

    def sequence(count):
        return Sequence(tuple(range(count * TOKENS)), 100, computed=count * TOKENS, blocks=pool.allocate(count))

    first, second = sequence(3), sequence(3)
    kept = keeping.hold(first)
    pool.release(first.blocks)
    assert keeping.hold(second) is None
    pool.release(second.blocks)
    assert pool.free == 5
    kept.release()
    assert pool.free == 5, "released by the step thread, not by the one that asks"
    notes.pop()()
    assert pool.free == 8
    again = sequence(3)
    assert keeping.hold(again) is not None


def test_only_computed_whole_blocks_are_kept():
    pool = BlockPool(8, TOKENS)
    sequence = Sequence((1, 2, 3, 4, 5), 100, output=[6, 7, 8], computed=7, blocks=pool.allocate(2))
    assert Keeping(pool, lambda note: note()).hold(sequence).blocks == tuple(sequence.blocks[:1])
