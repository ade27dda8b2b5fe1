"""One look at one GPU through NVML (nvml.h): readings, and faults from return codes."""

from collections.abc import Callable
from ctypes import byref
from typing import Any, Final

from gpuhealthd.kernel_log import Xid
from gpuhealthd.nvml_codes import fault_of
from gpuhealthd.snapshot import Device, Reading, Unit, label

try:
    import pynvml as pynvml  # noqa: PLC0414 (also for `gpuhealthd.nvml`)
except ImportError:  # the extra is not installed: `gpuhealthd.nvml` says so in the verdict
    pynvml = None

# Field numbers of nvml.h: older bindings lack the names.
_FIELD_CRC, _FIELD_REPLAY, _FIELD_RECOVERY = 38, 52, 59  # NVML_FI_DEV_NVLINK_*_ERROR_COUNT_TOTAL
_FIELD_MEMORY_TEMPERATURE: Final = 82
_FIELD_SLOWDOWN_MARGIN: Final = 194  # TEMPERATURE_SLOWDOWN_TLIMIT
_FIELD_RECOVERY_ACTION: Final = 230  # GET_GPU_RECOVERY_ACTION
_GPU_MAX, _MEMORY_MAX = 3, 2  # NVML_TEMPERATURE_THRESHOLD_*
_CORRECTED, _UNCORRECTED, _VOLATILE = 0, 1, 0
_SINGLE_BIT, _DOUBLE_BIT = 0, 1  # NVML_PAGE_RETIREMENT_CAUSE_*
_THERMAL_POLICY: Final = 1
_MAX_LINKS: Final = 36
_FABRIC_SINCE: Final = 550  # older drivers crash on that call
# nvmlValueType_t → member of the union nvmlValue_t.
_UNION: Final = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}


def unlisted_id(pci: str) -> str:
    """The id of a GPU of which nothing but its address is known."""
    return label(f"pci {pci}")


