"""What is guessed, and when: lookup against naive search, the measured cost of steps, and the decision between them."""

import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tie.runtime.sequence import Sequence
from tie.runtime.speculation import LONGEST, LONGEST_LOOK, PLACES, PROBE, RETRY, Lookup, Speculation, best_lengths
from tie.runtime.step_cost import StepCost

SMALL = st.lists(st.integers(0, 3), max_size=60)


def naive_draft(tokens: list[int], most: int) -> tuple[int, ...]:
    """What followed the longest earlier occurrence of the text's end, of the last few of its last two tokens."""
    found = [end for end in range(2, len(tokens)) if tokens[end - 2 : end] == tokens[-2:]][-PLACES:]
    if not found:
        return ()
    lengths = range(2, LONGEST_LOOK + 1)
    agree = {end: max(n for n in lengths if n <= end and tokens[end - n : end] == tokens[-n:]) for end in found}
    end = max(found, key=lambda end: (agree[end], end))
    text = list(tokens)
    for index in range(most):
        text.append(text[end + index])
    return tuple(text[len(tokens) :])


@given(SMALL, st.integers(1, LONGEST))
def test_a_draft_is_what_followed_the_last_time(tokens, most):
    assert Lookup(tokens).draft(most) == naive_draft(tokens, most)


def test_a_copy_goes_on_where_it_is_copied_from():
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    elsewhere = [9, 3, 4, 0]
    assert Lookup([*text, *elsewhere, 1, 2, 3, 4]).draft(4) == (5, 6, 7, 8)


@given(SMALL, SMALL)
def test_a_lookup_grows_as_the_text_does(first, second):
    grown = Lookup(first)
    grown.extend(second)
    assert len(grown) == len(first) + len(second)
    assert grown.draft(LONGEST) == Lookup([*first, *second]).draft(LONGEST)


def test_the_index_of_a_long_prompt_is_small():
    """It is made of numbers alone: a long prompt's is made between two steps, and kept as long as it is answered."""
    text = list(range(8000))
    tracemalloc.start()
    try:
        lookup = Lookup(text)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 256 * len(lookup)


def known(**seconds: float) -> StepCost:
    cost = StepCost()
    for rows, value in seconds.items():
        cost.record(int(rows[1:]), value)
    return cost


def test_cost_is_interpolated_and_guessed_beyond_what_was_seen():
    cost = known(r2=1.0, r4=2.0)
    assert [cost.seconds(rows) for rows in (1, 2, 3, 4, 9)] == [0.75, 1.0, 1.5, 2.0, 2.0]
    assert StepCost().seconds(1) is None


def test_cost_follows_the_machine_and_not_an_outlier():
    cost = known(r8=1.0)
    cost.record(8, 100.0)
    assert cost.seconds(8) < 1.7
    for _ in range(50):
        cost.record(8, 2.0)
    assert cost.seconds(8) == pytest.approx(2.0, rel=0.01)


def test_what_gets_dearer_raises_what_was_not_measured_meanwhile():
    """A prompt's chunks get dearer with its context: a bound on their time must hold from its begin to its end."""
    cost, patience, reached = StepCost(), 2.0, []
    for rows in (256, 128, 64, 32, 16, 8):
        cost.record(rows, 1.0 + rows / 64)
    context = 0
    while context < 4096:
        rows = cost.rows_within(patience, 256)
        seconds = 1.0 + rows * (1 + context / 2048) / 64
        cost.record(rows, seconds)
        reached.append(seconds)
        context += rows
    assert max(reached) < 1.4 * patience


@given(
    st.lists(st.tuples(st.integers(1, 600), st.floats(0.001, 1)), min_size=1, max_size=30),
    st.floats(0.001, 2),
    st.integers(1, 512),
)
def test_rows_within_a_time_do_not_cost_more_as_far_as_is_known(measured, seconds, most):
    cost = StepCost()
    for rows, value in measured:
        cost.record(rows, value)
    rows = cost.rows_within(seconds, most)
    assert 1 <= rows <= max(1, most)
    if 1 < rows <= max(count for count, _ in measured):
        assert cost.seconds(rows) <= seconds * 1.001 + 1e-9


def test_a_first_prompt_feels_its_way_up():
    cost = StepCost()
    assert cost.rows_within(1.0, 512) == 1
    cost.record(10, 0.5)
    assert cost.rows_within(1.0, 512) == 20


def linear(base: float, row: float) -> StepCost:
    cost = StepCost()
    for rows in (*range(1, 17), 20, 24, 28, 32, 40, 48, 56, 64):  # one of each that are told apart
        cost.record(rows, base + row * rows)
    return cost


def test_where_rows_cost_nothing_all_that_may_come_true_is_guessed():
    lengths, gain = best_lengths([0.9], linear(1.0, 0.0))
    assert lengths == [LONGEST]
    assert gain == pytest.approx(sum(0.9**k for k in range(LONGEST + 1)))


def test_where_a_row_costs_what_a_token_is_worth_nothing_is_guessed():
    assert best_lengths([0.9] * 4, linear(0.0, 1.0)) == ([0] * 4, 1.0)
    assert best_lengths([0.9], StepCost()) == ([0], 1.0)
    assert best_lengths([0.0, 0.0], linear(1.0, 0.0)) == ([0, 0], 1.0)


def test_the_sequence_that_guesses_better_guesses_more():
    lengths, _ = best_lengths([0.9, 0.5], linear(1.0, 0.1))
    assert lengths[0] > lengths[1]


def play(cost: StepCost, *, right: float, steps: int = 400, streams: int = 1):
    """Texts that always offer a draft, each guess of which is right with some probability; draft lengths per step."""
    dice = random.Random(1)  # noqa: S311 - no secret
    speculation = Speculation(cost)
    sequences = [Sequence((1, 2, 3, 1, 2), max_length=10**6) for _ in range(streams)]
    for entry in sequences:
        entry.computed = entry.length - 1
    drafted = []
    for _ in range(steps):
        speculation.draft(sequences)
        drafted.append([len(entry.draft) for entry in sequences])
        for entry in sequences:
            accepted = 0
            while accepted < len(entry.draft) and dice.random() < right:
                accepted += 1
            if entry.draft:
                speculation.learn(entry, accepted, len(entry.draft))
            entry.output += [(len(entry.output) % 3) + 1 for _ in range(3)]
            entry.computed = entry.length - 1
    return drafted, speculation


def test_guesses_that_come_true_go_on():
    drafted, speculation = play(linear(1.0, 0.02), right=0.95)
    assert all(lengths[0] >= 4 for lengths in drafted[20:])
    assert speculation.accepted > 0.5 * speculation.drafted


def test_guesses_that_fail_stop_and_are_tried_again_now_and_then():
    drafted, _ = play(linear(1.0, 0.1), right=0.0)
    late = [lengths[0] for lengths in drafted[100:]]
    assert set(late) == {0, PROBE}
    assert late.count(PROBE) <= len(late) // RETRY + 1


def test_large_batches_guess_nothing_where_rows_cost():
    drafted, _ = play(linear(1.0, 0.2), right=0.5, streams=24)
    assert sum(map(sum, drafted[100:])) <= 300 * 24 * PROBE / RETRY
    drafted, _ = play(linear(1.0, 0.0), right=0.9, streams=48, steps=5)
    assert not any(map(any, drafted))


def test_nothing_is_remembered_of_who_has_left():
    speculation = Speculation(linear(1.0, 0.0))
    entry = Sequence((1, 2, 1, 2), max_length=10, computed=3)
    speculation.draft([entry])
    assert entry.draft
    speculation.draft([])
    assert not speculation._guessers
