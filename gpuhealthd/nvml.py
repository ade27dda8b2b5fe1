"""The provider `nvml`: telemetry and faults of every GPU through NVIDIA's management library (nvml.h).

The library is initialized once and held: initialization serializes over all processes of a machine. Each return code
is one of three things: a value, "not measured" (the GPU or our rights do not give it), or a fault; a code that is not
listed is a fault. Calls may hang for ever, so this runs only in the prober child.
"""

import time
from collections.abc import Callable
from typing import Any, Final

from gpuhealthd.snapshot import Device, Reading, Snapshot, Unit, label

try:
    import pynvml
except ImportError:  # the extra is not installed: said in the verdict
    pynvml = None

_FIELD_RECOVERY_ACTION: Final = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION; older bindings lack the name
_FIELD_MEMORY_TEMPERATURE: Final = 82  # NVML_FI_DEV_MEMORY_TEMP
_EVENT_XID: Final = 0x08  # nvmlEventTypeXidCriticalError
_GPU_MAX, _MEMORY_MAX = 3, 2  # NVML_TEMPERATURE_THRESHOLD_*
_CORRECTED, _UNCORRECTED, _VOLATILE = 0, 1, 0
_MAX_EVENTS: Final = 64

# nvmlReturn_t by number: the names differ between versions of the binding, the numbers are ABI.
NOT_MEASURED: Final = frozenset({2, 3, 4, 6, 7, 13, 21, 22, 25, 26, 27})
FAULT_CODES: Final[dict[int, str]] = {
    8: "power-missing",
    9: "driver-not-loaded",
    10: "nvml-timeout",
    11: "nvml-irq",
    12: "driver-missing",
    14: "inforom-corrupt",
    15: "gpu-lost",
    16: "reset-required",
    17: "blocked-by-os",
    18: "driver-mismatch",
    20: "nvml-memory",
    28: "device-missing",
}
_UNKNOWN_CODE: Final = "nvml-unknown"
_TIMEOUT: Final = 10


def fault_of(code: int) -> str | None:
    """The stable fault code for an nvmlReturn_t, or None where it only means "not measured"."""
    if code in NOT_MEASURED:
        return None
    return FAULT_CODES.get(code, _UNKNOWN_CODE)


class NvmlProvider:
    """Reads all GPUs. `look` never raises for anything that NVML answers."""

    def __init__(self) -> None:
        self._initialized = False
        self._uuids: dict[int, str] = {}  # by index: a GPU that no longer answers is still the one that it was
        self._events: _XidEvents | None = None

    def look(self) -> Snapshot:
        """One snapshot; provider-wide faults when the library, the driver or the count is out of reach."""
        taken = time.monotonic()
        if pynvml is None:
            return Snapshot("nvml", taken, faults=("binding-missing",))
        try:
            if not self._initialized:
                pynvml.nvmlInit()
                self._initialized = True
            count = pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError as error:
            return Snapshot("nvml", taken, faults=(fault_of(error.value) or _UNKNOWN_CODE,))
        looks = [_DeviceLook(index, self._uuids.get(index)) for index in range(min(count, 64))]
        for look in looks:
            look.identify()
        if self._events is None:
            self._events = _XidEvents()
        xids = self._events.drain([look for look in looks if look.handle is not None])
        devices = []
        for look in looks:
            self._uuids[look.index] = look.id
            devices.append(look.read(tuple(xids.get(look.id, ()))))
        return Snapshot("nvml", taken, tuple({device.id: device for device in devices}.values()))


