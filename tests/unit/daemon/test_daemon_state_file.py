"""What a daemon remembers in one boot: read again, replaced as a whole, never believed."""

from pathlib import Path
from typing import Annotated

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tie.daemon.state_file import Remembered, StateFile


class Count(Remembered, frozen=True):
    number: Annotated[int, msgspec.Meta(ge=0, le=9)]


def state_file(path: Path, boot: str | None = "boot") -> StateFile[Count]:
    return StateFile(path, Count, max_bytes=64, boot=boot)


def test_what_was_saved_is_known_again(tmp_path: Path) -> None:
    path = tmp_path / "count.json"
    assert state_file(path).load() is None
    state_file(path, None).save(Count(3))
    state_file(path, None).save(Count(4))
    known = state_file(path, None).load()
    assert known is not None
    assert known.number == 4
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_what_has_not_changed_is_not_written(tmp_path: Path) -> None:
    path, file = tmp_path / "count.json", state_file(tmp_path / "count.json")
    file.save(Count(3))
    path.unlink()
    file.save(Count(3))
    assert not path.exists()
    file.save(Count(4))
    assert path.exists()


@pytest.mark.parametrize(("saved", "loaded"), [("one", "two"), ("one", ""), ("", "")])
def test_another_boot_knows_nothing(tmp_path: Path, saved: str, loaded: str) -> None:
    state_file(tmp_path / "count.json", saved).save(Count(3))
    assert state_file(tmp_path / "count.json", loaded).load() is None


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[]", b'{"boot":1,"number":1}', b'{"boot":"boot","number":10}', b"\xff", b" " * 65]
)
def test_a_damaged_file_is_set_aside_and_said(
    tmp_path: Path, damage: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "count.json"
    path.write_bytes(damage)
    assert state_file(path).load() is None
    assert path.with_suffix(".damaged").read_bytes() == damage
    assert "state.damaged" in capsys.readouterr().err


@pytest.mark.parametrize("folder", [False, True])
def test_a_disk_that_takes_nothing_costs_the_memory_alone(
    tmp_path: Path, folder: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "count.json" if folder else tmp_path / "none" / "count.json"
    if folder:
        path.mkdir()  # in the way
        assert state_file(path).load() is None
    state_file(path).save(Count(3))
    assert list(tmp_path.iterdir()) == ([path] if folder else [])
    assert "state.not-saved" in capsys.readouterr().err


@given(st.binary(max_size=80))
def test_any_bytes_are_read(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("s") / "count.json"
    path.write_bytes(data)
    state_file(path).load()
