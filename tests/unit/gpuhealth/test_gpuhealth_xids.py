"""XIDs, from the driver and from the kernel's log: what each means, and what several do."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_looks import GOOD_GPU, Daemon, device
from gpuhealthd import xid
from gpuhealthd.snapshot import Device
from gpuhealthd.verdicts import Action, Verdict


def test_a_fatal_xid_does_not_pass_with_time() -> None:
    daemon = Daemon()
    assert daemon.see(device(GOOD_GPU, xids=(79,))).node.reasons == ("xid-79",)
    for _ in range(20):
        node = daemon.gpu().node
    assert (node.verdict, node.action) == (Verdict.UNAVAILABLE, Action.REBOOT)


def test_an_application_xid_asks_for_a_recycle_and_passes() -> None:
    daemon = Daemon()
    node = daemon.see(device(GOOD_GPU, xids=(94,))).node
    assert (node.verdict, node.action) == (Verdict.DEGRADED, Action.RECYCLE_RUNTIME)
    assert [daemon.gpu().node.verdict for _ in range(3)][-1] is Verdict.HEALTHY


def test_a_repeated_xid_is_worse() -> None:
    daemon = Daemon()
    verdicts = [daemon.see(device(GOOD_GPU, xids=(32,))).node.verdict for _ in range(3)]
    assert verdicts == [Verdict.DEGRADED, Verdict.DEGRADED, Verdict.UNAVAILABLE]


def test_clean_up_is_explained_by_another_xid() -> None:
    assert Daemon().see(device(GOOD_GPU, xids=(43, 45))).node.verdict is Verdict.HEALTHY
    assert Daemon().see(device(GOOD_GPU, xids=(45,))).node.reasons == ("xid-45",)


def test_an_unknown_xid_is_looked_at() -> None:
    assert Daemon().see(device(GOOD_GPU, xids=(99999,))).node.verdict is Verdict.DEGRADED


@given(st.integers(0, 100_000))
def test_every_number_has_a_rule(number: int) -> None:
    rule = xid.rule(number)
    assert rule.meaning
    assert rule.verdict is not Verdict.UNAVAILABLE or rule.action > Action.RECYCLE_RUNTIME


def log_line(*xids: int, fatal: tuple[int, ...] = ()) -> Device:
    return Device("GPU-1", "GPU", device(GOOD_GPU).readings, log_xids=xids, fatal_xids=fatal)


def test_an_xid_that_comes_both_ways_counts_once() -> None:
    daemon = Daemon()
    for _ in range(2):
        assert daemon.see(device(GOOD_GPU, xids=(32,))).node.verdict is Verdict.DEGRADED
        assert daemon.see(log_line(32)).node.verdict is Verdict.DEGRADED
    assert daemon.see(log_line(32)).node.verdict is Verdict.UNAVAILABLE  # the third


def test_an_nvlink_5_error_is_as_bad_as_its_line_says() -> None:
    assert Daemon().see(device(GOOD_GPU, xids=(145,))).node.verdict is Verdict.DEGRADED
    assert Daemon().see(log_line(145)).node.verdict is Verdict.DEGRADED
    node = Daemon().see(log_line(145, fatal=(145,))).node
    assert (node.verdict, node.action) == (Verdict.UNAVAILABLE, Action.RESET_GPU)


RESET, REBOOT, SERVICE, RECYCLE = Action.RESET_GPU, Action.REBOOT, Action.SERVICE, Action.RECYCLE_RUNTIME

# Each number of the catalogue, apart from the table itself: what one occurrence alone means.
XIDS = {
    **dict.fromkeys((13, 31, 32, 68, 69, 94), (Verdict.DEGRADED, RECYCLE)),
    **dict.fromkeys((38, 45, 63, 78, 92, 93, 109, 121, 137, 157, 161), (Verdict.DEGRADED, Action.NONE)),
    **dict.fromkeys(range(144, 151), (Verdict.DEGRADED, Action.NONE)),
    **dict.fromkeys((43, 154), (Verdict.HEALTHY, Action.NONE)),
    **dict.fromkeys((46, 48, 61, 62, 74, 95, 110, 119, 120, 136, 140, 143), (Verdict.UNAVAILABLE, RESET)),
    **dict.fromkeys((155, 156, 158, 166, 167, 169, 170, 172, 173), (Verdict.UNAVAILABLE, RESET)),
    **dict.fromkeys((79, 151), (Verdict.UNAVAILABLE, REBOOT)),
    **dict.fromkeys((54, 64), (Verdict.UNAVAILABLE, SERVICE)),
}


@pytest.mark.parametrize("number", sorted(XIDS))
def test_each_xid(number: int) -> None:
    verdict, action = XIDS[number]
    for seen in (device(GOOD_GPU, xids=(number,)), log_line(number)):
        node = Daemon().see(seen).node
        assert (node.verdict, node.action) == (verdict, action)
        assert node.reasons == (() if verdict is Verdict.HEALTHY else (f"xid-{number}",))


def test_the_catalogue_is_whole() -> None:
    assert XIDS.keys() == xid.XIDS.keys()


def test_a_gpu_known_by_its_address_is_the_one_that_is_listed_later() -> None:
    daemon = Daemon()
    missing = Device("pci 0:41:0", "GPU", faults=("device-missing",), log_xids=(94,), fatal_xids=(145,))
    listed = msgspec.structs.replace(device(GOOD_GPU, xids=(94,)), formerly="pci 0:41:0")
    assert daemon.see(missing).node.verdict is Verdict.UNAVAILABLE
    seen = [daemon.see(listed) for _ in range(3)]
    assert [entry.node.verdict for entry in seen] == [Verdict.UNAVAILABLE] * 2 + [Verdict.DEGRADED]  # slow to return
    assert [[entry.id for entry in look.devices] for look in seen] == [["GPU-1"]] * 3
    (track,) = daemon.history.devices.values()
    assert (track.occurrences(), track.fatal) == ({94: 3}, {145})
    assert daemon.see().devices[0].judgement.reasons == ("device-missing",)
