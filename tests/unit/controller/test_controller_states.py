"""The state table, the gates and the triggers: pure, so tested over any sequence."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controllerd import triggers
from controllerd.facts import Facts, Gpu, Owner, Runtime
from controllerd.gates import Memory, assess
from controllerd.recycle_timer import ErrorBackoff, RecycleTimer
from controllerd.states import TABLE, Action, Event, State, step
from controllerd.triggers import Patience, Triggers
from tie.proto import control_pb2

RUNTIME = Runtime(
    instance_id="a", ready=True, state="ready", canary_ok=True, warmed=True, model="m", release="r", running=0,
    uptime_s=1.0, owner_generation=1,
)  # fmt: skip
GPU = Gpu(fit=True, fresh=True, advises_recycle=False)
OWNER = Owner("o", 1, "ready")
GOOD = Facts(RUNTIME, GPU, OWNER, cloudboard=True)
WARM = Memory(warmed_instance="a")

events = st.sampled_from(Event)
states = st.sampled_from(State)


# ---- the table ----


def test_numbers_are_those_of_the_contract() -> None:
    for state in State:
        assert control_pb2.State.Value(f"STATE_{state.name}") == state


@given(states, events)
def test_every_change_is_reported_and_nothing_else(state: State, event: Event) -> None:
    after, actions = step(state, event)
    assert (after is not state) == (Action.REPORT in actions)
    assert (Action.RECYCLE in actions) == (after is State.DRAINING and state is not State.DRAINING)


@given(st.lists(events, max_size=60))
def test_from_any_sequence_the_node_can_become_available(sequence: list[Event]) -> None:
    state = State.INITIALIZING
    for event in sequence:
        state, _ = step(state, event)
    for event in (Event.DRAINED, Event.MAINTENANCE_OFF, Event.READY):
        state, _ = step(state, event)
    assert state is State.AVAILABLE


@given(states, events)
def test_only_ready_makes_available(state: State, event: Event) -> None:
    after, _ = step(state, event)
    if after is State.AVAILABLE and state is not State.AVAILABLE:
        assert event is Event.READY
        assert state in {State.INITIALIZING, State.RECYCLING, State.ERROR}


def test_an_available_node_is_withdrawn_by_whatever_is_lost() -> None:
    for event in (Event.LOST, Event.BROKEN, Event.RECYCLE, Event.MAINTENANCE_ON):
        assert step(State.AVAILABLE, event)[0] is not State.AVAILABLE


def test_a_runtime_is_never_told_twice() -> None:
    for state in (State.DRAINING, State.RECYCLING):
        for event in Event:
            assert Action.RECYCLE not in step(state, event)[1]


def test_every_row_changes_the_state() -> None:
    for (state, _), (after, _) in TABLE.items():
        assert after is not state


# ---- the gates ----

runtimes = st.one_of(
    st.none(),
    st.builds(
        Runtime,
        instance_id=st.sampled_from(["a", "b"]),
        ready=st.booleans(),
        state=st.sampled_from(["initializing", "ready", "in-error", "recycling", "unknown"]),
        canary_ok=st.booleans(),
        warmed=st.booleans(),
        model=st.just("m"),
        release=st.just("r"),
        running=st.integers(0, 9),
        uptime_s=st.floats(0, 1e6),
        owner_generation=st.integers(0, 2),
    ).map(lambda runtime: replace(runtime, ready=runtime.state == "ready")),
)
gpus = st.sampled_from(
    [
        Gpu(fit=True, fresh=True, advises_recycle=False),
        Gpu(fit=True, fresh=False, advises_recycle=True),
        Gpu(fit=False, fresh=True, advises_recycle=True),
        Gpu(fit=False, fresh=False, advises_recycle=False, starting=True),
    ]
)
facts_strategy = st.builds(
    Facts,
    runtime=runtimes,
    gpu=st.one_of(st.none(), gpus),
    owner=st.one_of(
        st.none(), st.builds(Owner, st.just("o"), st.just(1), st.sampled_from(["loading", "ready", "failed"]))
    ),
    cloudboard=st.booleans(),
    keys=st.booleans(),
)
memories = st.builds(
    Memory,
    stale_instance=st.sampled_from([None, "a", "b"]),
    warmed_instance=st.sampled_from([None, "a", "b"]),
    owner_changed=st.booleans(),
    maintenance=st.booleans(),
    overdue=st.booleans(),
)


def test_all_gates_open() -> None:
    assert assess(GOOD, WARM).ready


@given(facts_strategy, memories)
def test_ready_means_every_condition(facts: Facts, memory: Memory) -> None:
    readiness = assess(facts, memory)
    runtime, gpu, owner = facts.runtime, facts.gpu, facts.owner
    conditions = (
        runtime is not None
        and runtime.ready
        and runtime.canary_ok
        and runtime.instance_id != memory.stale_instance
        and runtime.instance_id == memory.warmed_instance
        and gpu is not None
        and gpu.fit
        and gpu.fresh
        and owner is not None
        and owner.state == "ready"
        and not memory.owner_changed
        and facts.cloudboard
        and facts.keys
        and not memory.maintenance
    )
    assert readiness.ready == conditions
    assert not (readiness.ready and readiness.broken)
    assert len(set(readiness.reasons)) == len(readiness.reasons)


def test_an_owner_that_failed_says_why() -> None:
    readiness = assess(replace(GOOD, owner=replace(OWNER, state="failed", error="no-cuda")), WARM)
    assert (readiness.reasons, readiness.broken) == (("owner-failed", "no-cuda"), "owner-failed")


@pytest.mark.parametrize(
    ("facts", "memory", "reason", "broken"),
    [
        (replace(GOOD, owner=None), WARM, "owner-gone", False),
        (replace(GOOD, owner=replace(OWNER, state="failed")), WARM, "owner-failed", True),
        (replace(GOOD, keys=False), WARM, "keys-silent", False),
        (replace(GOOD, runtime=None), WARM, "runtime-gone", False),
        (replace(GOOD, runtime=replace(RUNTIME, ready=False, state="in-error")), WARM, "runtime-in-error", True),
        (GOOD, replace(WARM, stale_instance="a"), "runtime-stale", False),
        (GOOD, Memory(), "not-warmed", False),
        (replace(GOOD, gpu=replace(GPU, fit=False)), WARM, "gpu-unavailable", True),
        (replace(GOOD, cloudboard=False), WARM, "cloudboard-gone", False),
        (GOOD, replace(WARM, maintenance=True), "maintenance", False),
    ],
)
def test_each_gate_has_its_code(facts: Facts, memory: Memory, reason: str, broken: bool) -> None:
    readiness = assess(facts, memory)
    assert reason in readiness.reasons
    assert readiness.broken == (reason if broken else "")


# ---- timer and pauses ----


@given(st.floats(1, 1e5), st.floats(0, 0.99), st.floats(-1, 1), st.floats(0, 1e5))
def test_a_runtime_lives_its_interval_within_the_jitter(
    interval: float, jitter: float, draw: float, age: float
) -> None:
    timer = RecycleTimer(interval, jitter, lambda: draw)
    assert timer.remaining(5.0) is None
    assert not timer.due(5.0)
    timer.start(100.0, age)
    life = interval * (1 + jitter * draw)
    remaining = timer.remaining(100.0)
    assert remaining == pytest.approx(max(0.0, life - age), abs=1e-6)
    assert timer.due(100.0 + life - age + 1e-3)
    assert timer.due(100.0) == (remaining == 0.0)


def test_the_pause_between_error_recycles_doubles_and_is_bounded() -> None:
    backoff = ErrorBackoff(1.0)
    now, pauses = 0.0, []
    for _ in range(7):
        backoff.spend(now)
        pauses.append(backoff.remaining(now))
        assert not backoff.allows(now)
        now += pauses[-1]
        assert backoff.allows(now)
    assert pauses == [1, 2, 4, 8, 10, 10, 10]
    backoff.spend(now + 20)
    assert backoff.remaining(now + 20) == 1


# ---- triggers ----


class Clock:
    """A node's triggers with a clock of their own."""

    def __init__(self, interval: float = 1000.0) -> None:
        self.timer = RecycleTimer(interval, 0.0)
        self.timer.start(0.0)
        self.triggers = Triggers(self.timer, ErrorBackoff(10.0), Patience(grace_s=5.0, runtime_s=60.0))

    def wanted(self, now: float, facts: Facts, *, state: State = State.ERROR, age: float = 0.0, memory: Memory = WARM):
        self.triggers.notice(facts)
        reason = self.triggers.wanted(state, age, facts, memory, now)
        assert self.triggers.wanted(state, age, facts, memory, now) == reason  # asking changes nothing
        if reason is not None:
            self.triggers.began(now, reason, facts)
        return reason


