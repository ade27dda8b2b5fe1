"""What `tie doctor` says of the directory in which a node runs."""

import shutil
from types import SimpleNamespace

import pytest

from tie.cli import checks
from tie.cli.checks import Level


@pytest.mark.parametrize(("free", "level"), [(0, Level.MISSING), (1_000_000, Level.MISSING), (10**9, Level.OK)])
def test_a_full_disk_under_the_run_directory_is_seen(tmp_path, monkeypatch, free, level):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    room = {check.name: check for check in checks.run_directory(tmp_path)}["room in run directory"]
    assert room.level is level
    assert bool(room.hint) == (level is Level.MISSING)
