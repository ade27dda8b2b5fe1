"""Turns are shared out: nobody waits who had none lately, and all together never take more than the rate."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tie.runtime.shares import Shares


def play(wishes, rate=100.0):
    """Who had a turn when. `wishes` are (pause before, who); one who waits already does not ask again."""
    shares, now, turns, waiting = Shares(rate), 0.0, [], set()
    for pause, who in [*wishes, (10.0, None)]:
        end = now + pause
        while (wait := shares.pause(now, end - now)) < end - now or not turns:
            now += wait
            taken = [(now, entry) for entry in shares.due(now)]
            turns += taken
            waiting -= {entry for _, entry in taken}
            if not taken:
                break
        now = end
        if who is not None and who not in waiting:
            waiting.add(who)
            shares.add(who, now)
    return turns + [(now, entry) for entry in shares.due(now)]


WISHES = st.lists(st.tuples(st.sampled_from([0.0, 0.001, 0.01, 0.04, 0.5]), st.integers(0, 3)), max_size=40)


@given(WISHES)
def test_the_turns_of_one_lie_apart_and_none_is_lost(wishes):
    turns = play(wishes)
    for who in range(4):
        times = [at for at, entry in turns if entry == who]
        assert all(later - earlier >= 1 / 100.0 - 1e-9 for earlier, later in itertools.pairwise(times))
        assert bool(times) == any(entry == who for _, entry in wishes)


@pytest.mark.parametrize("speakers", [1, 4, 32])
def test_those_who_speak_share_the_whole_rate_whoever_spoke_before(speakers):
    shares, now, turns = Shares(100.0), 0.0, []
    for who in range(160):  # each of them once: they have no part in what follows
        shares.add(who, now)
    assert len(list(shares.due(now))) == 160
    now = 10.0
    assert list(shares.due(now)) == []
    for who in range(speakers):
        shares.add(who, now)
    while now < 20.0:
        for who in shares.due(now):
            turns.append((now, who))
            shares.add(who, now)  # it always has more to say
        now += max(1e-6, shares.pause(now, 1.0))
    assert len(turns) == pytest.approx(10.0 * 100.0 + speakers, rel=0.03)
    each = [sum(entry == who for _, entry in turns) for who in range(speakers)]
    assert max(each) - min(each) <= 1


def test_the_first_turn_comes_at_once_and_the_next_after_the_interval():
    shares = Shares(100.0)
    shares.add("a", 5.0)
    assert shares.pause(5.0, 1.0) == 0.0
    assert list(shares.due(5.0)) == ["a"]
    shares.add("a", 5.001)
    assert list(shares.due(5.001)) == []
    assert shares.pause(5.001, 1.0) == pytest.approx(0.009)
    assert list(shares.due(5.01)) == ["a"]
    assert shares.pause(5.01, 1.0) == 1.0


def test_nobody_is_remembered_for_longer_than_the_interval():
    shares = Shares(100.0)
    for who in range(50):
        shares.add(who, who * 0.001)
    assert len(list(shares.due(1.0))) == 50
    assert not shares._next


def test_all_who_wait_may_leave_at_the_end():
    shares = Shares(1.0)
    for who in ("a", "b", "a", "b"):
        shares.add(who, 0.0)
    assert sorted(shares.take_all()) == ["a", "a", "b", "b"]
