"""What `tie doctor` says of GPUs."""

import pytest

from tie.cli import checks
from tie.cli.checks import Level

DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build\n"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """One GPU with its driver and all packages; tests take away."""
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidiactl").touch()
    (tmp_path / "version").write_text(DRIVER)
    monkeypatch.setattr(checks, "_DEVICES", tmp_path)
    monkeypatch.setattr(checks, "_GPU_DRIVER", tmp_path / "version")
    monkeypatch.setattr(checks, "_version", {"torch": "2.11.0", "flashinfer-python": "0.6.13"}.get)
    return tmp_path


def test_a_gpu_with_all_that_computes_on_it_is_fine(machine):
    found = checks.gpu()
    assert (found.level, found.found) == (Level.OK, "1 with driver 580.159.03, torch 2.11.0, flashinfer-python 0.6.13")


def test_what_is_missing_is_named_with_the_extra(machine, monkeypatch):
    monkeypatch.setattr(checks, "_version", {"torch": "2.11.0"}.get)
    found = checks.gpu()
    assert found.level is Level.NOTE
    assert "without flashinfer-python" in found.found
    assert "tie-inference[cuda]" in found.hint


def test_devices_without_a_driver_and_no_devices(machine):
    (machine / "version").unlink()
    assert "without a driver" in checks.gpu().found
    (machine / "nvidia0").unlink()
    assert "on the CPU" in checks.gpu().found
