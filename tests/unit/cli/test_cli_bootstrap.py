"""`./run`, as far as it can be tested without setting anything up."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tie.cli import bootstrap

RUN = Path(__file__).parents[3] / "run"


def run(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["/bin/sh", str(RUN), *arguments], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_help_and_unknown_commands():
    path = "/usr/local/bin:/usr/bin:/bin"
    python = shutil.which("python3.11") or shutil.which("python3.12") or ""
    helped = run("--help", PATH=path, TIE_PYTHON=python, HOME="/nonexistent")
    assert helped.returncode == 0
    assert all(word in helped.stdout for word in ("demo", "test", "tie", "setup", "lock"))
    assert run("bogus", PATH=path, TIE_PYTHON=python, HOME="/nonexistent").returncode == 2


def test_without_a_suitable_python_it_says_where_to_get_one(tmp_path):
    (tmp_path / "cat").symlink_to(shutil.which("cat") or "/bin/cat")
    done = run("demo", PATH=str(tmp_path))
    assert done.returncode == 1
    assert "apt-get install python3.11" in done.stderr


def test_a_missing_system_package_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr(bootstrap.os, "geteuid", lambda: 1000)
    with pytest.raises(bootstrap.SetupError, match=r"sudo apt-get install -y .* libpython3\.11"):
        bootstrap.install(["libpython3.11"])
    bootstrap.install([])


def test_the_environment_is_made_anew_when_the_lock_changes(monkeypatch, tmp_path):
    before = bootstrap.fingerprint()
    assert before == bootstrap.fingerprint()
    other = tmp_path / "requirements.lock"
    other.write_bytes(bootstrap.LOCK.read_bytes() + b"\n")
    monkeypatch.setattr(bootstrap, "LOCK", other)
    assert bootstrap.fingerprint() != before


def test_the_size_of_a_file_on_this_disk_is_known(tmp_path):
    wheel = tmp_path / "a b.whl"
    wheel.write_bytes(bytes(123))
    assert bootstrap.size_of(wheel.as_uri()) == (123, True)
    assert bootstrap.size_of((tmp_path / "none.whl").as_uri()) == (0, True)
    assert bootstrap.size_of("http://127.0.0.1:9/x.whl") == (0, False)


def a_checkout_at(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Lets bootstrap work on a checkout at `path`; returns where its programs will be."""
    programs = path / ".venv" / "bin"
    programs.mkdir(parents=True)
    monkeypatch.setattr(bootstrap, "ROOT", path)
    monkeypatch.setattr(bootstrap, "VENV", path / ".venv")
    monkeypatch.setattr(bootstrap, "PYTHON", programs / "python")
    monkeypatch.setattr(bootstrap, "STAMP", path / ".venv" / ".tie-setup")
    return programs


def test_two_runs_set_up_one_after_the_other(monkeypatch, tmp_path, capsys):
    programs = a_checkout_at(tmp_path, monkeypatch)
    monkeypatch.setattr(bootstrap, "fingerprint", lambda: "wanted")
    begun, done = threading.Event(), threading.Event()
    made = []

    def set_up_anew(wanted):
        made.append(wanted)
        begun.set()
        assert done.wait(30)
        bootstrap.PYTHON.touch()
        (programs / "tie").touch()
        bootstrap.STAMP.write_text(wanted)

    monkeypatch.setattr(bootstrap, "set_up_anew", set_up_anew)
    first, second = threading.Thread(target=bootstrap.set_up), threading.Thread(target=bootstrap.set_up)
    first.start()
    assert begun.wait(30)
    second.start()
    while "waiting" not in capsys.readouterr().out:
        assert second.is_alive()
        time.sleep(0.01)
    done.set()
    first.join(30)
    second.join(30)
    assert made == ["wanted"]


