"""XID numbers, what they mean for a node, and what mends them.

An XID is the driver's report of a GPU error. NVIDIA's catalogue (docs.nvidia.com/deploy/xid-errors) gives each a
resolution; the table below turns it into our verdicts. Where the catalogue leaves a fault to the application
(RESTART_APP) the runtime is recycled; where it asks for a reset, reboot or support, the GPU leaves service.
"""

from dataclasses import dataclass
from typing import Final

from gpuhealthd.verdicts import Action, Verdict


@dataclass(frozen=True, slots=True)
class XidRule:
    """What one XID number means.

    Attributes:
        repeat: from this many occurrences on the verdict is unavailable whatever `verdict` says; 0 for never.
    """

    meaning: str
    verdict: Verdict
    action: Action
    repeat: int = 0


def _app(meaning: str, repeat: int = 0) -> XidRule:
    return XidRule(meaning, Verdict.DEGRADED, Action.RECYCLE_RUNTIME, repeat)


def _watch(meaning: str, repeat: int = 0) -> XidRule:
    return XidRule(meaning, Verdict.DEGRADED, Action.NONE, repeat)


def _reset(meaning: str) -> XidRule:
    return XidRule(meaning, Verdict.UNAVAILABLE, Action.RESET_GPU)


def _reboot(meaning: str) -> XidRule:
    return XidRule(meaning, Verdict.UNAVAILABLE, Action.REBOOT)


def _service(meaning: str) -> XidRule:
    return XidRule(meaning, Verdict.UNAVAILABLE, Action.SERVICE)


def _log_only(meaning: str) -> XidRule:
    return XidRule(meaning, Verdict.HEALTHY, Action.NONE)


XIDS: Final[dict[int, XidRule]] = {
    13: _app("graphics engine exception"),
    31: _app("memory page fault"),
    32: _app("invalid push buffer", repeat=3),
    38: _watch("firmware watchdog"),
    43: _log_only("channel reset"),
    45: _watch("pre-emptive clean-up"),  # explained by another XID in the same look: see `explained`
    46: _reset("GPU stopped processing"),
    48: _reset("double-bit ECC error"),
    54: _service("auxiliary power missing"),
    61: _reset("internal micro-controller breakpoint"),
    62: _reset("internal micro-controller halt"),
    63: _watch("row remap or page retirement recorded"),
    64: _service("row remap or page retirement failed"),
    68: _app("video decoder exception"),
    69: _app("graphics engine class error"),
    74: _reset("NVLink error"),
    78: _watch("virtual GPU start"),
    79: _reboot("fallen off the bus"),
    92: _watch("high rate of single-bit ECC errors"),
    93: _watch("InfoROM wear"),
    94: _app("contained ECC error"),
    95: _reset("uncontained ECC error"),
    109: _watch("context switch timeout", repeat=2),
    110: _reset("security fault"),
    119: _reset("GSP call timeout"),
    120: _reset("GSP error"),
    121: _watch("chip-to-chip link corrected error"),
    136: _reset("link training failed"),
    137: _watch("NVLink privilege error"),
    140: _reset("unrecovered ECC error"),
    143: _reset("GPU initialization failed"),
    # 144 to 150: NVLink 5. An event carries no sub-code, and only that tells whether the error was fatal; the kernel's
    # log says so (`FATAL`), and a fatal one also raises the recovery-action field, which is read at every look.
    **{number: _watch("NVLink 5 error") for number in range(144, 151)},
    151: _reboot("confidential-computing key rotation error"),
    154: _log_only("recovery action changed"),
    155: _reset("NVLink software error"),
    156: _reset("resource retirement"),
    157: _watch("resource retirement failed"),
    158: _reset("fatal timeout"),
    161: _watch("resource retirement failed"),
    166: _reset("NVLink secure fault"),
    167: _reset("PCIe fatal timeout"),
    169: _reset("SEC2 halt"),
    170: _reset("NVLink crypto error"),
    172: _reset("uncorrectable SRAM error"),
    173: _reset("chip-to-chip link fatal error"),
}

# A number that nobody has classified yet. The driver's own verdict, the recovery-action field, is read beside it, so
# an unknown event by itself costs a degraded word and not the node.
UNKNOWN: Final = _watch("not in the table", repeat=3)


def rule(number: int) -> XidRule:
    """The rule for an XID number; `UNKNOWN` where the table has none."""
    return XIDS.get(number, UNKNOWN)


# What a line of the kernel's log that calls one of NVLink 5's errors fatal means.
FATAL: Final = _reset("NVLink 5 fatal error")
NVLINK_5: Final = frozenset(range(144, 151))


def explained(number: int, together: frozenset[int]) -> bool:
    """Whether `number` only follows from another XID of the same look: 45 is the clean-up after an error."""
    return number == 45 and bool(together - {45})
