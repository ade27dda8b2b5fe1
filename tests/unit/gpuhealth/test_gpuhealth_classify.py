"""The judgement is a pure function of looks: quick to withdraw, slow to return, and sensible for any history."""

from hypothesis import given
from hypothesis import strategies as st

from gpu_looks import GOOD_CPU, GOOD_GPU, Daemon, device
from gpuhealthd.classify import blind
from gpuhealthd.nvml_codes import FAULT_CODES, NOT_MEASURED, fault_of
from gpuhealthd.rules import FAULTS, RECOVERY, RULES, Policy
from gpuhealthd.snapshot import Device, Reading
from gpuhealthd.verdicts import Action, Verdict
from tie.proto import gpuhealth_pb2


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


def test_soft_signals_count_only_when_they_last() -> None:
    daemon = Daemon()
    verdicts = [daemon.gpu(clock_events=float(0x40)).node.verdict for _ in range(30)]
    assert verdicts[0] is Verdict.HEALTHY
    assert set(verdicts[1:29]) == {Verdict.DEGRADED}
    assert verdicts[29] is Verdict.UNAVAILABLE


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
