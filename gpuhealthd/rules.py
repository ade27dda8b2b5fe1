"""The condition tables: what a reading, a return code or the driver's own verdict means.

Thresholds follow NVIDIA's documents (nvml.h; "GPU memory error management"; "Error recovery and response flags") and
what public health monitors agree on. Each row names a stable code; a new condition is a new row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from gpuhealthd.verdicts import Action, Verdict

_BUSY_PERCENT = 50.0
_ECC_CORRECTED_PER_S = 1000.0  # a rate, not a total: rates of this order stall the driver while no XID is raised
_MEMORY_STALL_PERCENT = 50.0  # half of the time every task waited for memory (PSI "full", kernel docs: accounting/psi)
_MAX_REMAPPED_ROWS = 512.0
_MAX_RETIRED_PAGES = 63.0
_MAX_DOUBLE_BIT_PAGES = 15.0
_NVLINK_CRC_PER_S = 100.0
_PCIE_REPLAYS_PER_S = 8.0 / 60.0


@dataclass(frozen=True, slots=True)
class Policy:
    """The operator's part of the rules (node.toml, `gpuhealth`)."""

    recover_after_polls: int = 3
    min_available_bytes: float = 256 * 1024 * 1024
    max_load_per_core: float = 64.0
    max_temperature_c: float = 100.0
    expected_devices: int = 0  # 0: whatever is there
    expected_nvlinks: int = 0  # of each GPU; 0: as many as there once were
    confidential: bool = False  # whether the node must be in confidential-computing mode
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)  # conditions that the operator has moved


@dataclass(frozen=True, slots=True)
class Looks:
    """The measured values of this look and of the one before. A name that was not measured is absent.

    Attributes:
        most: the largest value in this boot of what `MOST` names.
        least: the smallest of what `LEAST` names.
    """

    now: Mapping[str, float]
    before: Mapping[str, float]
    elapsed_s: float
    policy: Policy
    most: Mapping[str, float] = field(default_factory=dict)
    least: Mapping[str, float] = field(default_factory=dict)

    def above(self, name: str, limit: float | None) -> bool:
        """Whether a measured value is over a limit; not measured, or no limit, is never over it."""
        value = self.now.get(name)
        return value is not None and limit is not None and value > limit

    def below(self, name: str, limit: float | None) -> bool:
        """Whether a measured value is under a limit."""
        value = self.now.get(name)
        return value is not None and limit is not None and value < limit

    def differs(self, one: str, other: str) -> bool:
        """Whether two measured values are unequal."""
        return one in self.now and other in self.now and self.now[one] != self.now[other]

    def bit(self, name: str, mask: int) -> bool:
        """Whether a measured bit mask has one of the bits of `mask`."""
        return name in self.now and bool(int(self.now[name]) & mask)

    def rate_above(self, name: str, per_second: float) -> bool:
        """Whether a counter grew faster than a rate since the look before; a counter that fell was reset."""
        if name not in self.now or name not in self.before or self.elapsed_s <= 0:
            return False
        return (self.now[name] - self.before[name]) / self.elapsed_s > per_second

    def part(self, name: str, shift: int, width: int) -> int | None:
        """A part of a measured bit field."""
        return None if name not in self.now else int(self.now[name]) >> shift & width

    def limit(self, name: str) -> float | None:
        """A limit that the device itself reports; zero means that it has none."""
        return self.now.get(name) or None


@dataclass(frozen=True, slots=True)
class Rule:
    """One condition on readings.

    Attributes:
        after: looks in a row before it counts: soft signals come and go.
        unavailable_after: looks in a row from which it means unavailable; 0 for never.
    """

    code: str
    providers: tuple[str, ...]
    holds: Callable[[Looks], bool]
    verdict: Verdict
    action: Action = Action.NONE
    after: int = 1
    unavailable_after: int = 0


