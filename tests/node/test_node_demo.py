"""The demonstration that a newcomer runs first."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tie.cli.evidence import own_view
from tie.cli.own_folder import OwnFolder

pytestmark = pytest.mark.node


def test_the_demonstration_shows_what_it_promises_and_leaves_nothing_running(bundle):
    command = [sys.executable, "-m", "tie.cli.main", "demo", "--bundle", str(bundle)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("✓") == 6
    assert "✗" not in done.stdout
    assert "opened 0 times, read 0 times" in done.stdout
    assert "tokens/s" in done.stdout
    assert "all processes have ended" in done.stdout


def test_a_demonstration_that_cannot_start_says_why(tmp_path):
    command = [sys.executable, "-m", "tie.cli.main", "demo", "--bundle", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 78
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_outlives_a_demonstration_that_is_ended(bundle, number):
    # A shell starts background jobs with SIGINT ignored, and everything below them inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    command = [sys.executable, "-m", "tie.cli.main", "demo", "--bundle", str(bundle)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as demo:
        top = psutil.Process(demo.pid)
        node: set[psutil.Process] = set()
        deadline = time.monotonic() + 120
        while len(node) < 5 and time.monotonic() < deadline:  # `tie up`, and some of its daemons
            node.update(top.children(recursive=True))
            time.sleep(0.05)
        assert len(node) >= 5
        (up,) = [process.cmdline() for process in top.children() if "--run-dir" in process.cmdline()]
        folder = Path(up[up.index("--run-dir") + 1]).parent
        assert folder.exists()
        demo.send_signal(number)
        demo.wait(60)
    assert psutil.wait_procs(node, timeout=60)[1] == []
    assert demo.returncode == (-number if number == signal.SIGKILL else 130)
    # As the next demonstration does, where this one could not.
    OwnFolder(folder.parent, "tie-demo-").remove()
    with own_view(bundle):
        pass
    assert not folder.exists()
    assert not list(bundle.parent.glob(f".{bundle.name}-*"))
