"""Hot blocks of registered prompts in the paged KV: shared, loaded on demand, evicted, never lost, never wrong."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tie.bones.blocks import HostBlocks
from tie.runtime.blocks import BlockPool, OutOfBlocksError
from tie.runtime.prefix_cache import PrefixCache
from tie.runtime.prefix_trie import PrefixTrie
from tie.runtime.scheduler import Limits, Scheduler
from tie.runtime.sequence import Phase, Priority, Sequence

TOKENS = 4
LONG = tuple(range(100, 120))  # five blocks
OTHER = (*LONG[:8], *range(50, 58))  # shares two of them, and has two of its own
LIMITS = Limits(step_tokens=64, max_running=6, max_waiting=50)


class Kv(HostBlocks):
    """Blocks whose bytes name the node that they hold."""

    def __init__(self, total):
        self.blocks = [bytearray(8) for _ in range(total)]
        self.loads = []

    def block(self, number):
        self.loads.append(number)
        return memoryview(number.to_bytes(8, "little"))

    def block_view(self, block):
        return memoryview(self.blocks[block])

    def node_in(self, block):
        return int.from_bytes(self.blocks[block], "little")


def readable(made, nodes):
    """The nodes' blocks, taken and loaded."""
    blocks = made.take(nodes)
    assert made.load(nodes, lambda: True) == made.loaded(nodes) == len(nodes)
    return blocks


def cache(total, prompts=(LONG, OTHER)):
    kv = Kv(total)
    made = PrefixCache(BlockPool(total, TOKENS))
    made.open(PrefixTrie(prompts, TOKENS), kv, kv)
    return made, kv


def test_nothing_matches_before_the_pool_is_there():
    assert PrefixCache(BlockPool(4, TOKENS)).match((*LONG, 1)) == ()


def test_a_block_is_loaded_once_and_shared_from_then_on():
    made, kv = cache(10)
    nodes = made.match((*LONG, 1))
    assert made.in_use(nodes) == 0
    first = readable(made, nodes)
    assert made.in_use(nodes) == 5
    assert readable(made, nodes) == first
    assert kv.loads == list(nodes)
    assert [kv.node_in(block) for block in first] == list(nodes)
    assert made.pool.free == 5
    assert not any(made.pool.writable(block) for block in first)
    # The other prompt begins with two of them.
    other = readable(made, made.match((*OTHER, 1)))
    assert other[:2] == first[:2]
    assert (made.statistics.hits, made.statistics.tokens, made.statistics.loads) == (3, 56, 7)


def test_unused_blocks_stay_until_the_room_is_needed_the_last_one_first():
    made, kv = cache(8)
    nodes = made.match((*LONG, 1))
    made.pool.release(readable(made, nodes))
    assert (made.hot, made.pool.free, made.in_use(nodes)) == (5, 8, 0)
    kept = made.pool.allocate(4)  # three were free, and one hot one has to go: the prompt's last
    assert (made.hot, made.statistics.evictions) == (4, 1)
    kv.loads.clear()
    blocks = readable(made, nodes[:4])
    assert (kv.loads, made.pool.free) == ([], 0)
    with pytest.raises(OutOfBlocksError):
        made.take(nodes)
    made.pool.release(kept[:1])
    assert readable(made, nodes)[:4] == blocks
    assert kv.loads == [nodes[4]]


def test_loading_pushes_out_no_block_of_the_same_prompt():
    made, _ = cache(5)
    nodes = made.match((*LONG, 1))
    made.pool.release(made.take(nodes))
    made.pool.release(made.pool.allocate(2))  # the last two are gone
    blocks = made.take(nodes)
    assert len(set(blocks)) == 5
    assert made.in_use(nodes) == 5


def test_the_longest_unused_prompt_goes_first():
    made, _ = cache(10, prompts=(LONG, tuple(range(5))))
    one, two = made.match((*LONG, 1)), made.match((*range(5), 9))
    made.pool.release(readable(made, two))
    made.pool.release(readable(made, one))
    made.pool.allocate(5)
    assert made.hot == 5
    made.pool.share([made._places[node] for node in one])  # all of the one that was used last are still there


