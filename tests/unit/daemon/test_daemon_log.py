"""The log: static names, listed fields, one word a value; it never fails its caller for lack of a place to write."""

import io
import json
import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tie.daemon import frames, log
from tie.daemon.errors import ProtocolError
from tie.proto import app_pb2


def written(capsys) -> dict[str, object]:
    return json.loads(capsys.readouterr().err)


def test_an_event_is_one_json_line(capsys):
    log.event("runtime.ready", instance_id="ab-12", count=3, latency_s=0.25, socket="/run/tie/app/app.sock", code=None)
    line = written(capsys)
    assert line["event"] == "runtime.ready"
    assert (line["instance_id"], line["count"], line["latency_s"]) == ("ab-12", 3, 0.25)
    assert line["socket"] == "/run/tie/app/app.sock"
    assert line["code"] is None


@pytest.mark.parametrize("value", ["two words", "line\nbreak", "ä", '"', "x" * 161, math.nan, math.inf])
def test_a_value_that_could_be_text_is_replaced(capsys, value):
    log.event("app.done", reason=value)
    assert written(capsys)["reason"] == "?"


def test_a_value_of_another_type_is_replaced(capsys):
    log.event("app.done", reason=b"bytes")  # type: ignore[arg-type]
    assert written(capsys)["reason"] == "?"


@given(st.text())
def test_no_text_with_a_space_or_beyond_ascii_passes(value):
    stream = io.StringIO()
    before, sys.stderr = sys.stderr, stream
    try:
        log.event("app.done", reason=value)
    finally:
        sys.stderr = before
    reason = json.loads(stream.getvalue())["reason"]
    assert reason == "?" or (reason == value and reason.isascii() and not any(map(str.isspace, reason)))


def test_unknown_fields_and_dynamic_names_are_bugs():
    with pytest.raises(ValueError, match="allow-list"):
        log.event("app.done", prompt="hello")
    for name in ("app", "App.done", "app.done now", "app.d\u03bfne"):
        with pytest.raises(ValueError, match="names"):
            log.event(name)


def test_a_failure_names_type_and_place_and_never_the_message(capsys):
    with pytest.raises(ProtocolError) as caught:
        frames.parse(b"secret of the user", app_pb2.AppIn)
    log.failure("app.failed", caught.value, request_id="r1")
    text = capsys.readouterr().err
    line = json.loads(text)
    assert line["error_type"] == "ProtocolError"
    assert line["where"].startswith("frames.py:")
    assert "secret" not in text


class Full(io.StringIO):
    def write(self, _text: str) -> int:
        raise OSError(27, "File too large")


def test_a_log_without_room_costs_the_line_only(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Full())
    log.event("app.done")
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    log.event("app.done")
