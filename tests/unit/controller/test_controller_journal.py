"""The journal of events: it is read again, has an end, and says what it lost."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controllerd.happening import Happening
from controllerd.journal import KEPT, Journal, messages


def test_a_journal_is_read_again(tmp_path: Path) -> None:
    clock = iter(range(10, 1000)).__next__
    journal = Journal(tmp_path / "events.json", clock, "boot")
    journal.add(Happening("state", "ready", "initializing", "available"))
    journal.add(Happening("given-up", "away-too-long", more=("runtime-gone",) * 50))
    journal.add(Happening("runtime", "seen", "a" * 128, "b" * 128))
    again = Journal(tmp_path / "events.json", lambda: 500.0, "boot")
    assert list(again.entries) == list(journal.entries)
    assert [entry.after for entry in again.transitions()] == ["available"]
    assert list(Journal(tmp_path / "events.json", lambda: 5.0, "boot").entries) == []  # of the future
    assert list(Journal(tmp_path / "events.json", lambda: 500.0, "later boot").entries) == []  # another clock


def test_a_journal_has_an_end(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "events.json", lambda: 1.0)
    for number in range(KEPT + 10):
        journal.add(Happening("peer", f"p{number}"))
    assert Journal(tmp_path / "events.json", lambda: 2.0).entries[0].code == "p10"


def test_a_journal_without_a_disk_remembers_while_it_runs(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "none" / "events.json", lambda: 1.0)
    journal.add(Happening("peer", "gone"))
    assert len(journal.entries) == 1


def test_what_happens_again_and_again_is_one_entry_that_counts(tmp_path: Path) -> None:
    clock = iter(range(1, 1000)).__next__
    journal = Journal(tmp_path / "events.json", clock, "boot")
    journal.add(Happening("state", "runtime-gone", "available", "error"))
    for number in range(20):
        journal.add(Happening("peer", "connected", after="probe"))
        journal.add(Happening("runtime", "seen", str(number), str(number + 1)))
        journal.add(Happening("peer", "gone", after="probe"))
        journal.add(Happening("peer", "gone", after="owner") if number == 3 else Happening("gpu", "xid-79"))
    seen = [(entry.kind, entry.code, entry.after, entry.times) for entry in journal.entries]
    assert seen == [
        ("state", "runtime-gone", "error", 1), ("peer", "gone", "owner", 1), ("peer", "connected", "probe", 20),
        ("runtime", "seen", "20", 20), ("peer", "gone", "probe", 20), ("gpu", "xid-79", "", 19),
    ]  # fmt: skip
    journal.add(Happening("state", "ready", "error", "available"))
    journal.add(Happening("peer", "gone", after="probe"))
    assert journal.entries[-1].times == 1
    (last,) = messages([journal.entries[2]], 500.0).happenings
    assert last.times == 20
    assert last.first_wall_s <= last.wall_s


def test_a_journal_that_could_not_be_kept_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.json"
    journal = Journal(path, lambda: 1.0, "boot")
    journal.add(Happening("recycle", "operator"))
    assert not Journal(path, lambda: 2.0, "boot").gap
    with monkeypatch.context() as full:
        full.setattr(os, "open", full_for_files(os.open))
        journal.add(Happening("recycle", "timer"))
    again = Journal(path, lambda: 2.0, "boot")
    assert (again.gap, again.recycles) == (True, {"operator": 1})
    again.add(Happening("journal", "gap"))
    assert not Journal(path, lambda: 2.0, "boot").gap


def full_for_files(really: Callable[..., int]) -> Callable[..., int]:
    """A disk with room for names, and for nothing in them."""

    def call(path: Path, *arguments: int) -> int:
        if path.suffix == ".new":
            raise OSError(errno.ENOSPC, "full")
        return really(path, *arguments)

    return call


@given(
    st.binary(max_size=300)
    | st.just(b'{"boot":"b","entries":[{"at":1,"wall":1,"kind":"state","code":"x","after":"nowhere"}]}')
)
def test_any_bytes_are_a_journal_or_none(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("j") / "events.json"
    path.write_bytes(data)
    assert Journal(path, lambda: 10.0, "b").transitions() == []
