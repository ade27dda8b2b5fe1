"""What the controller decides, step by step: the recycle's phases, patience with flapping and with failing, memory."""

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controllerd.clock import Wakefulness
from controllerd.controller import summary
from controllerd.endurance import LONGEST_HOLD_S, SOON_S, Endurance
from controllerd.facts import Facts, Gpu, Owner, Runtime
from controllerd.happening import Happening
from controllerd.journal import KEPT, Journal, messages
from controllerd.mind import EndOwner, Mind, Warm
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


def told(story: Story, *kinds: str) -> list[tuple[str, str]]:
    return [(entry.kind, entry.code) for entry in story.told if entry.kind in kinds]


def test_an_operators_word_and_what_was_cut_are_told() -> None:
    story = Story()
    story.see(facts(runtime("a")))
    record = story.mind.request_recycle(story.now, "operator", 0.001, "kernel update, Ann")
    story.mind.request_recycle(story.now, "operator", None, "me too")
    story.see(facts(runtime("a"), busy=True, in_flight=2), 0.1)
    story.see(facts(runtime("a"), busy=True, in_flight=2), 0.1)
    story.mind.told(story.now, heard=True)
    story.see(facts(None, busy=True), 1.0)
    story.see(facts(runtime("b"), busy=True), 1.0)
    assert record.cut == 2
    told_so = {entry.kind: entry for entry in story.told}
    assert (told_so["recycle"].word, told_so["recycle"].seconds) == ("kernel update, Ann", 0.001)
    assert told_so["joined"].word == "me too"
    assert told_so["cut"].count == 2
    assert told_so["recycled"].seconds == pytest.approx(2.2)


def test_maintenance_for_another_bundle_is_told_as_that() -> None:
    story = Story()
    story.see(facts(runtime("a")))
    story.mind.set_maintenance(story.now, on=True, reason="asset")
    story.mind.set_maintenance(story.now, on=False, reason="asset")
    assert [entry.before for entry in story.told if entry.kind == "maintenance"] == ["asset", "asset"]
    assert told(story, "recycle") == [("recycle", "asset")]


def test_requests_under_way_are_told_when_the_node_is_lost() -> None:
    story = Story()
    story.see(facts(runtime("a"), in_flight=3))
    story.see(facts(None, in_flight=3), 1.0)
    assert story.told[-1].count == 3


def test_settling_is_told_once_for_each_time() -> None:
    story = Story()
    for _ in range(3):
        story.see(facts(runtime("a")), 10.0)
        story.see(facts(None), 1.0)
        for _ in range(8):
            story.see(facts(runtime("a")), 0.25)
    holds = [entry.seconds for entry in story.told if entry.kind == "settling"]
    assert holds == [1.0, 2.0, 4.0]


def test_what_a_runtime_says_is_told_when_it_changes_but_not_that_it_starts() -> None:
    story = Story()
    story.see(facts(replace(runtime("a", "initializing"), why=("engine-starting",))))
    for _ in range(3):
        story.see(facts(replace(runtime("a", "initializing"), why=("no-cuda",))), 1.0)
    story.see(facts(replace(runtime("a", "in-error"), why=("start-timeout",))), 1.0)
    assert told(story, "runtime") == [("runtime", "seen"), ("runtime", "starting"), ("runtime", "in-error")]


# ---- the journal ----


def test_a_journal_is_read_again(tmp_path: Path) -> None:
    clock = iter(range(10, 1000)).__next__
    journal = Journal(tmp_path / "events.json", clock, "boot")
    journal.add(Happening("state", "ready", "initializing", "available"))
    journal.add(Happening("given-up", "away-too-long", more=("runtime-gone",) * 50))
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


def test_what_happens_again_and_again_is_one_entry_that_counts(tmp_path: Path) -> None:
    clock = iter(range(1, 1000)).__next__
    journal = Journal(tmp_path / "events.json", clock, "boot")
    journal.add(Happening("state", "runtime-gone", "available", "error"))
    for number in range(20):
        journal.add(Happening("peer", "connected", after="probe"))
        journal.add(Happening("runtime", "seen", str(number), str(number + 1)))
        journal.add(Happening("peer", "gone", after="probe"))
        journal.add(Happening("peer", "gone", after="owner") if number == 3 else Happening("gpu", "xid-79"))
    seen = [(entry.kind, entry.code, entry.after, entry.times) for entry in journal.entries]
    assert seen == [
        ("state", "runtime-gone", "error", 1), ("peer", "gone", "owner", 1), ("peer", "connected", "probe", 20),
        ("runtime", "seen", "20", 20), ("peer", "gone", "probe", 20), ("gpu", "xid-79", "", 19),
    ]  # fmt: skip
    journal.add(Happening("state", "ready", "error", "available"))
    journal.add(Happening("peer", "gone", after="probe"))
    assert journal.entries[-1].times == 1
    (last,) = messages([journal.entries[2]], 500.0).happenings
    assert last.times == 20
    assert last.first_wall_s <= last.wall_s


def test_a_journal_that_could_not_be_kept_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.json"
    journal = Journal(path, lambda: 1.0, "boot")
    journal.add(Happening("recycle", "operator"))
    assert not Journal(path, lambda: 2.0, "boot").gap
    with monkeypatch.context() as full:
        full.setattr(os, "open", full_for_files(os.open))
        journal.add(Happening("recycle", "timer"))
    again = Journal(path, lambda: 2.0, "boot")
    assert (again.gap, again.recycles) == (True, {"operator": 1})
    again.add(Happening("journal", "gap"))
    assert not Journal(path, lambda: 2.0, "boot").gap


def full_for_files(really: Callable[..., int]) -> Callable[..., int]:
    """A disk with room for names, and for nothing in them."""

    def call(path: Path, *arguments: int) -> int:
        if path.suffix == ".new":
            raise OSError(errno.ENOSPC, "full")
        return really(path, *arguments)

    return call


# ---- the controller's own sleep ----


def test_a_process_that_stood_still_knows_it() -> None:
    now = [100.0]
    wake = Wakefulness(lambda: now[0])
    for _ in range(8):
        now[0] += 0.25
        assert not wake.excuses(5.0)
    assert wake.take() == 0.0
    now[0] += 10.0
    assert wake.excuses(5.0)
    assert (wake.take(), wake.take()) == (10.0, 0.0)
    for _ in range(20):
        now[0] += 0.25
        wake.look()
    assert not wake.excuses(5.0)


@given(
    st.binary(max_size=300)
    | st.just(b'{"boot":"b","entries":[{"at":1,"wall":1,"kind":"state","code":"x","after":"nowhere"}]}')
)
def test_any_bytes_are_a_journal_or_none(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("j") / "events.json"
    path.write_bytes(data)
    assert Journal(path, lambda: 10.0, "b").transitions() == []
