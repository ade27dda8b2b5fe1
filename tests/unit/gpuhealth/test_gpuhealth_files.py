"""What gpuhealthd reads from files: the kernel's log, its own history, the operator's policy."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhealthd import policy_file
from gpuhealthd.classify import History, Track
from gpuhealthd.history import Archive
from gpuhealthd.kernel_log import KernelLog, Xid
from gpuhealthd.verdicts import Verdict
from tie.daemon.errors import ConfigError

# ---- the kernel's log ----

LINE = "NVRM: Xid (PCI:0000:41:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


def record(number: int, text: str) -> str:
    return f"4,{number},123456,-;{text}\n SUBSYSTEM=pci\n DEVICE=+pci:0000:41:00.0\n"


@pytest.mark.parametrize(
    ("text", "xid"),
    [
        (LINE, Xid("0:41:0", 79)),
        ("NVRM: Xid (PCI:0018:01:00.0): 145, RLW_REMAP Fatal XC1 i0", Xid("18:1:0", 145, fatal=True)),
        ("NVRM: Xid (PCI:0018:01:00): 145, RLW_REMAP Nonfatal XC1 i0", Xid("18:1:0", 145)),
        ("NVRM: Xid (PCI:0000:41:00): 154", Xid("0:41:0", 154)),
        ("NVRM: GPU at PCI:0000:41:00 is well", None),
        ("Xid (PCI:0000:41:00): 79", None),
        ("NVRM: Xid (PCI:0000:zz:00): 79", None),
    ],
)
def test_lines(tmp_path: Path, text: str, xid: Xid | None) -> None:
    path = tmp_path / "kmsg"
    path.write_text(record(7, text))
    log = KernelLog(path, -1)
    assert list(log.read()) == ([] if xid is None else [xid])
    assert log.position == 7


def test_each_record_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text(record(1, LINE) + record(2, LINE))
    log = KernelLog(path, 1)
    assert len(list(log.read())) == 1
    with path.open("a") as file:
        file.write(record(3, LINE)[:30])
        file.flush()
        assert list(log.read()) == []
        file.write(record(3, LINE)[30:])
        file.flush()
        assert len(list(log.read())) == 1
    assert log.position == 3


def test_a_log_that_cannot_be_read_is_no_log(tmp_path: Path) -> None:
    log = KernelLog(tmp_path / "none", -1)
    assert list(log.read()) == []
    assert log.position is None


@given(st.binary(max_size=2000))
def test_any_bytes_are_read(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("k") / "kmsg"
    path.write_bytes(data)
    list(KernelLog(path, -1).read())


# ---- the history ----


def test_what_was_saved_is_known_again(tmp_path: Path) -> None:
    track = Track("GPU", xids={79: 1}, log_xids={79: 1, 32: 2}, fatal=frozenset({145}), most={"nvlink_active": 18.0})
    Archive(tmp_path / "history.json", "boot").save(History({"GPU-1": track}), 12)
    history, position = Archive(tmp_path / "history.json", "boot").load()
    assert position == 12
    assert history.devices["GPU-1"].occurrences() == {32: 2, 79: 1}
    assert history.devices["GPU-1"].fatal == {145}
    assert history.devices["GPU-1"].most == {"nvlink_active": 18.0}
    assert history.devices["GPU-1"].shown is None
    assert (tmp_path / "history.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("saved", "loaded"), [("one", "two"), ("one", ""), ("", "")])
def test_another_boot_knows_nothing(tmp_path: Path, saved: str, loaded: str) -> None:
    Archive(tmp_path / "history.json", saved).save(History({"GPU-1": Track(xids={79: 1})}), 12)
    assert Archive(tmp_path / "history.json", loaded).load() == (History(), -1)


def test_a_disk_that_takes_nothing_costs_the_memory_alone(tmp_path: Path) -> None:
    Archive(tmp_path / "none" / "history.json", "boot").save(History(), 0)
    assert not (tmp_path / "none").exists()


@given(st.binary(max_size=300))
def test_any_bytes_are_a_history_or_set_aside(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("h") / "history.json"
    path.write_bytes(data)
    Archive(path, "boot").load()


# ---- the policy ----


def test_a_policy(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text('[verdicts]\necc-off = "unavailable"\nxid-109 = "healthy"\n')
    assert policy_file.load(path) == {"ecc-off": Verdict.UNAVAILABLE, "xid-109": Verdict.HEALTHY}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[verdicts]\necc-of = "unavailable"', "no movable condition 'ecc-of'"),
        ('[verdicts]\nprobe-hung = "healthy"', "no movable condition 'probe-hung'"),
        ('[verdicts]\ndriver-mismatch = "healthy"', "no movable condition 'driver-mismatch'"),
        ('[verdicts]\necc-off = "fine"', "healthy, degraded or unavailable"),
        ("[verdicts]\necc-off = 1", "healthy, degraded or unavailable"),
        ('[verdict]\necc-off = "healthy"', r"only a table \[verdicts\]"),
        ("verdicts = 1", r"only a table \[verdicts\]"),
        ("[", "not TOML"),
        (b"\xff", "not TOML"),
    ],
)
def test_what_is_no_policy(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = tmp_path / "policy.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=message):
        policy_file.load(path)


def test_no_file_is_no_policy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        policy_file.load(tmp_path / "none")
