"""The command line as a user meets it: quick help, clear errors, the right exit codes."""

import json
import os
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from tie.cli import control, exits, main, operate
from tie.cli.chat import chat
from tie.cli.doctor import doctor
from tie.daemon.errors import (
    BundleError,
    ConfigError,
    PeerDiedError,
    PeerError,
    PeerTimeoutError,
    RefusedError,
    TieError,
    UserError,
)
from tie.device.errors import (
    EnvelopeRefusedError,
    NodeBusyError,
    NodeFailedError,
    RequestRefusedError,
    UnreachableError,
)
from tie.envelope.errors import EnvelopeError
from tie.envelope.statement import StatementError
from tie.proto import control_pb2

COMMANDS = tuple(main._COMMANDS)


def tie(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "tie.cli.main", *arguments],
        capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL,
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **environment},
    )  # fmt: skip


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_help_names_every_command_and_loads_none():
    program = (
        "import sys, tie.cli.main as m\n"
        "assert m.tie.main(['--help'], standalone_mode=False) == 0\n"
        "print([name for name in ('grpc', 'rich', 'torch', 'numpy', 'httpx') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert all(f"  {command} " in done.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command):
    done = tie(command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: ")


def test_an_unknown_command_is_a_usage_error():
    assert tie("frobnicate").returncode == 2


@pytest.mark.parametrize(
    "command", [["status"], ["events"], ["gpu"], ["recycle"], ["maintenance", "on"], ["metrics"], ["proxy"]]
)
def test_without_a_node_the_operators_commands_say_so(command, tmp_path):
    done = tie(*command, TIE_RUN_DIR=str(tmp_path))
    assert done.returncode == 78
    assert "no node runs in" in done.stderr
    assert "tie up" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_node_whose_port_is_taken_is_refused_and_leaves_nothing(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = tie("up", "--run-dir", str(tmp_path / "run"), "--port", port, TIE_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 78
    assert f"127.0.0.1:{port} is in use" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_watched_status_comes_through_a_pipe_as_it_changes(monkeypatch):
    async def watch(request, timeout):
        for state in (control_pb2.STATE_INITIALIZING, control_pb2.STATE_AVAILABLE):
            yield control_pb2.NodeStatus(node_id="node-7", state=state)

    @asynccontextmanager
    async def connected(run_dir):
        yield SimpleNamespace(node=SimpleNamespace(Watch=watch))

    monkeypatch.setattr(control, "connected", connected)
    done = CliRunner().invoke(operate.status, ["--watch"], standalone_mode=False)
    assert (done.exception, done.return_value) == (None, 0)
    first, _, second = done.output.partition("available")
    assert "initializing" in first
    assert "node-7" in first
    assert "initializing" not in second


def test_chat_without_a_node_says_so(tmp_path):
    done = tie("chat", "Hello", TIE_RUN_DIR=str(tmp_path))
    assert done.returncode == 78
    assert "no node runs in" in done.stderr


def test_chat_with_nobody_listening_is_unavailable(tmp_path):
    key = tmp_path / "statement.pub"
    key.write_bytes(bytes(32))
    done = tie("chat", "--url", "http://127.0.0.1:9", "--statement-key", str(key), "--model", "m", "Hello")
    assert done.returncode == 69
    assert "tie up" in done.stderr
    assert "Traceback" not in done.stderr


def test_chat_with_nothing_to_ask_says_so(tmp_path):
    key = tmp_path / "statement.pub"
    key.write_bytes(bytes(32))
    options = ["--url", "http://127.0.0.1:9", "--statement-key", str(key), "--model", "m"]
    result = CliRunner().invoke(chat, options, input="  \n", standalone_mode=False)
    assert "nothing to ask" in result.output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--max-tokens", "99999999999", "Hello"], "does not fit"),
        (["--seed", "-1", "Hello"], "does not fit"),
        (["caf\udce9"], "not text"),
        (["--stop", "\udcff", "Hello"], "not text"),
    ],
)
def test_chat_says_what_no_request_can_hold(tmp_path, arguments, complaint):
    key = tmp_path / "statement.pub"
    key.write_bytes(bytes(32))
    done = tie("chat", "--url", "http://127.0.0.1:9", "--statement-key", str(key), "--model", "m", *arguments)
    assert done.returncode == 65
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_chat_takes_no_bytes_that_are_no_text(tmp_path, locale):
    key = tmp_path / "statement.pub"
    key.write_bytes(bytes(32))
    command = [sys.executable, "-m", "tie.cli.main", "chat", "--url", "http://127.0.0.1:9", "--model", "m"]
    done = subprocess.run(
        [*command, "--statement-key", str(key)], input=b"caf\xe9 \xff", env={**os.environ, "LC_ALL": locale},
        capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 65
    assert b"not text" in done.stderr
    assert b"Traceback" not in done.stderr


def test_a_run_directory_that_no_path_can_be_is_named():
    done = tie("status", "--run-dir", "/tmp/" + "x" * 300)
    assert done.returncode == 78
    assert "File name too long" in done.stderr
    assert "--run-dir" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NodeBusyError("x"), 75),
        (RequestRefusedError("x", status="s"), 65),
        (EnvelopeRefusedError("x", code="c"), 76),
        (StatementError("x"), 76),
        (EnvelopeError(), 76),
        (UnreachableError("x"), 69),
        (PeerTimeoutError("x"), 69),
        (NodeFailedError("x", status="s"), 70),
        (PeerDiedError("x"), 70),
        (PeerError("x"), 76),
        (ConfigError("x"), 78),
        (BundleError("x"), 78),
        (RefusedError("x"), 1),
        (UserError("x"), 65),
        (TieError("x"), 1),
    ],
)
def test_scripts_can_tell_errors_apart(error, code):
    assert exits.exit_code(error) == code


