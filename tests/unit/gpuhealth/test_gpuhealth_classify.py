"""The judgement is a pure function of looks: each condition, quick to withdraw, slow to return."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhealthd import xid
from gpuhealthd.classify import Assessment, History, blind, classify
from gpuhealthd.nvml_codes import FAULT_CODES, NOT_MEASURED, fault_of
from gpuhealthd.rules import FAULTS, RECOVERY, RULES, Policy
from gpuhealthd.snapshot import Device, Reading, Snapshot
from gpuhealthd.verdicts import Action, Verdict
from tie.proto import gpuhealth_pb2

POLICY = Policy(recover_after_polls=3)
GOOD_GPU = {"temperature_c": 40.0, "temperature_limit_c": 90.0, "recovery_action": 0.0, "ecc_uncorrected_volatile": 0.0}
GOOD_CPU = {"available_bytes": 8e9, "load1_per_core": 0.5}


def device(
    values: dict[str, float | None], *, faults: tuple[str, ...] = (), xids: tuple[int, ...] = (), name: str = "GPU-1"
) -> Device:
    return Device(name, "GPU", tuple(Reading(key, value) for key, value in values.items()), faults, xids)


class Daemon:
    """Looks one after the other, a second apart."""

    def __init__(self, provider: str = "nvml", policy: Policy = POLICY) -> None:
        self.provider = provider
        self.policy = policy
        self.history = History()
        self.now = 0.0

    def see(self, *devices: Device, faults: tuple[str, ...] = ()) -> Assessment:
        self.now += 1.0
        snapshot = Snapshot(self.provider, self.now, devices, faults)  # type: ignore[arg-type]
        assessment, self.history = classify(snapshot, self.history, self.policy)
        return assessment

    def gpu(self, **values: float | None) -> Assessment:
        return self.see(device({**GOOD_GPU, **values}))

    def cpu(self, **values: float | None) -> Assessment:
        return self.see(device({**GOOD_CPU, **values}, name="cpu0"))


def test_numbers_are_those_of_the_contract() -> None:
    for verdict in Verdict:
        assert gpuhealth_pb2.Verdict.Value(f"VERDICT_{verdict.name}") == verdict
    for action in Action:
        assert gpuhealth_pb2.Action.Value(f"ACTION_{action.name}") == action


def test_good_hardware_is_healthy_at_the_first_look() -> None:
    for assessment in (Daemon().gpu(), Daemon("cpu").cpu()):
        assert assessment.node.verdict is Verdict.HEALTHY
        assert assessment.node.reasons == ()
        assert assessment.node.action is Action.NONE


@pytest.mark.parametrize(
    ("values", "code", "verdict", "action"),
    [
        ({"recovery_action": 1.0}, "recovery-gpu-reset", Verdict.UNAVAILABLE, Action.RESET_GPU),
        ({"recovery_action": 2.0}, "recovery-node-reboot", Verdict.UNAVAILABLE, Action.REBOOT),
        ({"recovery_action": 3.0}, "recovery-drain-p2p", Verdict.DEGRADED, Action.RESET_GPU),
        ({"recovery_action": 4.0}, "recovery-drain-and-reset", Verdict.UNAVAILABLE, Action.RESET_GPU),
        ({"recovery_action": 8.0}, "recovery-unknown", Verdict.UNAVAILABLE, Action.SERVICE),
        ({"recovery_action": 0.5}, "recovery-unknown", Verdict.UNAVAILABLE, Action.SERVICE),
        ({"ecc_uncorrected_volatile": 1.0}, "ecc-uncorrected", Verdict.UNAVAILABLE, Action.RESET_GPU),
        ({"remap_pending": 1.0}, "remap-pending", Verdict.DEGRADED, Action.RESET_GPU),
        ({"remap_failure": 1.0}, "remap-failure", Verdict.UNAVAILABLE, Action.SERVICE),
        ({"remap_uncorrected": 512.0}, "remap-exhausted", Verdict.DEGRADED, Action.SERVICE),
        ({"temperature_c": 91.0}, "too-hot", Verdict.DEGRADED, Action.NONE),
        ({"ecc_mode": 1.0, "ecc_mode_pending": 0.0}, "ecc-pending", Verdict.DEGRADED, Action.REBOOT),
        ({"ecc_mode": 0.0, "ecc_mode_pending": 0.0}, "ecc-off", Verdict.DEGRADED, Action.REBOOT),
        ({"persistence_mode": 0.0}, "persistence-off", Verdict.DEGRADED, Action.NONE),
        ({"sram_threshold": 1.0}, "sram-threshold", Verdict.UNAVAILABLE, Action.SERVICE),
        ({"repair_pending": 1.0}, "repair-pending", Verdict.DEGRADED, Action.RESET_GPU),
        ({"retired_pending": 1.0}, "retired-pending", Verdict.DEGRADED, Action.RESET_GPU),
        ({"retired_single": 40.0, "retired_double": 15.0}, "", Verdict.HEALTHY, Action.NONE),
        ({"retired_single": 50.0, "retired_double": 13.0}, "retired-limit", Verdict.UNAVAILABLE, Action.SERVICE),
        ({"retired_double": 16.0}, "retired-double-bit", Verdict.DEGRADED, Action.SERVICE),
        ({"thermal_margin_c": -3.0, "thermal_margin_limit_c": -2.0}, "thermal-margin", Verdict.DEGRADED, Action.NONE),
        ({"thermal_margin_c": -1.0, "thermal_margin_limit_c": 0.0}, "thermal-margin", Verdict.DEGRADED, Action.NONE),
        ({"thermal_margin_c": -3.0}, "", Verdict.HEALTHY, Action.NONE),
        (
            {"memory_temperature_c": 96.0, "memory_temperature_limit_c": 95.0},
            "memory-too-hot",
            Verdict.DEGRADED,
            Action.NONE,
        ),
        ({"nvlink_active": 0.0, "nvlink_inactive": 4.0}, "", Verdict.HEALTHY, Action.NONE),  # no bridge
        ({"nvlink_active": 17.0, "nvlink_inactive": 1.0}, "nvlink-down", Verdict.UNAVAILABLE, Action.RESET_GPU),
        ({"fabric_state": 0.0}, "", Verdict.HEALTHY, Action.NONE),
        ({"fabric_state": 1.0}, "fabric-not-started", Verdict.UNAVAILABLE, Action.SERVICE),
        ({"fabric_state": 2.0}, "fabric-in-progress", Verdict.DEGRADED, Action.NONE),
        ({"fabric_state": 3.0, "fabric_status": 0.0, "fabric_health": 0x1AA}, "", Verdict.HEALTHY, Action.NONE),
        ({"fabric_state": 3.0, "fabric_status": 999.0}, "fabric-failed", Verdict.UNAVAILABLE, Action.SERVICE),
        ({"fabric_state": 3.0, "fabric_health": 0xA9}, "fabric-unhealthy", Verdict.UNAVAILABLE, Action.SERVICE),
        ({"fabric_state": 3.0, "fabric_health": 0xA6}, "fabric-unhealthy", Verdict.UNAVAILABLE, Action.SERVICE),
        ({"fabric_state": 3.0, "fabric_health": 0x9A}, "fabric-unhealthy", Verdict.UNAVAILABLE, Action.SERVICE),
        ({"fabric_state": 3.0, "fabric_health": 0x6A}, "fabric-unhealthy", Verdict.UNAVAILABLE, Action.SERVICE),
        ({"fabric_state": 3.0, "fabric_health": 0x5AA}, "fabric-unhealthy", Verdict.UNAVAILABLE, Action.SERVICE),
        ({"fabric_state": 4.0}, "fabric-unknown", Verdict.UNAVAILABLE, Action.SERVICE),
        ({"cc_feature": 1.0, "cc_ready": 0.0}, "cc-not-ready", Verdict.UNAVAILABLE, Action.REBOOT),
        ({"cc_feature": 0.0, "cc_ready": 0.0}, "", Verdict.HEALTHY, Action.NONE),
        ({"mig_mode": 1.0, "mig_mode_pending": 1.0}, "mig-on", Verdict.UNAVAILABLE, Action.SERVICE),
        ({"mig_mode": 0.0, "mig_mode_pending": 1.0}, "mig-pending", Verdict.DEGRADED, Action.RESET_GPU),
        ({"recovery_action": 5.0}, "recovery-imex-domain", Verdict.UNAVAILABLE, Action.REBOOT),
        ({"recovery_action": 6.0}, "recovery-bus-reset", Verdict.UNAVAILABLE, Action.REBOOT),
        ({"recovery_action": 7.0}, "recovery-system-reboot", Verdict.UNAVAILABLE, Action.REBOOT),
    ],
)
def test_conditions_of_a_gpu(values: dict[str, float], code: str, verdict: Verdict, action: Action) -> None:
    node = Daemon().gpu(**values).node
    assert node.reasons == ((code,) if code else ())
    assert (node.verdict, node.action) == (verdict, action)


# What shows only over several looks: the values of each, and the code that the last one brings.
@pytest.mark.parametrize(
    ("looks", "code", "verdict", "action"),
    [
        ([{"nvlink_active": 18.0}, {"nvlink_active": 0.0}], "nvlink-down", Verdict.UNAVAILABLE, Action.RESET_GPU),
        ([{"nvlink_active": 18.0}, {"nvlink_active": None}], "nvlink-down", Verdict.UNAVAILABLE, Action.RESET_GPU),
        ([{"nvlink_crc": 0.0}, {"nvlink_crc": 101.0}], "nvlink-crc", Verdict.UNAVAILABLE, Action.SERVICE),
        ([{"nvlink_crc": 0.0}, {"nvlink_crc": 99.0}], "", Verdict.HEALTHY, Action.NONE),
        ([{"nvlink_replays": 5.0}, {"nvlink_replays": 6.0}], "nvlink-replays", Verdict.DEGRADED, Action.NONE),
        ([{"nvlink_recoveries": 5.0}, {"nvlink_recoveries": 6.0}], "nvlink-recoveries", Verdict.DEGRADED, Action.NONE),
        ([{"pcie_replays": n * 2.0} for n in range(3)], "pcie-replays", Verdict.DEGRADED, Action.NONE),
        ([{"pcie_width": 8.0, "pcie_width_max": 16.0}] * 2, "pcie-width", Verdict.DEGRADED, Action.NONE),
        ([{"thermal_violation_ns": n * 1e6} for n in range(3)], "thermal-violation", Verdict.DEGRADED, Action.NONE),
        ([{"retired_double": 15.0}, {"retired_double": 17.0}], "retired-growing", Verdict.UNAVAILABLE, Action.SERVICE),
        ([{"retired_double": 3.0}, {"retired_double": 5.0}], "", Verdict.HEALTHY, Action.NONE),
        ([{"clock_events": 0x80}] * 2, "power-brake", Verdict.DEGRADED, Action.NONE),
        ([{"clock_events": 0x80}] * 30, "power-brake", Verdict.UNAVAILABLE, Action.NONE),
        ([{"clock_events": 0x08}] * 4, "", Verdict.HEALTHY, Action.NONE),
        ([{"clock_events": 0x08}] * 5, "hardware-slowdown", Verdict.DEGRADED, Action.NONE),
        ([{"clock_events": 0x20}] * 5, "software-thermal", Verdict.DEGRADED, Action.NONE),
        ([{"clock_events": 0x05}] * 40, "", Verdict.HEALTHY, Action.NONE),
    ],
)
def test_conditions_over_time(
    looks: list[dict[str, float | None]], code: str, verdict: Verdict, action: Action
) -> None:
    daemon = Daemon()
    for values in looks:
        node = daemon.gpu(**values).node
    assert (code in node.reasons) == bool(code)
    assert (node.verdict, node.action) == (verdict, action)


def test_rows_over_their_limit_are_more_than_exhausted() -> None:
    node = Daemon().gpu(remap_uncorrected=513.0).node
    assert (node.verdict, node.action) == (Verdict.UNAVAILABLE, Action.SERVICE)
    assert node.reasons == ("remap-over-limit", "remap-exhausted")


CONFIDENTIAL = {"cc_feature": 1.0, "cc_environment": 2.0, "cc_devtools": 0.0, "cc_ready": 1.0}


@pytest.mark.parametrize("name", CONFIDENTIAL)
@pytest.mark.parametrize("value", [None, 3.0])
def test_a_confidential_node_needs_all_of_it(name: str, value: float | None) -> None:
    policy = Policy(confidential=True)
    assert Daemon(policy=policy).gpu(**CONFIDENTIAL).node.verdict is Verdict.HEALTHY
    assert "cc-required" in Daemon(policy=policy).gpu(**{**CONFIDENTIAL, name: value}).node.reasons


def test_the_number_of_links_may_be_ordered() -> None:
    policy = Policy(expected_nvlinks=18)
    assert Daemon(policy=policy).gpu(nvlink_active=12.0).node.reasons == ("nvlink-down",)
    for none in (Daemon(policy=policy).gpu(), Daemon(policy=policy).gpu(nvlink_active=None)):
        assert (none.node.verdict, none.node.reasons) == (Verdict.UNAVAILABLE, ("nvlink-down",))
    assert Daemon(policy=policy).gpu(nvlink_active=18.0).node.verdict is Verdict.HEALTHY


def test_a_policy_moves_conditions_both_ways() -> None:
    verdicts = {
        "ecc-off": Verdict.UNAVAILABLE,
        "ecc-uncorrected": Verdict.DEGRADED,
        "too-hot": Verdict.HEALTHY,
        "xid-79": Verdict.DEGRADED,
        "xid-13": Verdict.UNAVAILABLE,
        "inforom-corrupt": Verdict.UNAVAILABLE,
        "recovery-gpu-reset": Verdict.DEGRADED,
    }
    policy = Policy(verdicts=verdicts)
    assert Daemon(policy=policy).gpu(ecc_mode=0.0, ecc_mode_pending=0.0).node.verdict is Verdict.UNAVAILABLE
    assert Daemon(policy=policy).gpu(ecc_uncorrected_volatile=1.0).node.verdict is Verdict.DEGRADED
    assert Daemon(policy=policy).gpu(temperature_c=95.0).node.reasons == ()
    assert Daemon(policy=policy).gpu(recovery_action=1.0).node.verdict is Verdict.DEGRADED
    assert Daemon(policy=policy).see(device(GOOD_GPU, xids=(79,))).node.verdict is Verdict.DEGRADED
    assert Daemon(policy=policy).see(device(GOOD_GPU, faults=("inforom-corrupt",))).node.verdict is Verdict.UNAVAILABLE
    daemon = Daemon(policy=policy)
    daemon.see(device(GOOD_GPU, xids=(13,)))
    for _ in range(10):
        node = daemon.gpu().node
    assert node.reasons == ("xid-13",)  # what makes a GPU unavailable does not pass with time


@pytest.mark.parametrize(
    ("values", "code", "verdict"),
    [
        ({"available_bytes": 1e6}, "low-memory", Verdict.UNAVAILABLE),
        ({"available_bytes": None}, "memory-not-measured", Verdict.UNAVAILABLE),
        ({"load1_per_core": 65.0}, "high-load", Verdict.DEGRADED),
        ({"temperature_c": 101.0}, "too-hot", Verdict.DEGRADED),
    ],
)
def test_conditions_of_a_cpu(values: dict[str, float], code: str, verdict: Verdict) -> None:
    node = Daemon("cpu").cpu(**values).node
    assert (node.reasons, node.verdict) == ((code,), verdict)


@pytest.mark.parametrize("name", ["temperature_limit_c", "temperature_c"])
def test_what_was_not_measured_is_neither_hot_nor_cold(name: str) -> None:
    assert Daemon().gpu(**{"temperature_c": 95.0, name: None}).node.verdict is Verdict.HEALTHY


def test_a_limit_of_zero_is_no_limit() -> None:
    assert Daemon().gpu(temperature_limit_c=0.0).node.verdict is Verdict.HEALTHY


def test_a_device_of_which_nothing_is_known_is_unavailable() -> None:
    node = Daemon().see(device({"temperature_c": None})).node
    assert (node.verdict, node.reasons) == (Verdict.UNAVAILABLE, ("not-measured",))


def test_soft_signals_count_only_when_they_last() -> None:
    daemon = Daemon()
    verdicts = [daemon.gpu(clock_events=float(0x40)).node.verdict for _ in range(30)]
    assert verdicts[0] is Verdict.HEALTHY
    assert set(verdicts[1:29]) == {Verdict.DEGRADED}
    assert verdicts[29] is Verdict.UNAVAILABLE


def test_a_link_that_sleeps_is_not_slow() -> None:
    values = {"pcie_generation": 1.0, "pcie_generation_max": 5.0}
    idle, busy = Daemon(), Daemon()
    for _ in range(5):
        quiet = idle.gpu(utilization=0.0, **values).node
        loud = busy.gpu(utilization=99.0, **values).node
    assert quiet.verdict is Verdict.HEALTHY
    assert loud.reasons == ("pcie-generation",)


def test_corrected_errors_count_by_rate_not_by_total() -> None:
    daemon = Daemon()
    assert daemon.gpu(ecc_corrected_volatile=1e9).node.verdict is Verdict.HEALTHY
    assert daemon.gpu(ecc_corrected_volatile=1e9).node.verdict is Verdict.HEALTHY
    daemon.gpu(ecc_corrected_volatile=1e9 + 5000)
    assert daemon.gpu(ecc_corrected_volatile=1e9 + 10000).node.reasons == ("ecc-corrected-rate",)


def test_quick_to_withdraw_slow_to_return() -> None:
    daemon = Daemon()
    daemon.gpu()
    assert daemon.gpu(ecc_uncorrected_volatile=1.0).node.verdict is Verdict.UNAVAILABLE
    after = [daemon.gpu().node for _ in range(3)]
    assert [node.verdict for node in after] == [Verdict.UNAVAILABLE, Verdict.UNAVAILABLE, Verdict.HEALTHY]
    assert "recovering" in after[0].reasons
    daemon.gpu(ecc_uncorrected_volatile=1.0)
    daemon.gpu()
    daemon.gpu()
    daemon.gpu(ecc_uncorrected_volatile=1.0)  # the count begins anew
    assert [daemon.gpu().node.verdict for _ in range(3)][:2] == [Verdict.UNAVAILABLE] * 2


def test_the_worst_device_speaks_for_the_node() -> None:
    node = Daemon().see(
        device(GOOD_GPU),
        device({**GOOD_GPU, "remap_pending": 1.0}, name="GPU-2"),
        device({}, faults=("gpu-lost",), name="GPU-3"),
    )
    assert node.node.verdict is Verdict.UNAVAILABLE
    assert node.node.reasons == ("gpu-lost", "remap-pending")
    assert node.node.action is Action.REBOOT
    assert [entry.judgement.verdict for entry in node.devices] == [
        Verdict.HEALTHY, Verdict.DEGRADED, Verdict.UNAVAILABLE,
    ]  # fmt: skip


def test_a_device_that_vanishes_is_missed() -> None:
    daemon = Daemon()
    daemon.see(device(GOOD_GPU), device(GOOD_GPU, name="GPU-2"))
    missing = daemon.see(device(GOOD_GPU))
    assert missing.node.reasons == ("device-missing",)
    assert {entry.id for entry in missing.devices} == {"GPU-1", "GPU-2"}
    for _ in range(2):
        back = daemon.see(device(GOOD_GPU), device(GOOD_GPU, name="GPU-2"))
        assert back.node.verdict is Verdict.UNAVAILABLE
    assert daemon.see(device(GOOD_GPU), device(GOOD_GPU, name="GPU-2")).node.verdict is Verdict.HEALTHY


def test_devices_are_not_missed_while_the_driver_is() -> None:
    daemon = Daemon()
    daemon.gpu()
    assert daemon.see(faults=("driver-not-loaded",)).node.reasons == ("driver-not-loaded",)
    assert [daemon.gpu().node.verdict for _ in range(3)][-1] is Verdict.HEALTHY


def test_fewer_devices_than_expected_or_none() -> None:
    assert Daemon().see().node.reasons == ("no-devices",)
    daemon = Daemon(policy=Policy(expected_devices=2))
    assert daemon.gpu().node.reasons == ("device-missing",)


def test_a_look_that_did_not_come_back() -> None:
    daemon = Daemon()
    daemon.gpu()
    assessment, daemon.history = blind("probe-hung", daemon.history)
    assert (assessment.node.verdict, assessment.node.reasons) == (Verdict.UNAVAILABLE, ("probe-hung",))
    assert [daemon.gpu().node.verdict for _ in range(3)] == [
        Verdict.UNAVAILABLE, Verdict.UNAVAILABLE, Verdict.HEALTHY,
    ]  # fmt: skip


# ---- XIDs ----


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


# ---- tables ----


@given(st.integers(1, 2000))
def test_every_return_code_is_a_fault_or_not_measured(code: int) -> None:
    fault = fault_of(code)
    assert (fault is None) == (code in NOT_MEASURED)
    assert fault is None or fault in FAULTS


def test_tables_agree() -> None:
    assert not NOT_MEASURED & FAULT_CODES.keys()
    assert set(FAULT_CODES.values()) <= FAULTS.keys()
    assert RECOVERY[0][1] is Verdict.HEALTHY
    assert all(verdict is not Verdict.HEALTHY for number, (_, verdict, _) in RECOVERY.items() if number)
    assert len({(rule.code, rule.providers) for rule in RULES}) == len(RULES)


names = st.sampled_from(
    sorted({*GOOD_GPU, *GOOD_CPU, "clock_events", "recovery_action", "remap_failure", "utilization"})
)
devices = st.builds(
    Device,
    id=st.sampled_from(["GPU-1", "GPU-2"]),
    name=st.just("GPU"),
    readings=st.lists(
        st.builds(Reading, names, st.none() | st.floats(allow_nan=False, allow_infinity=False)), max_size=8
    ).map(tuple),
    faults=st.lists(st.sampled_from([*FAULTS, "something-new"]), max_size=2).map(tuple),
    xids=st.lists(st.integers(0, 200), max_size=3).map(tuple),
)
snapshots = st.lists(
    st.tuples(
        st.lists(devices, max_size=3, unique_by=lambda entry: entry.id).map(tuple),
        st.lists(st.sampled_from([*FAULTS, "something-new"]), max_size=1).map(tuple),
    ),
    max_size=12,
)


@given(snapshots, st.sampled_from(["cpu", "nvml"]))
def test_any_history_gives_a_judgement_that_makes_sense(looks: list, provider: str) -> None:
    daemon = Daemon(provider)
    for seen, faults in looks:
        assessment = daemon.see(*seen, faults=faults)
        node = assessment.node
        assert node.verdict == max(
            [entry.judgement.verdict for entry in assessment.devices] + [daemon.history.provider.shown.verdict]
        )
        assert bool(node.reasons) == (node.verdict is not Verdict.HEALTHY)
        assert not (faults or not seen) or node.verdict is Verdict.UNAVAILABLE


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
