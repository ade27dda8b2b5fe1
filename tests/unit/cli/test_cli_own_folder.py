"""A temporary folder is taken away by the next one of its kind when its process was killed, and only then."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tie.cli import own_folder
from tie.cli.own_folder import OwnFolder

# Makes a folder, says where, and sleeps; with an argument, in a child that inherits the lock as well.
PROGRAM = """
import os, subprocess, sys, time
from pathlib import Path
from tie.cli.own_folder import OwnFolder
folder = OwnFolder(Path(sys.argv[1]), "own-")
child = subprocess.Popen([sys.executable, "-c", "input()"], pass_fds=(folder.lock,)) if len(sys.argv) > 2 else None
print(folder.path, flush=True)
time.sleep(600)
"""


def started(parent, *more):
    command = [sys.executable, "-c", PROGRAM, str(parent), *more]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, parent / process.stdout.readline().strip()


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path):
    process, folder = started(tmp_path)
    (folder / "deep").mkdir()
    (folder / "deep" / "file").write_text("left")
    OwnFolder(tmp_path, "own-").remove()
    assert folder.exists()  # in use
    process.send_signal(signal.SIGKILL)
    process.communicate()
    second = OwnFolder(tmp_path, "own-")
    assert list(tmp_path.iterdir()) == [second.path]
    assert second.path.stat().st_mode & 0o777 == 0o700
    number = second.lock
    second.remove()
    assert list(tmp_path.iterdir()) == []
    with (tmp_path / "another's").open("w") as other:
        assert other.fileno() == number
        second.remove()
        other.write("this descriptor was not closed")


def test_a_process_that_inherits_the_lock_keeps_the_folder(tmp_path):
    process, folder = started(tmp_path, "with a child")
    process.send_signal(signal.SIGKILL)
    process.wait()
    OwnFolder(tmp_path, "own-").remove()
    assert folder.exists()
    process.communicate("the child may end\n")  # returns when the child has closed its output
    OwnFolder(tmp_path, "own-").remove()
    assert not folder.exists()


def test_what_is_not_ours_stays(tmp_path):
    (tmp_path / "own-file").write_text("a user's")
    (tmp_path / "own-folder").mkdir()
    (tmp_path / "own-folder" / "file").write_text("a user's")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / own_folder._LOCK).touch()
    (tmp_path / "own-link").symlink_to(tmp_path / "elsewhere")
    before = sorted(tmp_path.rglob("*"))
    OwnFolder(tmp_path, "own-").remove()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("below", ["", "/run/a b"])
def test_what_is_mounted_in_one_is_not_touched(tmp_path, monkeypatch, below):
    left = tmp_path / "own-left"
    left.mkdir()
    (left / own_folder._LOCK).touch()
    mounts = tmp_path / "mountinfo"
    point = f"{left}{below}".replace(" ", "\\040")
    mounts.write_text(f"36 35 98:0 / {point} rw,noatime - tmpfs tmpfs rw\n")
    monkeypatch.setattr(own_folder, "_MOUNTS", mounts)
    OwnFolder(tmp_path, "own-").remove()
    assert left.exists()
    mounts.write_text(f"36 35 98:0 / {left}-other rw,noatime - tmpfs tmpfs rw\n")
    OwnFolder(tmp_path, "own-").remove()
    assert not left.exists()


def test_one_that_is_cleared_away_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    def quicker(lock):
        monkeypatch.undo()
        path = Path(f"/proc/self/fd/{lock}").readlink()
        path.unlink()
        path.parent.rmdir()
        return own_folder._taken(lock)

    monkeypatch.setattr(own_folder, "_taken", quicker)
    folder = OwnFolder(tmp_path, "own-")
    assert list(tmp_path.iterdir()) == [folder.path]
    folder.remove()