def test_every_exit_code_is_told_in_the_help_and_in_the_readme():
    readme = (Path(main.__file__).parents[2] / "README.md").read_text()
    help_text = " ".join(tie("--help").stdout.split())
    for code, meaning in exits.MEANINGS.items():
        assert f"| {code} | {meaning} |" in readme
        assert f" {code} {meaning} " in f" {help_text} "


def test_a_controller_that_nobody_hears_of_is_unavailable(tmp_path):
    (tmp_path / "node.toml").write_text(f'run_dir = "{tmp_path}"\n')
    done = tie("events", "--run-dir", str(tmp_path))
    assert done.returncode == 69
    assert "no controller answers" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--set", "controller.nope=1"], "controller.nope"),
        (["--set", "controller.heartbeat_s=-1"], "heartbeat_s"),
        (["--config", "bad.toml"], "bad.toml"),
        (["--bundle", "none"], "no model bundle"),
    ],
)
def test_a_configuration_that_cannot_be_has_one_exit_code(tmp_path, arguments, complaint):
    (tmp_path / "bad.toml").write_text("no toml at all")
    arguments = [str(tmp_path / each) if each in {"bad.toml", "none"} else each for each in arguments]
    done = tie("up", "--run-dir", str(tmp_path / "run"), "--port", str(free_port()), *arguments)
    assert done.returncode == 78
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "error",
    [
        UnreachableError("x"),
        UnreachableError("x", sent=True),
        PeerTimeoutError("x"),
        NodeFailedError("x", status="s"),
        PeerDiedError("x"),
    ],
)
def test_an_error_that_a_chat_ends_with_says_what_to_do(error, tmp_path, monkeypatch, capsys):
    (tmp_path / "statement.pub").write_bytes(bytes(32))

    def fail(*_, **__):
        raise error

    monkeypatch.setattr("tie.cli.asking.ask", fail)
    options = ["--url", "http://127.0.0.1:9", "--statement-key", str(tmp_path / "statement.pub"), "--model", "m", "Hi"]
    assert chat.main(options, standalone_mode=False) == exits.exit_code(error)
    message, hint = capsys.readouterr().err.splitlines()
    assert message == "tie: x"
    assert "`" in hint or "(" in hint


