"""The provider `nvml`: telemetry and faults of every GPU through NVIDIA's management library (nvml.h).

The library is initialized once and held: initialization serializes over all processes of a machine. Each return code
is one of three things: a value, "not measured" (the GPU or our rights do not give it), or a fault; a code that is not
listed is a fault. Calls may hang for ever, so this runs only in the prober child.

XIDs come two ways, for neither brings all of them: as events of the library, and from the kernel's log.
"""

import time
from pathlib import Path
from typing import Any, Final

from gpuhealthd.kernel_log import KernelLog, Xid
from gpuhealthd.nvml_codes import INFOROM_CORRUPT, NOT_MEASURED, TIMEOUT, UNKNOWN_CODE, fault_of
from gpuhealthd.nvml_device import DeviceLook, pynvml, unlisted_id
from gpuhealthd.snapshot import Device, Snapshot, label

_EVENT_XID: Final = 0x08  # nvmlEventTypeXidCriticalError
_EVENT_UNAVAILABLE: Final = 0x4000  # nvmlEventTypeGpuUnavailableError
_EVENTS: Final = _EVENT_XID | _EVENT_UNAVAILABLE
_MAX_EVENTS: Final = 64


class NvmlProvider:
    """Reads all GPUs. `look` never raises for anything that NVML answers.

    Args:
        kernel_log: the kernel's log; what cannot be read there is missing, and no fault.
        after: the last of its records that was taken into account already.
    """

    def __init__(self, kernel_log: Path, after: int) -> None:
        self._initialized = False
        self._driver = 0
        self._uuids: dict[int, str] = {}  # by index: a GPU that no longer answers is still the one that it was
        self._pci: dict[str, str] = {}  # address → id
        self._inforom: dict[str, str | None] = {}
        self._events: _Events | None = None
        self._log = KernelLog(kernel_log, after)

    def look(self) -> Snapshot:
        """One snapshot; provider-wide faults when the library, the driver or the count is out of reach."""
        taken = time.monotonic()
        if pynvml is None:
            return Snapshot("nvml", taken, faults=("binding-missing",))
        try:
            if not self._initialized:
                pynvml.nvmlInit()
                self._initialized = True
                self._driver = _major(pynvml.nvmlSystemGetDriverVersion)
            count = pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError as error:
            return Snapshot("nvml", taken, faults=(fault_of(error.value) or UNKNOWN_CODE,))
        looks = [DeviceLook(index, self._uuids.get(index), self._driver) for index in range(min(count, 64))]
        for look in looks:
            look.identify()
            if look.pci:
                self._pci[look.pci] = look.id
        open_looks = [look for look in looks if look.handle is not None]
        self._events = self._events or _Events()
        events = self._events.drain(open_looks)
        for look in open_looks:
            self._check_inforom(look)
            if look.id in self._events.unavailable:
                look.fault("gpu-unavailable")
        logged = self._logged()
        devices = []
        for look in looks:
            self._uuids[look.index] = look.id
            devices.append(look.read(tuple(events.get(look.id, ())), tuple(logged.pop(look.id, ()))))
        devices.extend(_unlisted(name, xids) for name, xids in logged.items())
        unique = {device.id: device for device in devices[:64]}
        return Snapshot("nvml", taken, tuple(unique.values()), log_position=self._log.position)

    def _check_inforom(self, look: DeviceLook) -> None:
        """Validates it once and remembers what it is; an answer that says nothing of it, a timeout, is asked again."""
        if look.id in self._inforom:
            known = self._inforom[look.id]
            if known is not None:
                look.fault(known)
            return
        fault = look.check_inforom()
        if fault in {None, INFOROM_CORRUPT}:
            self._inforom[look.id] = fault

    def _logged(self) -> dict[str, list[Xid]]:
        """New XIDs of the kernel's log by device id, also of GPUs that NVML does not list."""
        found: dict[str, list[Xid]] = {}
        for xid in self._log.read():
            found.setdefault(self._pci.get(xid.pci, unlisted_id(xid.pci)), []).append(xid)
        return found


def _unlisted(name: str, xids: list[Xid]) -> Device:
    """A GPU that the kernel speaks of and NVML does not list: one that is missing, until it is listed."""
    numbers = tuple(xid.number for xid in xids)
    return Device(name, "NVIDIA GPU", faults=("device-missing",), log_xids=numbers[:64])


def _major(version: Any) -> int:
    """The driver's major version, or 0."""
    try:
        text = str(version()).partition(".")[0]
    except pynvml.NVMLError:
        return 0
    return int(text) if text.isdecimal() else 0


class _Events:
    """The driver's events. Not every XID arrives this way, and a GPU without events is no fault.

    Attributes:
        unavailable: devices that the driver has called unavailable, until this process ends.
    """

    def __init__(self) -> None:
        self.unavailable: set[str] = set()
        self._registered: set[str] = set()
        self._set: Any = None

    def drain(self, looks: list[DeviceLook]) -> dict[str, list[int]]:
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
                uuid = label(pynvml.nvmlDeviceGetUUID(event.device))
                if event.eventType == _EVENT_XID:
                    found.setdefault(uuid, []).append(min(int(event.eventData), 100_000))
                elif event.eventType == _EVENT_UNAVAILABLE:
                    self.unavailable.add(uuid)
        except pynvml.NVMLError as error:
            # A timeout only says that there are no more. Whatever else is wrong shows in the GPU's own calls.
            if error.value not in {TIMEOUT} | NOT_MEASURED:
                self._reset()
        return found

    def _register(self, look: DeviceLook) -> None:
        if look.id in self._registered:
            return
        wanted = pynvml.nvmlDeviceGetSupportedEventTypes(look.handle) & _EVENTS
        if wanted:
            pynvml.nvmlDeviceRegisterEvents(look.handle, wanted, self._set)
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
