"""What the controller decides, step by step: the recycle's phases, patience with flapping and with failing, memory."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controllerd.controller import summary
from controllerd.endurance import LONGEST_HOLD_S, SOON_S, Endurance
from controllerd.facts import Facts, Gpu, Owner, Runtime
from controllerd.journal import KEPT, Journal
from controllerd.mind import EndOwner, Happening, Mind, Warm
from controllerd.recycle import Deadlines, Phase, Procedure, RecycleRecord, Tell
from controllerd.states import State
from tie.daemon.config import ControllerConfig

GPU = Gpu(fit=True, fresh=True, advises_recycle=False)
OWNER = Owner("o", 1, "ready")
DEADLINES = Deadlines(busy_ack_s=5.0, drain_s=30.0, fresh_s=60.0)


def runtime(name: str, state: str = "ready", *, warmed: bool = True) -> Runtime:
    return Runtime(name, state == "ready", state, True, warmed, "m", "r", 0, 1.0, 1)


def facts(
    present: Runtime | None = None, *, cloudboard: bool = True, busy: bool = False, in_flight: int = 0, gpu: Gpu = GPU
) -> Facts:
    return Facts(present, gpu, OWNER, cloudboard, busy_acknowledged=busy, in_flight=in_flight)


# ---- the phases of a recycle ----


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


# ---- patience ----


def test_a_node_that_flaps_returns_later_each_time() -> None:
    endurance, now, waited = Endurance(4, 1e9), 0.0, []
    for _ in range(8):
        endurance.steady(now, ready=True)
        began = now
        while not endurance.steady(now, ready=True):
            now += 0.5
        waited.append(now - began)
        endurance.available(now)
        now += 1.0
        endurance.lost(now)
    assert waited == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, LONGEST_HOLD_S]


def test_a_loss_after_long_peace_is_forgiven_at_once() -> None:
    endurance = Endurance(4, 1e9)
    for now in (0.0, 1.0, 3.0):
        endurance.available(now)
        endurance.lost(now + 0.5)
    endurance.available(10.0)
    endurance.lost(10.0 + SOON_S)
    assert endurance.steady(75.0, ready=True)


def test_a_withdrawal_after_long_peace_is_not_paid_for_earlier_losses() -> None:
    endurance = Endurance(4, 1e9)
    for now in (0.0, 1.0, 3.0):
        endurance.available(now)
        endurance.lost(now + 0.5)
    endurance.available(10.0)
    assert not endurance.watch(10.0 + SOON_S, available=True, excused=False)
    endurance.withdrawn()
    assert not endurance.steady(1010.0, ready=False)
    assert endurance.steady(1020.0, ready=True)


def test_gates_that_hold_by_fits_and_starts_do_not_hold() -> None:
    endurance = Endurance(4, 1e9)
    for now in (0.0, 10.0):
        endurance.available(now)
        endurance.lost(now + 1)
    held = [endurance.steady(20.0 + 0.5 * look, ready=look % 2 == 0) for look in range(20)]
    assert not any(held)


def test_the_ladder() -> None:
    endurance = Endurance(2, 1e9)
    steps = []
    for _ in range(6):
        due = endurance.exhausted()
        if due:
            steps.append(endurance.climb())
        endurance.tried()
        if due and steps == ["owner", "owner"]:  # the first time it did not hear
            endurance.owner_asked()
    assert steps == ["owner", "owner", "give-up"]
    assert endurance.given_up
    endurance.begin_anew()
    assert not endurance.given_up
    assert not endurance.exhausted()


def test_a_node_that_stays_away_gives_up_once() -> None:
    endurance = Endurance(4, 100.0)
    said = [endurance.watch(float(now), available=False, excused=now < 50) for now in range(300)]
    assert [now for now, gave_up in enumerate(said) if gave_up] == [150]
    endurance.available(300.0)
    endurance.watch(300.0 + SOON_S, available=True, excused=False)
    assert not endurance.given_up


# ---- the whole ----


class Story:
    """A mind, its clock, and what it told."""

    def __init__(self, **settings: float) -> None:
        self.told: list[Happening] = []
        self.now = 1000.0
        defaults = {
            "recycle_jitter": 0.0,
            "error_grace_s": 1.0,
            "error_backoff_s": 10.0,
            "fresh_runtime_deadline_s": 20.0,
        }
        self.mind = Mind(ControllerConfig(**{**defaults, **settings}), self.now, self.told.append)  # type: ignore[arg-type]
        self.commands: list = []

    def see(self, seen: Facts, seconds: float = 0.0) -> list:
        self.now += seconds
        fresh: list = []
        while True:
            before = self.mind.state
            fresh += self.mind.look(self.now, seen)
            if self.mind.state is before:
                self.commands += fresh
                return fresh


def test_a_life() -> None:
    story = Story()
    assert story.see(facts(runtime("a", warmed=False))) == [Warm("a")]
    assert story.mind.state is State.INITIALIZING
    story.mind.warmed("a", done=True)
    story.see(facts(runtime("a", warmed=False)))
    assert story.mind.state is State.AVAILABLE
    story.see(facts(runtime("a")), 3600.0)
    assert (story.mind.state, story.mind.recycles) == (State.DRAINING, {"timer": 1})
    assert story.see(facts(runtime("a"), busy=True), 0.1) == [Tell("timer", 30.0)]
    story.mind.told(story.now, heard=True)
    story.see(facts(None, busy=True), 1.0)
    assert story.mind.state is State.RECYCLING
    story.see(facts(runtime("b"), busy=True), 3.0)
    assert story.mind.state is State.AVAILABLE
    assert [(entry.before, entry.after) for entry in story.told if entry.kind == "state"] == [
        ("initializing", "available"), ("available", "draining"), ("draining", "recycling"), ("recycling", "available"),
    ]  # fmt: skip


def test_a_runtime_that_always_fails_ends_in_giving_up_and_an_operator_begins_anew() -> None:
    story = Story(error_attempts=2)
    names = iter(range(1000))
    bad = runtime(f"r{next(names)}", "in-error")
    asked = 0
    for _ in range(2000):
        commands = story.see(facts(bad, busy=True), 1.0)
        if EndOwner() in commands:
            asked += 1
            story.mind.owner_asked(heard=asked == 3)
        if any(isinstance(command, Tell) for command in commands):
            story.mind.told(story.now, heard=True)
            bad = runtime(f"r{next(names)}", "in-error")
    kinds = [(entry.kind, entry.code) for entry in story.told if entry.kind in {"recycle", "owner", "given-up"}]
    assert kinds == [
        *[("recycle", "error")] * 5, ("owner", "asked-to-end"), ("recycle", "error"),
        ("given-up", "recycles-in-vain"),
    ]  # fmt: skip
    assert asked == 3
    assert story.mind.reasons == ("runtime-in-error", "given-up")
    record = story.mind.request_recycle(story.now, "operator")
    assert "given-up" not in story.mind.reasons
    story.see(facts(bad, busy=True), 1.0)
    story.mind.told(story.now, heard=True)
    story.see(facts(runtime("good"), busy=True), 1.0)
    assert (story.mind.state, record.error) == (State.AVAILABLE, "")


def test_maintenance_suspends_the_timer() -> None:
    story = Story()
    story.see(facts(runtime("a")))
    story.mind.set_maintenance(story.now, on=True)
    story.see(facts(runtime("a"), busy=True), 1.0)
    story.mind.told(story.now, heard=True)
    story.see(facts(runtime("b"), busy=True), 1.0)
    assert story.mind.state is State.MAINTENANCE
    for _ in range(100):
        story.see(facts(runtime("b"), busy=True), 3600.0)
    assert story.mind.recycles == {"maintenance": 1}
    assert not story.mind.endurance.given_up


def test_load_does_not_starve_the_timer() -> None:
    story = Story()
    story.see(facts(runtime("a"), in_flight=8))
    story.see(facts(runtime("a"), in_flight=8), 3600.0)
    assert story.mind.state is State.DRAINING
    story.see(facts(runtime("a"), busy=True, in_flight=8), 1.0)
    assert Tell("timer", 0.001) in story.see(facts(runtime("a"), busy=True, in_flight=8), 30.0)


def test_a_summary_is_whole_reasons_and_not_too_long() -> None:
    assert summary(()) == ""
    assert summary(("gpu-unavailable", "xid-79")) == "gpu-unavailable,xid-79"
    assert summary(("a" * 64,) * 9) == ",".join(["a" * 64] * 7)


# ---- the journal ----


def test_a_journal_is_read_again(tmp_path: Path) -> None:
    clock = iter(range(10, 1000)).__next__
    journal = Journal(tmp_path / "events.json", clock, "boot")
    journal.add(Happening("state", "ready", "initializing", "available"))
    journal.add(Happening("given-up", "away-too-long", more=("probe-gone",) * 50))
    journal.add(Happening("runtime", "seen", "a" * 128, "b" * 128))
    again = Journal(tmp_path / "events.json", lambda: 500.0, "boot")
    assert list(again.entries) == list(journal.entries)
    assert [entry.after for entry in again.transitions()] == ["available"]
    assert list(Journal(tmp_path / "events.json", lambda: 5.0, "boot").entries) == []  # of the future
    assert list(Journal(tmp_path / "events.json", lambda: 500.0, "later boot").entries) == []  # another clock


def test_a_journal_has_an_end(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "events.json", lambda: 1.0)
    for number in range(KEPT + 10):
        journal.add(Happening("peer", f"p{number}"))
    assert Journal(tmp_path / "events.json", lambda: 2.0).entries[0].code == "p10"


def test_a_journal_without_a_disk_remembers_while_it_runs(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "none" / "events.json", lambda: 1.0)
    journal.add(Happening("peer", "gone"))
    assert len(journal.entries) == 1


@given(
    st.binary(max_size=300)
    | st.just(b'{"boot":"b","entries":[{"at":1,"wall":1,"kind":"state","code":"x","after":"nowhere"}]}')
)
def test_any_bytes_are_a_journal_or_none(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("j") / "events.json"
    path.write_bytes(data)
    assert Journal(path, lambda: 10.0, "b").transitions() == []