def _links_down(looks: Looks) -> bool:
    # A PCIe card without a bridge has links that were never up: that alone is no fault. A driver that reports no links
    # at all has none that are up.
    active = looks.now.get("nvlink_active", 0)
    wanted = max(looks.policy.expected_nvlinks, looks.most.get("nvlink_active", 0))
    return active < wanted or (active > 0 and looks.above("nvlink_inactive", 0))


def _fabric_unhealthy(looks: Looks) -> bool:
    # nvml.h, NVML_GPU_FABRIC_HEALTH_MASK_*: 1 is "true" for degraded bandwidth, route recovery, route unhealthy and
    # access timeout recovery; a configuration above 1 names what is incorrect.
    bits = [looks.part("fabric_health", shift, 3) for shift in (0, 2, 4, 6)]
    configuration = looks.part("fabric_health", 8, 15)
    return 1 in bits or (configuration is not None and configuration > 1)


def _not_confidential(looks: Looks) -> bool:
    wanted = {"cc_feature": 1.0, "cc_environment": 2.0, "cc_devtools": 0.0, "cc_ready": 1.0}  # production, no debugger
    return looks.policy.confidential and any(looks.now.get(name) != value for name, value in wanted.items())


# What is remembered of each device for the rules (`Looks.most`, `Looks.least`).
MOST: Final = frozenset({"nvlink_active"})
LEAST: Final = frozenset({"retired_double"})

_CPU = ("cpu",)
_GPU = ("nvml",)
_BAD = Verdict.UNAVAILABLE
_POOR = Verdict.DEGRADED