@pytest.mark.parametrize("temperature", ["9", "-1", "hot"])
def test_a_temperature_that_cannot_be_is_a_usage_error(temperature):
    done = tie("chat", "--temperature", temperature, "Hello")
    assert done.returncode == 2
    assert "--temperature" in done.stderr


def test_an_id_that_cannot_be_is_told_before_anything_is_read(tmp_path):
    done = tie("assets", "create", str(tmp_path), str(tmp_path / "bundle"), "--model", "a model")
    assert done.returncode == 2
    assert "letters, digits" in done.stderr


def test_a_folder_that_is_no_bundle_is_told_from_one_that_is_not_there(tmp_path):
    assert "no manifest.json in it" in tie("assets", "show", str(tmp_path)).stderr
    assert "No such file" in tie("assets", "show", str(tmp_path / "none")).stderr


def test_a_missing_package_is_named():
    # In a process of its own: here grpc has been imported long ago.
    program = "import sys; sys.modules['grpc'] = None; from tie.cli import main; main.main(['status'])"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 78
    assert "'grpc'" in ended.stderr


def test_an_expected_error_shows_its_hint(capsys):
    main.complain(UserError("it is broken", hint="mend it"))
    assert capsys.readouterr().err == "tie: it is broken\n     mend it\n"


def test_up_refuses_a_directory_that_is_open_to_all(tmp_path):
    tmp_path.chmod(0o777)
    done = tie("up", "--run-dir", str(tmp_path))
    assert done.returncode == 78
    assert "open to all" in done.stderr


def test_up_refuses_a_path_that_sockets_cannot_have(tmp_path):
    deep = tmp_path / ("x" * 100)
    done = tie("up", "--run-dir", str(deep), "--bundle", str(tmp_path / "none"))
    assert done.returncode == 78
    assert "none" in done.stderr or "too long" in done.stderr


def test_a_refused_up_leaves_no_directory_behind(tmp_path):
    (tmp_path / "no-bundle").mkdir()
    result = tie("up", "--run-dir", str(tmp_path / "new" / "run"), "--bundle", str(tmp_path / "no-bundle"))
    assert result.returncode == 78
    assert not (tmp_path / "new").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "kept").touch()
    assert tie("up", "--run-dir", str(tmp_path / "mine"), "--bundle", str(tmp_path / "no-bundle")).returncode == 78
    assert (tmp_path / "mine" / "kept").exists()


def test_up_takes_the_run_directory_of_its_configuration(tmp_path):
    chosen = tmp_path / "chosen"
    chosen.mkdir()
    chosen.chmod(0o777)  # so that it is refused, by name
    path = tmp_path / "node.toml"
    path.write_text(f'run_dir = "{chosen}"\n')
    done = tie("up", "--config", str(path))
    assert (done.returncode, str(chosen) in done.stderr) == (78, True)


def test_up_refuses_a_setting_that_does_not_exist(tmp_path):
    done = tie("up", "--run-dir", str(tmp_path), "--set", "runtime.colour=red")
    assert done.returncode == 78
    assert "runtime.colour" in done.stderr


def test_doctor_tells_people_and_programs(tmp_path):
    result = CliRunner().invoke(doctor, ["--run-dir", str(tmp_path), "--json"], standalone_mode=False)
    checks = json.loads(result.output)
    assert {"python", "numpy", "executor", "tritonserver", "memfd", "swap", "gpu"} <= {
        check["name"] for check in checks
    }
    assert all(check["hint"] for check in checks if check["level"] != "ok")
    assert result.return_value == any(check["level"] == "missing" for check in checks)
    assert "python" in CliRunner().invoke(doctor, ["--run-dir", str(tmp_path)], standalone_mode=False).output


def test_doctor_sees_a_long_run_directory_and_a_taken_port(tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        options = ["--run-dir", str(Path("/") / ("y" * 120)), "--port", port, "--json"]
        result = CliRunner().invoke(doctor, options, standalone_mode=False)
    missing = {check["name"] for check in json.loads(result.output) if check["level"] == "missing"}
    assert "ingress port" in missing
    assert "run directory" in missing
    assert result.return_value == 1
