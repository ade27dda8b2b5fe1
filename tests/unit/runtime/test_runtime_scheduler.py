"""The scheduler's promises, under random arrivals, ends and cancels, with too little memory."""

import pytest

from tie.runtime.blocks import BlockPool
from tie.runtime.scheduler import Limits, QueueFullError, Scheduler
from tie.runtime.sequence import Phase, Priority, Sequence

MAX_LENGTH = 40
BLOCK_TOKENS = 4


def make(*, step_tokens=16, max_running=4, max_waiting=1000, blocks=10) -> Scheduler:
    return Scheduler(Limits(step_tokens, max_running, max_waiting), BlockPool(blocks, BLOCK_TOKENS))


def sequence(prompt: int, output: int, priority: Priority = Priority.INTERACTIVE) -> Sequence:
    return Sequence(tuple(range(prompt)), max_length=prompt + output, priority=priority)


def check_plan(scheduler: Scheduler, plan) -> None:
    assert plan.tokens <= scheduler.limits.step_tokens
    assert len({id(part.sequence) for part in plan.slices}) == len(plan.slices)
    planned = {id(part.sequence) for part in plan.slices}
    assert all(id(entry) in planned for entry in scheduler.decoding() if entry.priority is not Priority.BATCH)


def step(scheduler: Scheduler) -> list[Sequence]:
    """One step of a model that always answers; gives the sequences that got a token."""
    plan = scheduler.plan()
    check_plan(scheduler, plan)
    scheduler.computed(plan)
    spoke = [part.sequence for part in plan.slices if part.logits]
    for entry in spoke:
        entry.output.append(7)
        if entry.full:
            scheduler.finish(entry)
    return spoke


def test_a_long_prompt_does_not_hold_up_those_who_decode():
    scheduler = make(step_tokens=8, blocks=100)
    short = sequence(2, 30)
    scheduler.submit(short)
    step(scheduler)
    long = Sequence(tuple(range(100)), max_length=110)
    scheduler.submit(long)
    for _ in range(5):
        assert short in step(scheduler)
    assert 0 < long.computed < 100


def test_a_chunk_takes_what_the_decodes_leave():
    scheduler = make(step_tokens=8, blocks=100)
    for _ in range(2):
        scheduler.submit(sequence(1, 30))
    step(scheduler)
    scheduler.submit(Sequence(tuple(range(50)), max_length=60))
    plan = scheduler.plan()
    assert [part.count for part in plan.slices] == [1, 1, 6]
    assert plan.slices[2].logits == 0


def test_the_youngest_is_preempted_and_computed_anew():
    scheduler = make(blocks=4)  # 16 positions
    old, young = sequence(7, 9), sequence(7, 9)
    scheduler.submit(old)
    scheduler.submit(young)
    while not young.preemptions:
        step(scheduler)
    assert old.phase is Phase.RUNNING
    assert young.phase is Phase.WAITING
    assert young.computed == 0
    generated = list(young.output)
    while young.phase is not Phase.FINISHED:
        step(scheduler)
    assert young.output[: len(generated)] == generated
    assert len(young.output) == 9


def test_batch_goes_behind_interactive_but_gets_its_share():
    scheduler = make(max_running=1, step_tokens=64, blocks=100)
    batch = sequence(1, 1, Priority.BATCH)
    scheduler.submit(batch)
    crowd = [sequence(1, 1) for _ in range(20)]
    for entry in crowd:
        scheduler.submit(entry)
    order = []
    while scheduler.running or scheduler.waiting:
        order += step(scheduler)
    assert 0 < order.index(batch) < len(crowd)
    assert [entry for entry in order if entry is not batch] == crowd


def test_a_canary_waits_for_nobody():
    scheduler = make(max_running=2, blocks=10)
    crowd = [sequence(19, 1) for _ in range(4)]
    for entry in crowd:
        scheduler.submit(entry)
    step(scheduler)
    assert scheduler.pool.free == 0
    canary = sequence(1, 1, Priority.CANARY)
    scheduler.submit(canary)
    assert canary in step(scheduler)
    while scheduler.running or scheduler.waiting:
        step(scheduler)
    assert all(entry.phase is Phase.FINISHED for entry in crowd)


def test_more_than_may_wait_are_refused_and_a_canary_is_not():
    scheduler = make(max_running=2, max_waiting=1)
    for _ in range(3):
        scheduler.submit(sequence(1, 1))
    with pytest.raises(QueueFullError):
        scheduler.submit(sequence(1, 1))
    scheduler.submit(sequence(1, 1, Priority.CANARY))


def test_what_could_never_run_is_refused():
    with pytest.raises(ValueError):
        make(blocks=2).submit(sequence(5, 5))


def test_deadlines_are_the_callers_clock():
    scheduler = make()
    early, late, never = sequence(1, 1), sequence(1, 1), sequence(1, 1)
    early.deadline, late.deadline = 10.0, 20.0
    for entry in (early, late, never):
        scheduler.submit(entry)
    assert scheduler.expired(9.9) == []
    assert scheduler.expired(10.0) == [early]
    assert scheduler.expired(30.0) == [early, late]


def test_a_sequence_is_its_prompt_and_then_its_output():
    entry = Sequence((1, 2, 3), max_length=10)
    entry.output += [4, 5]
    assert entry.tokens(0, 2) == [1, 2]
    assert entry.tokens(1, 3) == [2, 3, 4]
    assert entry.tokens(3, 2) == [4, 5]
    assert entry.tokens(4, 1) == [5]


def test_what_exports_hold_is_waited_for_even_by_a_canary():
    scheduler = make(blocks=4)
    held = scheduler.pool.allocate(4)
    canary, other = sequence(1, 1, Priority.CANARY), sequence(9, 1)
    scheduler.submit(canary)
    scheduler.submit(other)
    assert scheduler.plan().slices == ()
    scheduler.pool.release(held[:1])
    assert step(scheduler) == [canary]
    scheduler.pool.release(held[1:])
    assert step(scheduler) == [other]
