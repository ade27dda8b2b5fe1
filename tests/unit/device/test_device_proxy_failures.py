"""What a request that failed at a node ends with: a status, a code, and whether it may be sent again."""

import json
from pathlib import Path

import pytest

from tie.daemon.errors import PeerTimeoutError, ProtocolError, TieError
from tie.device.errors import (
    EnvelopeRefusedError,
    NodeBusyError,
    NodeFailedError,
    TruncatedError,
    UnreachableError,
)
from tie.device.proxy.failures import fault, from_error
from tie.envelope.errors import EnvelopeError
from tie.envelope.statement import StatementError
from tie.http.reply import FAULTS


@pytest.mark.parametrize(
    ("error", "status", "code", "again"),
    [
        (NodeBusyError("x"), 429, "node_busy", True),
        (UnreachableError("x"), 503, "node_unreachable", True),
        (UnreachableError("x", sent=True), 503, "node_unreachable", False),
        (EnvelopeRefusedError("x", code="unknown_key"), 502, "envelope_refused", True),
        (EnvelopeRefusedError("x", code="refused"), 502, "envelope_refused", False),
        (EnvelopeRefusedError("x", code="replayed"), 502, "envelope_refused", False),
        (EnvelopeError(), 502, "node_not_trusted", False),
        (StatementError("x"), 502, "node_not_trusted", False),
        (ProtocolError("x"), 502, "bad_answer", False),
        (TruncatedError("x"), 502, "connection_lost", False),
        (PeerTimeoutError("x"), 504, "timeout", False),
        (NodeFailedError("x", status="STATUS_REPLACED"), 503, "node_restarted", False),
        (NodeFailedError("x", status="failed"), 500, "node_failed", False),
    ],
)
def test_a_failure_says_what_it_is_and_whether_to_try_again(
    error: TieError,
    status: int,
    code: str,
    again: bool,
) -> None:
    made = from_error(error, accepted=False)
    assert (made.status, made.code, made.retry) == (status, code, again)
    assert json.loads(made.body)["error"]["code"] == code
    assert from_error(error, accepted=True).retry is False


@pytest.mark.parametrize("code", FAULTS)
def test_what_the_http_server_says_by_itself_is_the_apis_json_and_documented(code: str) -> None:
    made = fault(code)
    assert (made.status, json.loads(made.body)["error"]["code"]) == (FAULTS[code].status, code)
    documented = (Path(__file__).parents[3] / "docs" / "proxy.md").read_text()
    assert [line for line in documented.splitlines() if line.startswith("| 4") and str(made.status) in line]