RULES: Final[tuple[Rule, ...]] = (
    Rule(
        "low-memory", _CPU, lambda looks: looks.below("available_bytes", looks.policy.min_available_bytes),
        _BAD, Action.RECYCLE_RUNTIME,
    ),
    Rule("memory-not-measured", _CPU, lambda looks: "available_bytes" not in looks.now, _BAD, Action.SERVICE),
    Rule(
        "memory-pressure", _CPU, lambda looks: looks.above("memory_full_avg10", _MEMORY_STALL_PERCENT), _POOR, after=2
    ),
    Rule("high-load", _CPU, lambda looks: looks.above("load1_per_core", looks.policy.max_load_per_core), _POOR),
    Rule("too-hot", _CPU, lambda looks: looks.above("temperature_c", looks.policy.max_temperature_c), _POOR),
    Rule("too-hot", _GPU, lambda looks: looks.above("temperature_c", looks.limit("temperature_limit_c")), _POOR),
    Rule(
        "memory-too-hot", _GPU,
        lambda looks: looks.above("memory_temperature_c", looks.limit("memory_temperature_limit_c")), _POOR,
    ),
    Rule("ecc-uncorrected", _GPU, lambda looks: looks.above("ecc_uncorrected_volatile", 0), _BAD, Action.RESET_GPU),
    Rule(
        "ecc-corrected-rate", _GPU,
        lambda looks: looks.rate_above("ecc_corrected_volatile", _ECC_CORRECTED_PER_S), _POOR, after=2,
    ),
    Rule("ecc-off", _GPU, lambda looks: looks.below("ecc_mode", 1), _POOR, Action.REBOOT),
    Rule("ecc-pending", _GPU, lambda looks: looks.differs("ecc_mode", "ecc_mode_pending"), _POOR, Action.REBOOT),
    # NVIDIA: with a remap pending, "unaffected applications can continue" and new work may start; a reset applies it.
    Rule("remap-pending", _GPU, lambda looks: looks.above("remap_pending", 0), _POOR, Action.RESET_GPU),
    Rule("remap-failure", _GPU, lambda looks: looks.above("remap_failure", 0), _BAD, Action.SERVICE),
    Rule(
        "remap-exhausted", _GPU,
        lambda looks: looks.above("remap_uncorrected", _MAX_REMAPPED_ROWS - 1), _POOR, Action.SERVICE,
    ),
    Rule(
        "remap-over-limit", _GPU, lambda looks: looks.above("remap_uncorrected", _MAX_REMAPPED_ROWS), _BAD,
        Action.SERVICE,
    ),
    Rule("sram-threshold", _GPU, lambda looks: looks.above("sram_threshold", 0), _BAD, Action.SERVICE),
    # Whole pages instead of rows, before Ampere.
    Rule("retired-pending", _GPU, lambda looks: looks.above("retired_pending", 0), _POOR, Action.RESET_GPU),
    Rule(
        "retired-limit", _GPU,
        lambda looks: looks.now.get("retired_single", 0) + looks.now.get("retired_double", 0) >= _MAX_RETIRED_PAGES,
        _BAD, Action.SERVICE,
    ),
    Rule(
        "retired-double-bit", _GPU, lambda looks: looks.above("retired_double", _MAX_DOUBLE_BIT_PAGES), _POOR,
        Action.SERVICE,
    ),
    Rule(
        "retired-growing", _GPU,
        lambda looks: looks.above(
            "retired_double", max(_MAX_DOUBLE_BIT_PAGES, looks.least.get("retired_double", 0) + 1)
        ),
        _BAD, Action.SERVICE,
    ),
    Rule("repair-pending", _GPU, lambda looks: looks.above("repair_pending", 0), _POOR, Action.RESET_GPU),
    # Clock event reasons, nvml.h: 0x40 hardware thermal, 0x80 power brake, 0x08 hardware slowdown (also shown for a
    # moment during normal clock changes), 0x20 software thermal. Idle (0x01) and software power cap (0x04) are normal.
    Rule(
        "thermal-slowdown", _GPU, lambda looks: looks.bit("clock_events", 0x40),
        _POOR, after=2, unavailable_after=30,
    ),
    Rule("power-brake", _GPU, lambda looks: looks.bit("clock_events", 0x80), _POOR, after=2, unavailable_after=30),
    Rule("hardware-slowdown", _GPU, lambda looks: looks.bit("clock_events", 0x08), _POOR, after=5),
    Rule("software-thermal", _GPU, lambda looks: looks.bit("clock_events", 0x20), _POOR, after=5),
    Rule("thermal-violation", _GPU, lambda looks: looks.rate_above("thermal_violation_ns", 0), _POOR, after=2),
    # The margin shrinks to a limit that the device names, signed: zero is one, and not measured is none.
    Rule(
        "thermal-margin", _GPU,
        lambda looks: looks.below("thermal_margin_c", looks.now.get("thermal_margin_limit_c")), _POOR,
    ),
    Rule("nvlink-down", _GPU, _links_down, _BAD, Action.RESET_GPU),
    Rule("nvlink-crc", _GPU, lambda looks: looks.rate_above("nvlink_crc", _NVLINK_CRC_PER_S), _BAD, Action.SERVICE),
    Rule("nvlink-replays", _GPU, lambda looks: looks.rate_above("nvlink_replays", 0), _POOR),
    Rule("nvlink-recoveries", _GPU, lambda looks: looks.rate_above("nvlink_recoveries", 0), _POOR),
    # nvml.h, NVML_GPU_FABRIC_STATE_*: 0 not supported, 1 not started, 2 in progress, 3 completed.
    Rule("fabric-in-progress", _GPU, lambda looks: looks.now.get("fabric_state") == 2, _POOR),
    Rule("fabric-not-started", _GPU, lambda looks: looks.now.get("fabric_state") == 1, _BAD, Action.SERVICE),
    Rule(
        "fabric-unknown", _GPU, lambda looks: looks.now.get("fabric_state", 0) not in {0, 1, 2, 3}, _BAD,
        Action.SERVICE,
    ),
    Rule(
        "fabric-failed", _GPU,
        lambda looks: looks.now.get("fabric_state") == 3 and looks.above("fabric_status", 0), _BAD, Action.SERVICE,
    ),
    Rule(
        "fabric-unhealthy", _GPU, lambda looks: looks.now.get("fabric_state") == 3 and _fabric_unhealthy(looks), _BAD,
        Action.SERVICE,
    ),
    Rule(
        "cc-not-ready", _GPU, lambda looks: looks.now.get("cc_feature") == 1 and looks.now.get("cc_ready") == 0, _BAD,
        Action.REBOOT,
    ),
    Rule("cc-required", _GPU, _not_confidential, _BAD, Action.SERVICE),
    Rule("pcie-replays", _GPU, lambda looks: looks.rate_above("pcie_replays", _PCIE_REPLAYS_PER_S), _POOR, after=2),
    Rule("pcie-width", _GPU, lambda looks: looks.below("pcie_width", looks.limit("pcie_width_max")), _POOR, after=2),
    # An idle link drops its generation to save power.
    Rule(
        "pcie-generation", _GPU,
        lambda looks: looks.above("utilization", _BUSY_PERCENT)
        and looks.below("pcie_generation", looks.limit("pcie_generation_max")),
        _POOR, after=3,
    ),
    Rule("persistence-off", _GPU, lambda looks: looks.below("persistence_mode", 1), _POOR),
    # A slice of a GPU serves nobody here, and remapped rows and events mean something else on it (nvml.h).
    Rule("mig-on", _GPU, lambda looks: looks.above("mig_mode", 0), _BAD, Action.SERVICE),
    Rule("mig-pending", _GPU, lambda looks: looks.differs("mig_mode", "mig_mode_pending"), _POOR, Action.RESET_GPU),
)  # fmt: skip

