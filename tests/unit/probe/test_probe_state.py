"""Every row of the probe's state table, and its rules over random facts and histories of canaries."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from status_probe.canary import CanaryResult
from status_probe.state import LATE, MISSES, Facts, judge
from tie.proto import probe_pb2

GOOD = CanaryResult(at=1.0, latency_s=0.1, error="")
WRONG = CanaryResult(at=1.0, latency_s=0.1, error="canary-no-token")
MISSED = CanaryResult(at=1.0, latency_s=5.0, error="canary-timeout")
BUSY = CanaryResult(at=1.0, latency_s=5.0, error="canary-timeout", progress=True)


@pytest.mark.parametrize(
    ("facts", "state", "reason"),
    [
        (Facts(), probe_pb2.STATE_INITIALIZING, "engine-starting"),
        (Facts(late=True), probe_pb2.STATE_IN_ERROR, "start-timeout"),
        (Facts(connected=True), probe_pb2.STATE_INITIALIZING, "canary-pending"),
        (Facts(connected=True, canary=WRONG), probe_pb2.STATE_INITIALIZING, "canary-pending"),
        (Facts(connected=True, canary=WRONG, late=True), probe_pb2.STATE_IN_ERROR, "canary-no-token"),
        (Facts(connected=True, canary=WRONG, flown=True), probe_pb2.STATE_IN_ERROR, "canary-no-token"),
        (Facts(connected=True, canary=GOOD, flown=True), probe_pb2.STATE_READY, ""),
        (Facts(connected=True, canary=GOOD, flown=True, warming=True), probe_pb2.STATE_INITIALIZING, "warming"),
        (Facts(connected=True, canary=GOOD, flown=True, warming=True, was_ready=True), probe_pb2.STATE_READY, ""),
        (Facts(connected=True, canary=GOOD, flown=True, gone=True), probe_pb2.STATE_IN_ERROR, "engine-gone"),
        (Facts(connected=True, canary=GOOD, flown=True, unreachable=True), probe_pb2.STATE_IN_ERROR, "socket-gone"),
        (Facts(connected=True, gone=True, recycling=True), probe_pb2.STATE_RECYCLING, ""),
    ],
)
def test_each_row(facts, state, reason):
    assert judge(facts) == (state, reason)


@pytest.mark.parametrize(
    ("flights", "reason"),
    [
        ([WRONG], "canary-no-token"),
        ([MISSED] * (MISSES - 1), ""),
        ([MISSED] * MISSES, "canary-timeout"),
        ([BUSY] * (LATE - 1), ""),
        ([BUSY] * LATE, "canary-late"),
        ([MISSED, MISSED, BUSY, MISSED, MISSED], ""),  # in a row means in a row
        ([MISSED, MISSED, GOOD, MISSED, MISSED], ""),
        ([MISSED] * MISSES + [GOOD], ""),
        ([BUSY] * (LATE - 1) + [GOOD] + [BUSY] * (LATE - 1), ""),
    ],
)
def test_a_busy_engine_is_told_from_a_dead_one(flights, reason):
    facts = Facts(connected=True)
    facts.note(GOOD)
    for flight in flights:
        facts.note(flight)
    assert judge(facts) == (probe_pb2.STATE_IN_ERROR if reason else probe_pb2.STATE_READY, reason)


COUNTS = {name: st.integers(0, 12) for name in ("missed_in_a_row", "late_in_a_row")}
BOOLEANS = {
    field.name: st.booleans()
    for field in dataclasses.fields(Facts)
    if field.name != "canary" and field.name not in COUNTS
}


@given(st.builds(Facts, canary=st.sampled_from([None, GOOD, WRONG, MISSED, BUSY]), **BOOLEANS, **COUNTS))
def test_ready_is_never_said_without_a_passed_canary_on_a_live_engine(facts):
    state, reason = judge(facts)
    if state == probe_pb2.STATE_READY:
        assert facts.connected
        assert facts.flown
        assert not facts.gone
        assert not facts.unreachable
        assert not facts.recycling
        assert facts.canary is not WRONG
        assert facts.canary is not MISSED or facts.missed_in_a_row < MISSES
    assert bool(reason) == (state in {probe_pb2.STATE_INITIALIZING, probe_pb2.STATE_IN_ERROR})


@given(st.lists(st.sampled_from([GOOD, BUSY]), max_size=60))
def test_an_engine_that_works_is_never_called_dead(flights):
    facts = Facts(connected=True, flown=True)
    for flight in flights:
        facts.note(flight)
        assert judge(facts)[1] in {"", "canary-late"}