def test_nothing_is_ever_installed_into_the_machines_own_python(monkeypatch, tmp_path):
    # What an interrupted run can leave: an environment's `python` without the file that makes it one.
    programs = a_checkout_at(tmp_path, monkeypatch)
    (programs / "python").symlink_to(sys._base_executable)
    with pytest.raises(bootstrap.SetupError, match="virtualenv"):
        bootstrap.pip("install", "--dry-run", "--no-index", "nothing")
    bootstrap.make_venv()
    assert (tmp_path / ".venv" / "pyvenv.cfg").is_file()
    made = (tmp_path / ".venv" / "pyvenv.cfg").stat()
    bootstrap.make_venv()
    assert (tmp_path / ".venv" / "pyvenv.cfg").stat().st_ctime_ns == made.st_ctime_ns


def test_an_environment_without_its_programs_is_not_set_up(monkeypatch, tmp_path):
    programs = a_checkout_at(tmp_path, monkeypatch)
    for name in ("python", "tie"):
        assert not bootstrap.is_set_up("wanted")
        (programs / name).touch()
        bootstrap.STAMP.write_text("wanted")
    assert bootstrap.is_set_up("wanted")


def test_a_checkout_that_is_read_only_is_said_to_be_before_anything_is_done(monkeypatch, tmp_path, capsys):
    a_checkout_at(tmp_path, monkeypatch)
    monkeypatch.setattr(bootstrap, "fingerprint", lambda: "wanted")
    monkeypatch.setattr(bootstrap.os, "access", lambda path, _: path != tmp_path)
    monkeypatch.setattr(bootstrap.sys, "argv", ["run", "setup"])
    assert bootstrap.main() == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert f"Permission denied: '{tmp_path}'" in said.err
    assert "clone of your own" in said.err


@pytest.mark.parametrize("writable", [True, False])
def test_the_demo_model_is_kept_in_the_checkout_where_that_can_be_written(writable, monkeypatch, tmp_path):
    a_checkout_at(tmp_path, monkeypatch)
    monkeypatch.setenv("TIE_CACHE_DIR", "")
    monkeypatch.delenv("TIE_CACHE_DIR")
    monkeypatch.setattr(bootstrap.os, "access", lambda *_: writable)
    monkeypatch.setattr(bootstrap, "set_up", lambda: None)
    monkeypatch.setattr(bootstrap, "computes_without_torch", lambda: True)
    monkeypatch.setattr(bootstrap, "execute", lambda *_: None)
    monkeypatch.setattr(bootstrap.sys, "argv", ["run", "demo"])
    bootstrap.main()
    assert os.environ.get("TIE_CACHE_DIR") == (str(tmp_path / ".run") if writable else None)


def test_a_checkout_that_is_not_ours_is_said_to_be(monkeypatch, capsys):
    def is_set_up(wanted):
        raise PermissionError(13, "Permission denied", "/another/.venv/bin/python")

    monkeypatch.setattr(bootstrap, "is_set_up", is_set_up)
    monkeypatch.setattr(bootstrap.sys, "argv", ["run", "setup"])
    assert bootstrap.main() == 1
    said = capsys.readouterr().err
    assert "Permission denied: '/another/.venv/bin/python'" in said
    assert "clone of your own" in said


@pytest.fixture
def _interruptible():
    """Ctrl-C ends what a test starts, although it is ignored where the tests run in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a handler becomes the default in a new program
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
@pytest.mark.parametrize("arguments", [("--help",), ("demo", "--help")])
def test_ctrl_c_at_any_moment_of_the_start_is_quiet(arguments):
    """Whenever it comes: no traceback, and the exit code of an interrupted program."""
    if not bootstrap.is_set_up(bootstrap.fingerprint()):
        pytest.skip("needs a checkout that ./run has set up")
    environment = {**os.environ, "TIE_PYTHON": sys.executable}
    codes = []
    for step in range(24):
        command = ["/bin/sh", str(RUN), "tie", *arguments]
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        time.sleep(step * 0.03)  # any moment will do: what must hold, must hold at each
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
        assert "Traceback" not in said
        assert "KeyboardInterrupt" not in said
        codes.append(process.returncode)
    # 0: it was done before. The shell itself dies of the signal, and who started it calls that 130.
    assert set(codes) <= {130, -signal.SIGINT, 0}
    assert 130 in codes