# The driver's own verdict: NVML_FI_DEV_GET_GPU_RECOVERY_ACTION. A value above those known here comes from a newer
# driver that wants something; ignoring it would fail open.
RECOVERY: Final[Mapping[int, tuple[str, Verdict, Action]]] = {
    0: ("recovery-none", Verdict.HEALTHY, Action.NONE),
    1: ("recovery-gpu-reset", _BAD, Action.RESET_GPU),
    2: ("recovery-node-reboot", _BAD, Action.REBOOT),
    3: ("recovery-drain-p2p", _POOR, Action.RESET_GPU),
    4: ("recovery-drain-and-reset", _BAD, Action.RESET_GPU),
    5: ("recovery-imex-domain", _BAD, Action.REBOOT),
    6: ("recovery-bus-reset", _BAD, Action.REBOOT),
    7: ("recovery-system-reboot", _BAD, Action.REBOOT),
}
UNKNOWN_RECOVERY: Final = ("recovery-unknown", _BAD, Action.SERVICE)

# Return codes that are faults, and the states of the prober itself.
FAULTS: Final[Mapping[str, tuple[Verdict, Action]]] = {
    "gpu-lost": (_BAD, Action.REBOOT),
    "reset-required": (_BAD, Action.RESET_GPU),
    "nvml-unknown": (_BAD, Action.REBOOT),  # a GPU that fell off the bus often answers "unknown error"
    "nvml-timeout": (_BAD, Action.REBOOT),
    "nvml-irq": (_BAD, Action.REBOOT),
    "nvml-memory": (_BAD, Action.REBOOT),
    "power-missing": (_BAD, Action.SERVICE),
    "inforom-corrupt": (_POOR, Action.SERVICE),
    "device-missing": (_BAD, Action.REBOOT),
    "gpu-unavailable": (_BAD, Action.RESET_GPU),  # an event of the driver
    "no-devices": (_BAD, Action.REBOOT),
    "driver-missing": (_BAD, Action.SERVICE),
    "driver-not-loaded": (_BAD, Action.REBOOT),
    "driver-mismatch": (_BAD, Action.REBOOT),
    "blocked-by-os": (_BAD, Action.SERVICE),  # device nodes taken away: not the hardware
    "binding-missing": (_BAD, Action.SERVICE),
    "not-measured": (_BAD, Action.SERVICE),
    "probe-starting": (_BAD, Action.NONE),
    "probe-hung": (_BAD, Action.REBOOT),
    "probe-gone": (_BAD, Action.NONE),
    "probe-garbled": (_BAD, Action.SERVICE),
    "stale": (_BAD, Action.NONE),
}
UNKNOWN_FAULT: Final = (_BAD, Action.SERVICE)