IN_ERROR = replace(GOOD, runtime=replace(RUNTIME, ready=False, state="in-error"))
UNFIT = replace(GOOD, gpu=replace(GPU, fit=False))


def test_a_healthy_node_wants_nothing() -> None:
    assert Clock().wanted(1.0, GOOD, state=State.AVAILABLE) is None


def test_the_timer_wins_over_everything_but_a_stale_runtime() -> None:
    clock = Clock()
    assert clock.wanted(1000.0, IN_ERROR) == triggers.TIMER
    assert clock.wanted(1000.0, GOOD, state=State.MAINTENANCE) is None
    assert clock.wanted(1000.0, replace(GOOD, runtime=None)) is None
    assert clock.wanted(1000.0, GOOD, state=State.AVAILABLE, memory=replace(WARM, stale_instance="a")) is None


def test_a_runtime_in_error_goes_at_once_and_then_with_pauses() -> None:
    clock = Clock()
    assert clock.wanted(1.0, IN_ERROR) == triggers.ERROR
    assert clock.wanted(2.0, IN_ERROR) is None
    assert clock.wanted(11.0, IN_ERROR) == triggers.ERROR
    assert clock.wanted(21.0, IN_ERROR) is None
    assert clock.wanted(31.0, IN_ERROR) == triggers.ERROR


