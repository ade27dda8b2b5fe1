"""The demonstration that a newcomer runs first."""

import subprocess
import sys

import pytest

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
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
