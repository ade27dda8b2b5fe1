"""The table of replies is complete, fixed text, and described."""

import json
from pathlib import Path

from tie.cloudboard.replies import JOB_CODES, REPLIES, body
from tie.device import errors
from tie.proto import envelope_pb2


def test_every_job_status_has_a_reply() -> None:
    others = {envelope_pb2.JOB_UNSPECIFIED, envelope_pb2.JOB_OK}
    assert set(JOB_CODES) == set(envelope_pb2.JobStatus.values()) - others
    assert set(JOB_CODES.values()) <= set(REPLIES)


def test_bodies_are_json() -> None:
    for code, reply in REPLIES.items():
        assert json.loads(body(code)) == {"error": code, "message": reply.message}
        assert 400 <= reply.status < 600


def test_the_client_knows_every_code() -> None:
    unknown = str(errors.from_code("something else"))
    for code in set(REPLIES) - {"not_found", "bad_method"}:
        assert str(errors.from_code(code)) != unknown, code


def test_every_code_is_documented() -> None:
    text = (Path(__file__).parents[3] / "docs" / "envelope.md").read_text()
    for code, reply in REPLIES.items():
        assert f"| {reply.status} | `{code}` |" in text, code