def test_a_failed_canary_has_its_grace() -> None:
    clock = Clock()
    failed = replace(IN_ERROR, runtime=replace(IN_ERROR.runtime, may_heal=True))
    assert clock.wanted(1.0, failed, age=4.9) is None
    assert clock.wanted(1.0, failed, age=5.0) == triggers.ERROR


def test_unfit_hardware_is_worth_one_recycle_after_the_grace() -> None:
    clock = Clock()
    assert clock.wanted(1.0, UNFIT, age=4.9) is None
    assert clock.wanted(1.0, UNFIT, age=5.0) == triggers.ERROR
    assert clock.wanted(500.0, UNFIT, age=400.0) is None
    clock.wanted(501.0, GOOD)
    assert clock.wanted(502.0, UNFIT, age=6.0) == triggers.ERROR


def test_advice_is_taken_once_by_whichever_recycle_begins() -> None:
    advised = replace(GOOD, gpu=replace(GPU, advises_recycle=True))
    clock = Clock()
    assert clock.triggers.wanted(State.AVAILABLE, 0.0, advised, WARM, 1.0) == triggers.ERROR  # and nothing came of it
    assert clock.wanted(2.0, advised, state=State.AVAILABLE) == triggers.ERROR
    assert clock.wanted(100.0, advised, state=State.AVAILABLE) is None
    clock.wanted(101.0, GOOD, state=State.AVAILABLE)
    assert clock.wanted(1000.0, advised, state=State.AVAILABLE) == triggers.TIMER
    clock.timer.start(1000.0)
    assert clock.wanted(1001.0, advised, state=State.AVAILABLE) is None


@pytest.mark.parametrize("lost", ["gpu", "owner"])
def test_a_peer_that_is_gone_is_no_reason(lost: str) -> None:
    facts = replace(GOOD, **{lost: None})
    clock = Clock()
    assert [clock.wanted(now, facts, age=now) for now in (1.0, 100.0, 900.0)] == [None, None, None]


def test_a_runtime_that_does_not_come_up_is_tried_again() -> None:
    clock = Clock()
    slow = replace(GOOD, runtime=replace(RUNTIME, ready=False, state="initializing"))
    assert clock.wanted(1.0, slow, age=59.0) is None
    assert clock.wanted(2.0, slow, age=60.0) == triggers.ERROR


def test_a_recycle_that_failed_is_tried_again_after_a_pause() -> None:
    clock = Clock()
    stale = replace(WARM, stale_instance="a")
    clock.triggers.failed(0.0)
    assert clock.wanted(9.0, GOOD, memory=stale) is None
    assert clock.wanted(10.0, GOOD, memory=stale) == triggers.ERROR


def test_another_owner_is_a_reason_once_it_is_ready() -> None:
    clock = Clock()
    memory = replace(WARM, owner_changed=True)
    loading = replace(GOOD, owner=replace(OWNER, state="loading"))
    assert clock.wanted(1.0, loading, state=State.AVAILABLE, memory=memory) is None
    assert clock.wanted(2.0, GOOD, state=State.AVAILABLE, memory=memory) == triggers.OWNER
    assert clock.wanted(3.0, GOOD, state=State.AVAILABLE, memory=memory) is None


@given(st.lists(st.tuples(states, st.floats(0, 100), facts_strategy, memories), max_size=40))
def test_error_recycles_never_come_closer_than_the_first_pause(steps: list) -> None:
    clock = Clock(interval=1e9)
    last = None
    for now, (state, age, facts, memory) in enumerate(steps):
        reason = clock.wanted(float(now), facts, state=state, age=age, memory=memory)
        if reason is None:
            continue
        assert facts.runtime is not None
        assert state not in {State.DRAINING, State.RECYCLING, State.MAINTENANCE}
        assert last is None or now - last >= 10
        last = now
