"""Every row of the probe's state table, and its rules over random facts."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from status_probe.canary import CanaryResult
from status_probe.state import Facts, judge
from tie.proto import probe_pb2

GOOD = CanaryResult(at=1.0, latency_s=0.1, error="")
BAD = CanaryResult(at=1.0, latency_s=5.0, error="canary-timeout")


@pytest.mark.parametrize(
    ("facts", "state", "reason"),
    [
        (Facts(), probe_pb2.STATE_INITIALIZING, "engine-starting"),
        (Facts(late=True), probe_pb2.STATE_IN_ERROR, "start-timeout"),
        (Facts(connected=True), probe_pb2.STATE_INITIALIZING, "canary-pending"),
        (Facts(connected=True, canary=BAD), probe_pb2.STATE_INITIALIZING, "canary-pending"),
        (Facts(connected=True, canary=BAD, late=True), probe_pb2.STATE_IN_ERROR, "canary-timeout"),
        (Facts(connected=True, canary=BAD, flown=True), probe_pb2.STATE_IN_ERROR, "canary-timeout"),
        (Facts(connected=True, canary=GOOD, flown=True), probe_pb2.STATE_READY, ""),
        (Facts(connected=True, canary=GOOD, flown=True, warming=True), probe_pb2.STATE_INITIALIZING, "warming"),
        (Facts(connected=True, canary=GOOD, flown=True, warming=True, was_ready=True), probe_pb2.STATE_READY, ""),
        (Facts(connected=True, canary=GOOD, flown=True, gone=True), probe_pb2.STATE_IN_ERROR, "engine-gone"),
        (Facts(connected=True, gone=True, recycling=True), probe_pb2.STATE_RECYCLING, ""),
    ],
)
def test_each_row(facts, state, reason):
    assert judge(facts) == (state, reason)


BOOLEANS = {field.name: st.booleans() for field in dataclasses.fields(Facts) if field.name != "canary"}


@given(st.builds(Facts, canary=st.sampled_from([None, GOOD, BAD]), **BOOLEANS))
def test_ready_is_never_said_without_a_passed_canary_on_a_live_engine(facts):
    state, reason = judge(facts)
    if state == probe_pb2.STATE_READY:
        assert facts.connected
        assert facts.flown
        assert not facts.gone
        assert not facts.recycling
        assert facts.canary is not BAD
    assert bool(reason) == (state in {probe_pb2.STATE_INITIALIZING, probe_pb2.STATE_IN_ERROR})
