"""The phases of a recycle: what each waits for, how long, and what is told."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller_facts import facts, runtime
from controllerd.recycle import Deadlines, Phase, Procedure, RecycleRecord, Tell

DEADLINES = Deadlines(busy_ack_s=5.0, drain_s=30.0, fresh_s=60.0)


def procedure(drain_s: float = 30.0) -> Procedure:
    return Procedure(RecycleRecord("operator", 100.0, "old"), drain_s, DEADLINES)


def test_each_phase_waits_for_its_condition() -> None:
    recycle, old = procedure(), runtime("old")
    assert recycle.advance(100.0, facts(old, in_flight=2)) is None
    assert recycle.phase is Phase.ANNOUNCING
    assert recycle.advance(101.0, facts(old, busy=True, in_flight=2)) is None
    assert recycle.phase is Phase.EMPTYING
    assert recycle.stale is None
    assert recycle.advance(111.0, facts(old, busy=True)) == Tell("operator", 20.0)
    assert recycle.stale == "old"
    assert recycle.advance(112.0, facts(old, busy=True)) is None  # it is being told
    recycle.told(113.0, heard=False)
    assert recycle.advance(113.1, facts(old, busy=True)) is None
    assert recycle.advance(113.3, facts(old, busy=True)) == Tell("operator", pytest.approx(17.7))
    recycle.told(113.4, heard=True)
    assert recycle.advance(114.0, facts(runtime("old", "recycling"), busy=True)) is None
    assert recycle.phase is Phase.LEAVING
    recycle.advance(115.0, facts(None, busy=True))
    assert recycle.phase is Phase.DONE


def test_each_phase_has_a_deadline() -> None:
    recycle, old = procedure(drain_s=3.0), runtime("old")
    recycle.advance(104.9, facts(old, in_flight=1))
    assert recycle.phase is Phase.ANNOUNCING
    recycle.advance(105.0, facts(old, in_flight=1))
    assert recycle.phase is Phase.EMPTYING
    assert recycle.advance(108.0, facts(old, in_flight=1)) == Tell("operator", 0.001)
    recycle.told(108.0, heard=True)
    recycle.advance(109.9, facts(old, in_flight=1))
    assert recycle.phase is Phase.LEAVING
    recycle.advance(110.0, facts(old, in_flight=1))
    assert recycle.phase is Phase.DONE


def test_without_cloudboard_nothing_is_in_flight() -> None:
    recycle = procedure()
    assert recycle.advance(105.0, facts(runtime("old"), cloudboard=False, in_flight=3)) == Tell("operator", 30.0)


def test_a_runtime_that_was_never_seen_is_waited_for_and_told() -> None:
    recycle = Procedure(RecycleRecord("operator", 100.0), 30.0, DEADLINES)
    assert recycle.advance(101.0, facts(None, busy=True)) is None
    assert recycle.phase is Phase.IDENTIFYING
    assert isinstance(recycle.advance(102.0, facts(runtime("late"), busy=True)), Tell)
    assert recycle.stale == "late"


@given(
    st.lists(
        st.tuples(
            st.floats(0, 20),
            st.sampled_from([None, runtime("old"), runtime("old", "recycling"), runtime("new")]),
            st.booleans(),
            st.booleans(),
            st.integers(0, 3),
            st.sampled_from([None, True, False]),
        ),
        max_size=30,
    )
)
def test_phases_only_go_forward_and_end(steps: list) -> None:
    recycle, now = procedure(), 100.0
    for seconds, present, cloudboard, busy, in_flight, heard in steps:
        before, now = recycle.phase, now + seconds
        recycle.advance(now, facts(present, cloudboard=cloudboard, busy=busy, in_flight=in_flight))
        if heard is not None:
            recycle.told(now, heard=heard)
        assert recycle.phase >= before
    for seconds in (5.0, 30.0, 60.0, 32.0):  # every deadline in turn, and nobody does anything
        now += seconds
        recycle.advance(now, facts(runtime("old"), in_flight=1))
    assert recycle.phase is Phase.DONE


def test_what_is_cut_is_counted() -> None:
    recycle, old = procedure(drain_s=3.0), runtime("old")
    recycle.advance(101.0, facts(old, busy=True, in_flight=5))
    recycle.advance(103.0, facts(old, busy=True, in_flight=2))
    assert recycle.record.cut == 0
    assert recycle.advance(104.0, facts(old, busy=True, in_flight=2)) is not None
    assert recycle.record.cut == 2


def test_what_ended_in_time_is_not_cut() -> None:
    recycle, old = procedure(drain_s=3.0), runtime("old")
    recycle.advance(101.0, facts(old, busy=True, in_flight=5))
    assert recycle.advance(103.9, facts(old, busy=True)) is not None
    recycle.told(103.9, heard=True)
    recycle.advance(110.0, facts(replace(old, running=1), busy=True))  # the probe's own test request
    assert recycle.record.cut == 0


def test_without_cloudboard_the_runtime_tells_what_is_cut() -> None:
    recycle, old = procedure(drain_s=3.0), runtime("old")
    assert recycle.advance(105.0, facts(old, cloudboard=False)) is not None
    recycle.told(105.0, heard=True)
    recycle.advance(106.0, facts(replace(old, running=3), cloudboard=False))
    assert recycle.record.cut == 0
    recycle.advance(108.0, facts(replace(old, running=2), cloudboard=False))
    assert recycle.record.cut == 2
