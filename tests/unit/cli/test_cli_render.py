"""What people and programs read."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console as RichConsole

from tie.cli import console, render
from tie.proto import control_pb2, owner_pb2


def example() -> control_pb2.NodeStatus:
    status = control_pb2.NodeStatus(node_id="node-7", state=control_pb2.STATE_ERROR, reasons=["canary-timeout"])
    status.probe_peer.connected = True
    status.runtime.instance_id = "0123456789abcdef"
    status.runtime.last_canary.error = "timeout"
    status.runtime.prefix.state, status.runtime.prefix.blocks = "sealed", 33
    status.owner_peer.connected = True
    status.owner.state = owner_pb2.STATE_LOADING
    status.owner.progress_bytes = 25
    status.owner.progress_total = 100
    status.recycles = 2
    status.last_recycle_reason = "operator"
    event = status.events.add(to=control_pb2.STATE_ERROR, reason="canary-timeout")
    setattr(event, "from", control_pb2.STATE_AVAILABLE)
    return status


def drawn(status: control_pb2.NodeStatus) -> str:
    paper = RichConsole(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    with paper.file:
        paper.print(render.status_table(status))
        return paper.export_text()


def test_the_table_shows_what_is_wrong_and_where():
    text = drawn(example())
    for word in (
        "node-7",
        "error",
        "canary-timeout",
        "01234567",
        "25 %",
        "2 recycles",
        "33 blocks",
        "available → error",
    ):
        assert word in text
    assert text.count("not connected") == 2  # GPUs and CloudBoard


def test_the_table_has_words_for_codes_and_for_operators():
    status = example()
    status.keys, status.word = "silent", "disk swap, Ann"
    status.reasons[:] = ["settling", "keys-silent", "some-later-code"]
    status.notes.append("disk-full")
    status.store_peer.age_s = 3.0
    text = drawn(status)
    for word in (
        "all parts are well",
        "the key service (tie-kps) does not answer",
        "some later code",
        "make room there",
    ):
        assert word in text
    assert '"disk swap, Ann"' in text
    assert text.count("not connected") == 3  # the cache store as well


def test_a_recycle_under_way_has_not_taken_any_time_yet():
    status = example()
    status.state, status.recycles = control_pb2.STATE_DRAINING, 1
    assert "1 recycle, one (operator) under way" in drawn(status)
    status.state, status.last_recycle_s = control_pb2.STATE_AVAILABLE, 4.0
    assert "1 recycle, the last (operator) took 4.0 s" in drawn(status)


def test_an_empty_status_is_drawn_too():
    assert "unspecified" in drawn(control_pb2.NodeStatus())


def test_json_has_words_for_states_and_numbers_for_numbers():
    told = json.loads(json.dumps(render.as_dict(example())))
    assert told["state"] == "error"
    assert told["recycles"] == 2
    assert told["events"][0]["from"] == "available"
    assert told["owner"]["state"] == "loading"


def test_a_state_that_this_version_does_not_know_is_shown_as_its_number():
    assert render.state_word(77) == "77"


@pytest.mark.parametrize(("seconds", "text"), [(0.04, "0.0 s"), (12.3, "12 s"), (600, "10 min"), (9000, "2.5 h")])
def test_durations(seconds, text):
    assert render.duration(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (269_100_288, "269 MB"), (3.1e12, "3100 GB")])
def test_sizes(count, text):
    assert render.size(count) == text


@given(st.text(max_size=200))
def test_any_line_of_a_daemon_is_printed_safely(line):
    record = console.parse(line)
    text = console.readable(record) if record else console.printable(line)
    assert "\x1b" not in text
    assert "\n" not in text


def test_log_lines_for_people_and_for_programs(capsys):
    line = json.dumps({"t": 0.5, "event": "node.transition", "pid": 3, "to_state": "error"})
    console.Console(quiet=False, json_logs=False).log("tie-controllerd", line)
    console.Console(quiet=False, json_logs=True).log("tie-controllerd", "no json")
    console.Console(quiet=True, json_logs=False).log("tie-controllerd", line)
    people, programs = capsys.readouterr().err.splitlines()
    assert people.startswith("tie-controllerd")
    assert people.endswith("node.transition to_state=error")
    assert json.loads(programs) == {"unit": "tie-controllerd", "message": "no json"}


def test_a_terminal_that_has_left_ends_nothing(monkeypatch):
    def gone(*_: object, **__: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(console.click, "echo", gone)
    speaker = console.Console(quiet=False, json_logs=False)
    speaker.say("stopping")
    speaker.log("tie-kps", "a line")