def test_a_block_is_loaded_when_there_is_time_once_for_all_that_wait_for_it():
    made, kv = cache(10)
    nodes = made.match((*LONG, 1))
    first, second = made.take(nodes), made.take(nodes)
    assert (first, kv.loads, made.hot, made.loaded(nodes)) == (second, [], 0, 0)
    assert made.load(nodes, lambda: False) == 1
    assert made.load(nodes, lambda: len(kv.loads) < 3) == 3
    assert (kv.loads, made.hot, made.loaded(made.match((*OTHER, 1)))) == (list(nodes[:3]), 3, 2)
    assert made.load(nodes, lambda: True) == made.load(nodes, lambda: True) == 5
    assert kv.loads == list(nodes)
    assert [kv.node_in(block) for block in first] == list(nodes)


def test_a_place_that_was_given_up_empty_is_not_taken_for_a_loaded_one():
    made, kv = cache(5)
    nodes = made.match((*LONG, 1))
    made.pool.release(made.take(nodes))
    blocks = made.take(nodes)
    assert (made.loaded(nodes), made.load(nodes, lambda: False)) == (0, 1)
    made.pool.release(blocks)
    made.pool.release(made.pool.allocate(5))  # for somebody else, who may have written
    assert (made.hot, made.statistics.evictions) == (0, 1)
    assert [kv.node_in(block) for block in readable(made, nodes)] == list(nodes)
    assert made.statistics.loads == 6


@settings(max_examples=60)
@given(st.integers(0, 10**6))
def test_whatever_happens_no_block_is_lost_or_mixed_up(seed):
    """Requests with and without registered prompts, through the real scheduler, in too little memory."""
    dice = random.Random(seed)  # noqa: S311 (repeatable)
    made, kv = cache(dice.randint(9, 24))
    scheduler = Scheduler(LIMITS, made.pool, made)
    alive = []

    def load(waiting):
        for sequence in waiting:
            there = made.load(sequence.prefix, lambda: dice.random() < 0.6)
            sequence.computed = max(sequence.computed, there * TOKENS)
            if there < len(sequence.prefix):
                return
            sequence.restored = 0

    for _ in range(60):
        if dice.random() < 0.5 and scheduler.room:
            prefix = dice.choice((LONG, OTHER, OTHER[:10], ()))
            prompt = (*prefix, *(dice.randint(0, 9) for _ in range(dice.randint(1, 8))))
            entry = Sequence(
                prompt=prompt,
                max_length=len(prompt) + dice.randint(1, 6),
                priority=dice.choice((Priority.INTERACTIVE, Priority.BATCH)),
            )
            entry.prefix = made.match(prompt)
            if made.pool.blocks_for(entry.max_length) <= made.pool.total:
                scheduler.submit(entry)
                alive.append(entry)
        plan = scheduler.plan(restore=load)
        for entry in alive:
            if entry.phase is Phase.RUNNING:
                shared = entry.blocks[: len(entry.prefix)]
                there = made.loaded(entry.prefix)
                assert [kv.node_in(block) for block in shared[:there]] == list(entry.prefix[:there])
                assert entry.restored or entry.computed >= len(shared) * TOKENS
        for part in plan.slices:
            entry = part.sequence
            assert part.start >= len(entry.prefix) * TOKENS, "a shared block would be written"
            for position in range(part.start, part.start + part.count):
                block = entry.blocks[position // TOKENS]
                kv.blocks[block][:] = b"\xff" * 8  # computed: no node's any more
        scheduler.computed(plan)
        for part in plan.slices:
            if part.logits and part.sequence.phase is Phase.RUNNING:
                part.sequence.output.append(1)
                if part.sequence.full or dice.random() < 0.2:
                    scheduler.finish(part.sequence)
        alive = [entry for entry in alive if entry.phase is not Phase.FINISHED]
        held = {block for entry in alive for block in entry.blocks}
        assert made.pool.total - made.pool.free == len(held)
    for entry in alive:
        scheduler.finish(entry)
    statistics = made.pool.statistics()
    assert (statistics.free, statistics.used) == (statistics.total, 0)
    assert statistics.handed_out == statistics.returned
