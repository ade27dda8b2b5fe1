"""How the programs of a node end when they cannot go on."""

import json
import subprocess
import sys

import pytest

from tie.daemon.errors import ConfigError, TieError
from tie.daemon.service import refuse
from tie.daemon.socket_path import SocketInUseError


@pytest.mark.parametrize(
    ("error", "code", "says", "logged"),
    [
        (ConfigError("wrong", hint="mend it"), 78, ["x: wrong", "x: mend it"], False),
        (ConfigError("wrong"), 78, ["x: wrong"], False),
        (SocketInUseError("taken"), 1, ["x: taken"], True),
        (TieError("other"), 1, ["x: other"], True),
        (ValueError("what a request said"), 1, [], True),
    ],
)
def test_a_program_that_cannot_go_on_says_why(capfd, error, code, says, logged) -> None:
    with pytest.raises(SystemExit) as ended:
        refuse("x", error)
    lines = capfd.readouterr().err.splitlines()
    events = [json.loads(line) for line in lines if line.startswith("{")]
    assert ended.value.code == code
    assert [line for line in lines if not line.startswith("{")] == says
    named = [(event["event"], event["daemon"], event["error_type"]) for event in events]
    assert named == ([("daemon.failed", "x", type(error).__name__)] if logged else [])


def keys(*arguments) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "tie.cloudboard.make_keys", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_maker_of_keys_has_a_version() -> None:
    done = keys("--version")
    assert (done.returncode, done.stdout.split()[0]) == (0, "tie-keys")


def test_the_maker_of_keys_logs_what_nobody_expected(tmp_path) -> None:
    config = tmp_path / "node.toml"
    config.write_text('run_dir = "/no\\u0000path"\n')
    done = keys("--config", config)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert json.loads(line)["event"] == "daemon.failed"
    missing = keys("--config", tmp_path / "none.toml")
    assert (missing.returncode, "daemon.failed" in missing.stderr) == (78, False)
