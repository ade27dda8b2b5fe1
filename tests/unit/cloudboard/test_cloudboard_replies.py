"""The table of replies is complete, fixed text, and described."""

import json
from pathlib import Path

from tie.cloudboard.replies import JOB_CODES, TEXTS, reply
from tie.device import errors
from tie.proto import envelope_pb2


def test_every_job_status_has_a_reply() -> None:
    others = {envelope_pb2.JOB_UNSPECIFIED, envelope_pb2.JOB_OK}
    assert set(JOB_CODES) == set(envelope_pb2.JobStatus.values()) - others
    assert set(JOB_CODES.values()) <= set(TEXTS)


def test_bodies_are_json() -> None:
    for code, text in TEXTS.items():
        assert json.loads(reply(code).body) == {"error": code, "message": text.message}
        assert 400 <= reply(code).status < 600


def test_the_client_knows_every_code() -> None:
    unknown = str(errors.from_code("something else"))
    for code in set(TEXTS) - {"not_found", "bad_method"}:
        assert str(errors.from_code(code)) != unknown, code


def test_every_code_is_documented() -> None:
    document = (Path(__file__).parents[3] / "docs" / "envelope.md").read_text()
    for code, text in TEXTS.items():
        assert f"| {text.status} | `{code}` |" in document, code
