"""What the controller decides over a node's life, and what it tells of it."""

from dataclasses import replace

import pytest

from controller_facts import facts, runtime
from controllerd.controller import summary
from controllerd.facts import Facts
from controllerd.happening import Happening
from controllerd.mind import EndOwner, Mind, Warm
from controllerd.recycle import Tell
from controllerd.states import State
from tie.daemon.config import ControllerConfig


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