class _DeviceLook:
    """One look at one GPU: collects readings, and faults from return codes."""

    def __init__(self, index: int, known: str | None) -> None:
        self.index = index
        self.id = known or f"gpu{index}"
        self.name = "NVIDIA GPU"
        self.handle: Any = None
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

    def read(self, xids: tuple[int, ...]) -> Device:
        """Every quantity, the driver's own verdict first; a lost GPU is not asked further."""
        if self.handle is not None:
            self._field("recovery_action", _FIELD_RECOVERY_ACTION, "enum")
            for part in (self._thermal, self._memory, self._errors, self._modes, self._link):
                if "gpu-lost" in self._faults:
                    break
                part()
        return Device(self.id, self.name, tuple(self._readings), tuple(self._faults)[:16], xids)

    def _thermal(self) -> None:
        self._value("temperature_c", "celsius", pynvml.nvmlDeviceGetTemperature, 0)
        self._value("temperature_limit_c", "celsius", pynvml.nvmlDeviceGetTemperatureThreshold, _GPU_MAX)
        self._field("memory_temperature_c", _FIELD_MEMORY_TEMPERATURE, "celsius")
        self._value("memory_temperature_limit_c", "celsius", pynvml.nvmlDeviceGetTemperatureThreshold, _MEMORY_MAX)
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
        self._values(
            ("remap_corrected", "remap_uncorrected", "remap_pending", "remap_failure"),
            self._call(pynvml.nvmlDeviceGetRemappedRows, self.handle),
        )
        repair = getattr(pynvml, "nvmlDeviceGetRepairStatus", None)
        pending = None if repair is None else self._call(repair, self.handle)
        self._add("repair_pending", "count", None if pending is None else int(any(pending)))

    def _modes(self) -> None:
        self._values(("ecc_mode", "ecc_mode_pending"), self._call(pynvml.nvmlDeviceGetEccMode, self.handle))
        self._values(("mig_mode", "mig_mode_pending"), self._call(pynvml.nvmlDeviceGetMigMode, self.handle))
        self._value("persistence_mode", "enum", pynvml.nvmlDeviceGetPersistenceMode)

    def _link(self) -> None:
        self._value("pcie_width", "count", pynvml.nvmlDeviceGetCurrPcieLinkWidth)
        self._value("pcie_width_max", "count", pynvml.nvmlDeviceGetMaxPcieLinkWidth)
        self._value("pcie_generation", "count", pynvml.nvmlDeviceGetCurrPcieLinkGeneration)
        self._value("pcie_generation_max", "count", pynvml.nvmlDeviceGetMaxPcieLinkGeneration)

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
        member = _UNION.get(answer.valueType, "uiVal")
        self._add(name, unit, getattr(answer.value, member))


# nvmlValueType_t → member of the union nvmlValue_t.
_UNION: Final = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}


class _XidEvents:
    """The driver's XID events. Not every XID arrives this way, and a GPU without events is no fault."""

    def __init__(self) -> None:
        self._registered: set[str] = set()
        self._set: Any = None

    def drain(self, looks: list[_DeviceLook]) -> dict[str, list[int]]:
        """XID numbers since the call before, by device id; never waits."""
        found: dict[str, list[int]] = {}
        try:
            if self._set is None:
                self._set = pynvml.nvmlEventSetCreate()
            for look in looks:
                self._register(look)
            if not self._registered:
                return found
            for _ in range(_MAX_EVENTS):
                event = pynvml.nvmlEventSetWait_v2(self._set, 0)
                if event.eventType == _EVENT_XID:
                    uuid = label(pynvml.nvmlDeviceGetUUID(event.device))
                    found.setdefault(uuid, []).append(min(int(event.eventData), 100_000))
        except pynvml.NVMLError as error:
            # A timeout only says that there are no more. Whatever else is wrong shows in the GPU's own calls.
            if error.value not in {_TIMEOUT} | NOT_MEASURED:
                self._reset()
        return found

    def _register(self, look: _DeviceLook) -> None:
        if look.id in self._registered:
            return
        if pynvml.nvmlDeviceGetSupportedEventTypes(look.handle) & _EVENT_XID:
            pynvml.nvmlDeviceRegisterEvents(look.handle, _EVENT_XID, self._set)
            self._registered.add(look.id)

    def _reset(self) -> None:
        # nvml.h: after a failed registration the set is undefined and has to be freed.
        self._registered.clear()
        try:
            pynvml.nvmlEventSetFree(self._set)
        except pynvml.NVMLError:
            pass
        finally:
            self._set = None
