"""What fuzzing has kept, once more; that the targets can fail; and a few kills (`kills.py` has the campaign)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvxfer import transfer
from kvxfer.header import Header
from tie.app import prompt
from tie.assets.marking import Marker
from tie.cloudboard.uploads import Upload
from tie.device import errors
from tie.device.proxy import tool_calls
from tie.envelope import stream
from tie.envelope.frames import FrameSplitter
from tie.runtime.images.limits import Limits as ImageLimits
from tie.store import client
from tie.store.entries import Entries
from tie.warden.entry import Opener
from tie.warden.errors import EntryError

sys.path.insert(0, str(Path(__file__).parent))

import fuzz_targets
import kills
from seeds import seeds

# Enough of each victim to hit every phase of a turn; the whole campaign with TIE_SLOW=1.
KILLS = 200 if os.environ.get("TIE_SLOW") == "1" else 15


def corpus(target: str) -> list[bytes]:
    kept = sorted((fuzz_targets.CORPUS / target).iterdir())
    return [*seeds()[target], *(path.read_bytes() for path in kept)]


def run(target: str, inputs: list[bytes]) -> None:
    for data in inputs:
        fuzz_targets.TARGETS[target](data)


@pytest.mark.parametrize("target", fuzz_targets.TARGETS)
def test_what_was_found_is_harmless(target):
    inputs = corpus(target)
    assert len(inputs) > len(seeds()[target])
    run(target, inputs)


@pytest.mark.parametrize("script", ["fuzz.py", "kills.py"])
def test_a_campaign_can_be_started_from_anywhere(script, tmp_path):
    """Outside of pytest nobody says where the helpers are."""
    command = [sys.executable, str(Path(__file__).with_name(script)), "--help"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60, capture_output=True)


def leave(*_):
    """Does nothing where something must be done."""


def keep_descriptors(channel, _):
    return channel.receive(timeout=0)


OPEN = Opener._open


def open_without_wiping(self, number, start, into):
    if number:
        into[:] = bytes([7]) * len(into)
        raise EntryError
    OPEN(self, number, start, into)


BREAKS = {
    "header": (Header, "pack", lambda _: bytes(4096)),
    "import": (transfer, "receive", keep_descriptors),
    "store": (Entries, "release", leave),
    "reply": (client.seals, "require", leave),
    "entry": (Opener, "_open", open_without_wiping),
    "proxy": (tool_calls, "_unsure", lambda _: 0),
    "http": (Upload, "drop", leave),
    "frames": (FrameSplitter, "feed", lambda *_: []),
    "envelope": (stream.Opener, "open", lambda _, ciphertext, **__: ciphertext[:-16]),
    "proto": (errors, "from_done", leave),
    "request": (prompt, "check_options", leave),
    "template": (Marker, "mark", lambda _, text, *__, **___: text),
    "image": (ImageLimits, "check_size", leave),
}


@pytest.mark.parametrize("target", fuzz_targets.TARGETS)
def test_what_is_broken_is_found(target, monkeypatch):
    monkeypatch.setattr(*BREAKS[target])
    with pytest.raises(AssertionError):
        run(target, corpus(target))


@pytest.mark.chaos
@pytest.mark.timeout(1200 if KILLS > 100 else 300)
@pytest.mark.parametrize("victim", kills.VICTIMS)
def test_a_kill_at_any_moment_is_an_error_at_once_and_leaves_nothing(victim):
    result = kills.run(victim, KILLS, seed=1)
    late = sorted(result["late"])
    assert result["restored"] > KILLS
    # On a loaded machine a process may not be scheduled for longer than the notice takes.
    assert late[len(late) // 2] < kills.NOTICE_S, late
    assert late[-1] < 2, late
