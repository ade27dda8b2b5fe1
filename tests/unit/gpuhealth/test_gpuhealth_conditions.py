"""Each condition of a GPU or a CPU: what is measured, and the code, verdict and action that follow."""

import pytest

from gpu_looks import Daemon, device
from gpuhealthd.rules import Policy
from gpuhealthd.verdicts import Action, Verdict


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