class DeviceLook:
    """Collects what one GPU says.

    Args:
        index: NVML's, at this moment.
        known: its id from an earlier look.
        driver: the driver's major version; 0 when unknown.
    """

    def __init__(self, index: int, known: str | None, driver: int) -> None:
        self.index = index
        self.id = known or f"gpu{index}"
        self.name = "NVIDIA GPU"
        self.pci = ""
        self.handle: Any = None
        self._driver = driver
        self._readings: list[Reading] = []
        self._faults: dict[str, None] = {}

    def identify(self) -> None:
        """Opens the GPU by its index and learns its UUID. The library re-binds indices, hence at every look."""
        self.handle = self._call(pynvml.nvmlDeviceGetHandleByIndex, self.index)
        if self.handle is None:
            if not self._faults:  # a GPU that is counted and cannot be opened, even "for lack of rights", is no GPU
                self._faults["device-missing"] = None
            return
        self.id = label(self._call(pynvml.nvmlDeviceGetUUID, self.handle) or self.id)
        self.name = label(self._call(pynvml.nvmlDeviceGetName, self.handle) or self.name)
        pci = self._call(pynvml.nvmlDeviceGetPciInfo_v3, self.handle)
        if pci is not None:
            self.pci = f"{pci.domain:x}:{pci.bus:x}:{pci.device:x}"

    def check_inforom(self) -> str | None:
        """Validates the InfoROM, which reads flash memory; the fault, which is noted, or None."""
        try:
            pynvml.nvmlDeviceValidateInforom(self.handle)
        except pynvml.NVMLError as error:
            self._note(error.value)
            return fault_of(error.value)
        return None

    def fault(self, code: str) -> None:
        """Notes a fault that was found elsewhere."""
        self._faults[code] = None

    def read(self, events: tuple[int, ...], logged: tuple[Xid, ...]) -> Device:
        """Every quantity, the driver's own verdict first; a lost GPU is not asked further."""
        if self.handle is not None:
            self._field("recovery_action", _FIELD_RECOVERY_ACTION, "enum")
            parts = (self._thermal, self._memory, self._errors, self._retired, self._modes, self._pcie, self._nvlink)
            for part in (*parts, self._fabric, self._confidential):
                if "gpu-lost" in self._faults:
                    break
                part()
        return Device(
            self.id,
            self.name,
            tuple(self._readings),
            tuple(self._faults)[:16],
            xids=events,
            log_xids=tuple(xid.number for xid in logged),
            fatal_xids=tuple(xid.number for xid in logged if xid.fatal),
            formerly=unlisted_id(self.pci) if self.pci else None,
        )

    def _thermal(self) -> None:
        self._value("temperature_c", "celsius", pynvml.nvmlDeviceGetTemperature, 0)
        self._value("temperature_limit_c", "celsius", pynvml.nvmlDeviceGetTemperatureThreshold, _GPU_MAX)
        self._field("memory_temperature_c", _FIELD_MEMORY_TEMPERATURE, "celsius")
        self._value("memory_temperature_limit_c", "celsius", pynvml.nvmlDeviceGetTemperatureThreshold, _MEMORY_MAX)
        self._value("thermal_margin_c", "celsius", pynvml.nvmlDeviceGetMarginTemperature)
        self._field("thermal_margin_limit_c", _FIELD_SLOWDOWN_MARGIN, "celsius")
        violation = self._call(pynvml.nvmlDeviceGetViolationStatus, self.handle, _THERMAL_POLICY)
        self._add("thermal_violation_ns", "count", None if violation is None else violation.violationTime)
        milliwatts = self._call(pynvml.nvmlDeviceGetPowerUsage, self.handle)
        self._add("power_w", "watts", None if milliwatts is None else milliwatts / 1000)
        self._value("clock_events", "mask", pynvml.nvmlDeviceGetCurrentClocksEventReasons)

    def _memory(self) -> None:
        memory = self._call(pynvml.nvmlDeviceGetMemoryInfo, self.handle)
        self._add("memory_used_bytes", "bytes", None if memory is None else memory.used)
        self._add("memory_total_bytes", "bytes", None if memory is None else memory.total)
        utilization = self._call(pynvml.nvmlDeviceGetUtilizationRates, self.handle)
        self._add("utilization", "percent", None if utilization is None else utilization.gpu)

    def _errors(self) -> None:
        self._value("ecc_uncorrected_volatile", "count", pynvml.nvmlDeviceGetTotalEccErrors, _UNCORRECTED, _VOLATILE)
        self._value("ecc_corrected_volatile", "count", pynvml.nvmlDeviceGetTotalEccErrors, _CORRECTED, _VOLATILE)
        sram = pynvml.c_nvmlEccSramErrorStatus_v1_t()
        known = self._call(pynvml.nvmlDeviceGetSramEccErrorStatus, self.handle, byref(sram))
        self._add("sram_threshold", "enum", None if known is None else sram.bThresholdExceeded)
        self._values(
            ("remap_corrected", "remap_uncorrected", "remap_pending", "remap_failure"),
            self._call(pynvml.nvmlDeviceGetRemappedRows, self.handle),
        )
        pending = self._call(pynvml.nvmlDeviceGetRepairStatus, self.handle)
        self._add("repair_pending", "count", None if pending is None else int(any(pending)))

    def _retired(self) -> None:
        # Before Ampere: whole pages instead of rows.
        for name, cause in (("retired_single", _SINGLE_BIT), ("retired_double", _DOUBLE_BIT)):
            pages = self._call(pynvml.nvmlDeviceGetRetiredPages, self.handle, cause)
            self._add(name, "count", None if pages is None else len(pages))
        self._value("retired_pending", "enum", pynvml.nvmlDeviceGetRetiredPagesPendingStatus)

    def _modes(self) -> None:
        self._values(("ecc_mode", "ecc_mode_pending"), self._call(pynvml.nvmlDeviceGetEccMode, self.handle))
        self._values(("mig_mode", "mig_mode_pending"), self._call(pynvml.nvmlDeviceGetMigMode, self.handle))
        self._value("persistence_mode", "enum", pynvml.nvmlDeviceGetPersistenceMode)

    def _pcie(self) -> None:
        self._value("pcie_width", "count", pynvml.nvmlDeviceGetCurrPcieLinkWidth)
        self._value("pcie_width_max", "count", pynvml.nvmlDeviceGetMaxPcieLinkWidth)
        self._value("pcie_generation", "count", pynvml.nvmlDeviceGetCurrPcieLinkGeneration)
        self._value("pcie_generation_max", "count", pynvml.nvmlDeviceGetMaxPcieLinkGeneration)
        self._value("pcie_replays", "count", pynvml.nvmlDeviceGetPcieReplayCounter)

    def _nvlink(self) -> None:
        states = []
        for link in range(_MAX_LINKS):
            state = self._call(pynvml.nvmlDeviceGetNvLinkState, self.handle, link)
            if state is None:  # no such link, or no links at all
                break
            states.append(state)
        self._add("nvlink_active", "count", states.count(1) if states else None)
        self._add("nvlink_inactive", "count", len(states) - states.count(1) if states else None)
        for name, field in (
            ("nvlink_crc", _FIELD_CRC),
            ("nvlink_replays", _FIELD_REPLAY),
            ("nvlink_recoveries", _FIELD_RECOVERY),
        ):
            self._field(name, field, "count")

    def _fabric(self) -> None:
        names = ("fabric_state", "fabric_status", "fabric_health")
        if self._driver < _FABRIC_SINCE:
            self._values(names, None)
            return
        info = pynvml.c_nvmlGpuFabricInfo_v2_t()
        known = self._call(pynvml.nvmlDeviceGetGpuFabricInfoV, self.handle, byref(info))
        self._values(names, None if known is None else (info.state, info.status, info.healthMask))

    def _confidential(self) -> None:
        # Of the whole machine, and said of each GPU: that is where an operator looks.
        state = self._call(pynvml.nvmlSystemGetConfComputeState)
        names = ("cc_environment", "cc_feature", "cc_devtools")
        self._values(names, None if state is None else (state.environment, state.ccFeature, state.devToolsMode))
        ready = self._call(pynvml.nvmlSystemGetConfComputeGpusReadyState)
        self._add("cc_ready", "enum", ready)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The function's answer, or None with the fault noted when the return code is one."""
        try:
            return function(*arguments)
        except pynvml.NVMLError as error:
            self._note(error.value)
            return None

    def _note(self, code: int) -> None:
        fault = fault_of(code)
        if fault is not None:
            self._faults[fault] = None

    def _add(self, name: str, unit: Unit, value: float | None) -> None:
        self._readings.append(Reading(name, None if value is None else float(value), unit))

    def _value(self, name: str, unit: Unit, function: Callable[..., Any], *arguments: Any) -> None:
        self._add(name, unit, self._call(function, self.handle, *arguments))

    def _values(self, names: tuple[str, ...], values: Any) -> None:
        for position, name in enumerate(names):
            self._add(name, "count", None if values is None else values[position])

    def _field(self, name: str, field: int, unit: Unit) -> None:
        answers = self._call(pynvml.nvmlDeviceGetFieldValues, self.handle, [field])
        if answers is None:
            self._add(name, unit, None)
            return
        answer = answers[0]
        if answer.nvmlReturn != 0:  # each field has a return code of its own
            self._note(answer.nvmlReturn)
            self._add(name, unit, None)
            return
        self._add(name, unit, getattr(answer.value, _UNION.get(answer.valueType, "uiVal")))
