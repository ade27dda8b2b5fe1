"""Verdicts, actions, readings, and the end of a daemon's child."""

import asyncio
from pathlib import Path

from tie.proto import gpuhealth_pb2

HEALTHY = gpuhealth_pb2.VERDICT_HEALTHY
DEGRADED = gpuhealth_pb2.VERDICT_DEGRADED
UNAVAILABLE = gpuhealth_pb2.VERDICT_UNAVAILABLE
NONE, RECYCLE = gpuhealth_pb2.ACTION_NONE, gpuhealth_pb2.ACTION_RECYCLE_RUNTIME
RESET, REBOOT, SERVICE = gpuhealth_pb2.ACTION_RESET_GPU, gpuhealth_pb2.ACTION_REBOOT, gpuhealth_pb2.ACTION_SERVICE


def readings(device: gpuhealth_pb2.DeviceVerdict) -> dict[str, float | None]:
    """What was read of a device; None is not measured."""
    return {reading.name: reading.value if reading.measured else None for reading in device.readings}


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until_dead(pid: int) -> None:
    """Waits for a process's end."""
    async with asyncio.timeout(30):
        while alive(pid):
            await asyncio.sleep(0.02)
