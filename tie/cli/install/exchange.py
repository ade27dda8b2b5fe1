"""Another version for a running node: out of service and drained, exchanged, started again, in service.

CloudBoard tells devices "busy" meanwhile, and nobody answers for the second in which it is started anew: who asks then
asks again. No request that was accepted is cut off.
"""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from tie.cli import control
from tie.cli.install.machine import KEYS, RUN, TARGET, Machine
from tie.daemon.errors import PeerError, PeerTimeoutError, TieError
from tie.proto import control_pb2

_DRAIN_S = 900.0
_START_S = 300.0


@dataclass
class Drain:
    """Takes the node out of service and waits until it works on nothing."""

    machine: Machine
    units: list[str]
    says: str = "the node goes out of service and ends what it works on"

    def do(self) -> None:
        """Asks the controller, and waits.

        Raises:
            TieError: there is none, or requests do not end; the node is in service again.
        """
        try:
            asyncio.run(_withdraw())
        except TieError:
            asyncio.run(_return())
            raise

    def undo(self) -> None:
        """Starts the node again, with what it had before."""
        start_anew(self.machine, self.units)


@dataclass
class Restart:
    """Starts the node again and waits until it is available."""

    machine: Machine
    units: list[str]
    says: str = "the node starts again, and is available"

    def do(self) -> None:
        """Stops every unit, starts them, waits.

        Raises:
            TieError: the node does not come up.
        """
        start_anew(self.machine, self.units)
        asyncio.run(_come_up())

    def undo(self) -> None:
        """Nothing: what was before is started once the rest has been taken back."""


def stop(machine: Machine, units: list[str]) -> None:
    """Stops a node and returns when every process of it has ended.

    Args:
        machine: where it runs.
        units: all of its units; templates stand for their instances. Its keys stay.
    """
    single = [unit for unit in units if "@" not in unit and unit not in (TARGET, KEYS) and not unit.endswith(".slice")]
    instances = [unit.replace("@", "@*") for unit in units if "@" in unit]
    machine.run("systemctl", "stop", TARGET, *single, *instances)


def start_anew(machine: Machine, units: list[str]) -> None:
    """Stops a node, reads its units again and starts it."""
    stop(machine, units)
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "start", TARGET)


async def _withdraw() -> None:
    async with control.connected(Path(RUN)) as connection:
        request = control_pb2.SetMaintenanceRequest(on=True, reason="upgrade")
        await connection.node.SetMaintenance(request, timeout=control.CALL_S)
        async for status in connection.node.Watch(control_pb2.WatchRequest(), timeout=_DRAIN_S):
            if status.state == control_pb2.STATE_MAINTENANCE and not status.in_flight:
                return
    raise PeerError("the controller ended its reports early")


async def _return() -> None:
    async with control.connected(Path(RUN)) as connection:
        request = control_pb2.SetMaintenanceRequest(on=False, reason="upgrade")
        await connection.node.SetMaintenance(request, timeout=control.CALL_S)


async def _come_up() -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        try:
            async with control.connected(Path(RUN)) as connection:
                async for status in connection.node.Watch(control_pb2.WatchRequest(), timeout=_START_S):
                    if status.state == control_pb2.STATE_AVAILABLE:
                        return
        except PeerError:  # the controller is not there yet
            await asyncio.sleep(0.2)
    raise PeerTimeoutError(f"the node was not available within {_START_S:g} s")
