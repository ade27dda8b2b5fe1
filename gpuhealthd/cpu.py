"""The provider `cpu`: a node without GPUs looks at what it runs on instead.

A choice of the operator, never a fallback. Everything is read afresh at each look, from psutil and /proc.
"""

import os
import platform
import time
from pathlib import Path

import psutil

from gpuhealthd.snapshot import Device, Reading, Snapshot, Unit, label

_PRESSURE = Path("/proc/pressure/memory")


class CpuProvider:
    """Reads memory, load, temperatures and memory pressure."""

    def __init__(self, pressure: Path = _PRESSURE) -> None:
        self._pressure = pressure

    def look(self) -> Snapshot:
        """One snapshot with the single device `cpu0`."""
        taken = time.monotonic()
        stall = read_pressure(self._pressure)
        readings = (
            *_memory(),
            _reading("load1_per_core", _load_per_core(), "ratio"),
            _reading("temperature_c", _hottest(), "celsius"),
            _reading("memory_some_avg10", stall.get("some"), "percent"),
            _reading("memory_full_avg10", stall.get("full"), "percent"),
        )
        name = label(platform.processor() or platform.machine())
        return Snapshot("cpu", taken, (Device("cpu0", name, readings),))


def read_pressure(path: Path) -> dict[str, float]:
    """The avg10 values of a PSI file (kernel documentation, accounting/psi), by line: "some" and "full", in percent.

    A line or a value that is not there or makes no sense is left out; a kernel without PSI gives nothing.
    """
    found: dict[str, float] = {}
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return found
    for line in lines:
        kind, _, rest = line.partition(" ")
        for part in rest.split():
            key, _, text = part.partition("=")
            if kind in {"some", "full"} and key == "avg10":
                try:
                    value = float(text)
                except ValueError:
                    continue
                if 0.0 <= value <= 100.0:
                    found[kind] = value
    return found


def _reading(name: str, value: float | None, unit: Unit) -> Reading:
    return Reading(name, None if value is None else float(value), unit)


def _memory() -> tuple[Reading, Reading]:
    try:
        memory = psutil.virtual_memory()
    except (OSError, ValueError, KeyError, RuntimeError):
        return _reading("available_bytes", None, "bytes"), _reading("total_bytes", None, "bytes")
    return _reading("available_bytes", memory.available, "bytes"), _reading("total_bytes", memory.total, "bytes")


def _load_per_core() -> float | None:
    try:
        return os.getloadavg()[0] / len(os.sched_getaffinity(0))
    except OSError:
        return None


def _hottest() -> float | None:
    try:
        zones = psutil.sensors_temperatures()
    except (OSError, ValueError, RuntimeError):
        return None
    # Sensors that are not connected report zero or nonsense below it.
    values = [entry.current for entries in zones.values() for entry in entries if entry.current and entry.current > 0]
    return max(values) if values else None
