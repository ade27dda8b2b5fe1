"""nvmlReturn_t (nvml.h): what each return code means. The names differ between bindings, the numbers are ABI."""

from typing import Final

TIMEOUT: Final = 10
INFOROM_CORRUPT: Final = "inforom-corrupt"
NOT_MEASURED: Final = frozenset({2, 3, 4, 6, 7, 13, 21, 22, 25, 26, 27})
FAULT_CODES: Final[dict[int, str]] = {
    8: "power-missing",
    9: "driver-not-loaded",
    10: "nvml-timeout",
    11: "nvml-irq",
    12: "driver-missing",
    14: INFOROM_CORRUPT,
    15: "gpu-lost",
    16: "reset-required",
    17: "blocked-by-os",
    18: "driver-mismatch",
    20: "nvml-memory",
    28: "device-missing",
}
UNKNOWN_CODE: Final = "nvml-unknown"


def fault_of(code: int) -> str | None:
    """The stable fault code for an nvmlReturn_t, or None where it only means "not measured"."""
    if code in NOT_MEASURED:
        return None
    return FAULT_CODES.get(code, UNKNOWN_CODE)
