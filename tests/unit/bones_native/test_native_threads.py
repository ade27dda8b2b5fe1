"""How many threads steps get, on simulated machines."""

import pytest

from tie.bones.native.threads import StepThreads, ThreadChoice


def _run(choice: ThreadChoice, steps: int, seconds, rows: int = 8) -> list[int]:
    chosen = []
    for _ in range(steps):
        threads = choice.choose(rows)
        choice.record(rows, threads, seconds(threads))
        chosen.append(threads)
    return chosen


def _quiet(threads: int) -> float:
    return 0.001 + 0.01 / threads


def _busy(threads: int) -> float:
    """Half of one core is taken: whoever shares a core is waited for."""
    return 0.0115 if threads == 1 else 0.018


def test_a_quiet_machine_is_used_whole_and_hardly_tried():
    choice = ThreadChoice(2, adapt=True)
    _run(choice, 1000, _quiet)
    chosen = _run(choice, 2000, _quiet)
    assert choice.usual == 2
    assert chosen.count(1) <= 20


def test_a_neighbour_that_comes_and_goes_is_noticed_within_some_steps():
    choice = ThreadChoice(2, adapt=True)
    _run(choice, 1000, _quiet)
    _run(choice, 12, _busy)
    assert choice.usual == 1
    _run(choice, 1000, _busy)
    assert choice.usual == 1
    _run(choice, 600, _quiet)
    assert choice.usual == 2


def test_one_slow_step_changes_nothing():
    choice = ThreadChoice(2, adapt=True)
    _run(choice, 100, _quiet)
    for _ in range(50):
        _run(choice, 1, lambda _: 1.0)
        _run(choice, 19, _quiet)
    assert choice.usual == 2


def test_a_large_machine_gives_up_no_more_than_it_must():
    def seconds(threads: int) -> float:
        return 0.001 + 0.1 / threads + (0.05 if threads == 16 else 0.0)  # one core of 16 is taken

    choice = ThreadChoice(16, adapt=True)
    _run(choice, 2000, seconds)
    assert choice.usual == 15


def test_sizes_are_compared_with_their_like_only():
    choice = ThreadChoice(2, adapt=True)
    for _ in range(500):  # prompts between answers take a hundred times as long
        _run(choice, 3, _quiet, rows=8)
        _run(choice, 1, lambda threads: 100 * _quiet(threads), rows=300)
    assert choice.usual == 2


@pytest.mark.parametrize(("most", "adapt"), [(1, True), (4, False)])
def test_nothing_is_tried_where_there_is_no_choice(most, adapt):
    assert set(_run(ThreadChoice(most, adapt=adapt), 500, _busy)) == {most}


@pytest.mark.parametrize(("most", "adapt", "many"), [(1, True, 1), (3, True, 2), (3, False, 3)])
def test_steps_of_many_sequences_leave_a_core(most, adapt, many):
    threads = StepThreads(most, adapt=adapt)
    assert [threads.choose(sequences, 8) for sequences in (1, 3, 4, 16)] == [most, most, many, many]


def test_steps_of_few_and_of_many_sequences_learn_apart():
    threads = StepThreads(3, adapt=True)
    for _ in range(200):
        chosen = threads.choose(8, 8)
        threads.record(8, 8, chosen, _busy(chosen))
    assert (threads.choose(8, 8), threads.choose(1, 8)) == (1, 3)
