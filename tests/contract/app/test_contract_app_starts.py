"""How an app starts: by whom, confined, and with which runtime; without one it says so and is never ready."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tie.proto import app_pb2

EXIT_CONFIG = 78


async def test_without_a_runtime_the_app_says_so_and_is_never_ready(node):
    job = await node.start()
    _, done = await job.outcome()
    assert done.status == app_pb2.STATUS_RUNTIME_UNAVAILABLE
    assert await job.exit_code() == 0


async def test_a_runtime_that_greets_but_does_not_answer_is_not_waited_for_long(node):
    node.configure(start_deadline_s=0.3)
    async with node.runtime.live() as runtime:
        node.config.sockets.triton.unlink()
        job = await node.start()
        _, done = await job.outcome()
        assert done.status == app_pb2.STATUS_RUNTIME_UNAVAILABLE
        assert runtime.streams == 0


async def test_a_runtime_of_another_release_would_speak_another_vocabulary(node):
    async with node.runtime.live() as runtime:
        runtime.hello.release = "other"
        job = await node.start()
        _, done = await job.outcome()
        assert done.status == app_pb2.STATUS_RUNTIME_UNAVAILABLE
        assert "app.other-release" in await job.log()


async def test_a_missing_bundle_is_told_and_logged(node):
    (node.directory / "node.toml").write_text(f'run_dir = "{node.directory}"\n[model]\nbundle = "/nonexistent"\n')
    async with node.runtime.live():
        job = await node.start()
        _, done = await job.outcome()
        assert done.status == app_pb2.STATUS_INTERNAL
        assert await job.exit_code() == 1
        assert "BundleError" in await job.log()


@pytest.mark.parametrize(
    ("environment", "says"),
    [({}, "connection"), ({"LISTEN_FDS": "1", "LISTEN_PID": "1"}, "connection")],
    ids=["not activated", "meant for another process"],
)
def test_started_by_hand_it_says_how_it_is_started(tmp_path, environment, says):
    app = Path(sysconfig.get_path("scripts")) / "tie-cloud-app"
    (tmp_path / "node.toml").write_text("")
    result = subprocess.run(
        [app, "--config", tmp_path / "node.toml"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert result.returncode == EXIT_CONFIG
    assert says in result.stderr


def test_it_has_help_and_a_version():
    app = Path(sysconfig.get_path("scripts")) / "tie-cloud-app"
    for option in ("--help", "--version"):
        result = subprocess.run([app, option], capture_output=True, text=True, timeout=20, check=True)
        assert "tie-cloud-app" in result.stdout


def test_the_process_confines_itself(tmp_path):
    # In a process of its own: limits cannot be raised again.
    code = (
        "import ctypes, resource; from tie.app import main; main._confine();"
        "print(resource.getrlimit(resource.RLIMIT_FSIZE), resource.getrlimit(resource.RLIMIT_CORE),"
        " ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))"  # PR_GET_DUMPABLE
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=True)
    assert result.stdout == "(0, 0) (0, 0) 0\n"
