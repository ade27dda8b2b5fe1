"""The simulations in their short form; their long form is for a machine with time (see each script)."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def run(script: str, *arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, HERE / script, *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_every_invariant_holds_over_random_events() -> None:
    assert "every invariant held" in run("model_check.py", "--steps", "40000", "--seed", "16")
    assert "every invariant held" in run("model_check.py", "--steps", "40000")  # another seed each time: it is printed


def test_a_fleet_that_booted_together_does_not_recycle_together() -> None:
    said = run("fleet.py", "--days", "3", "--controllers", "2")
    assert "times the mean" in said
