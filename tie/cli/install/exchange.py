"""Another version for a running node: out of service and drained, exchanged, started again, in service.

CloudBoard tells devices "busy" meanwhile, and nobody answers for the second in which it is started anew: who asks then
asks again. No request that was accepted is cut off, unless that is asked for.
"""

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tie.assets import active
from tie.cli import control
from tie.cli.activate import activate_bundle
from tie.cli.install.machine import KEYS, MAINTENANCE, RUN, TARGET, Machine
from tie.daemon.errors import PeerError, PeerTimeoutError
from tie.proto import control_pb2

_DRAIN_S = 900.0
_START_S = 300.0
_AGAIN_S = 0.2


@dataclass
class Exchange:
    """What comes before anything of a running node is exchanged; taken back last, it starts the node as it was.

    Attributes:
        machine: where it runs.
        units: all of its units.
        drained: whether it is out of service and works on nothing before anything changes; else that is cut off.
    """

    machine: Machine
    units: list[str]
    drained: bool
    _rested: bool = False  # an operator held it out of service before, and goes on doing so
    _asked: bool = False
    _free: bool = False

    @property
    def says(self) -> str:
        """What it does."""
        if self.drained:
            return "the node goes out of service and ends what it works on"
        return "the node is exchanged at once: what it works on is cut off"

    def do(self) -> None:
        """Asks the controller, and waits.

        Raises:
            TieError: there is none, or requests do not end.
        """
        self._rested = self.machine.at(MAINTENANCE).exists()
        if self.drained:
            asyncio.run(self._withdraw())
        self._free = True

    def undo(self) -> None:
        """Starts the node again, with what it had before; or puts it in service again, if that was not yet due."""
        if self._free:
            self.start()
        elif self._asked and not self._rested:
            asyncio.run(_return())

    def start(self) -> None:
        """Starts the node with what it has now, out of service only where it was before all this."""
        start_anew(self.machine, self.units, rested=self._rested)

    async def _withdraw(self) -> None:
        async with control.connected(Path(RUN)) as connection:
            self._asked = True
            await control.maintain(connection, on=True, reason="upgrade")
            await control.reach(connection, control_pb2.STATE_MAINTENANCE, _DRAIN_S)

    async def come_up(self) -> None:
        """Waits until the node is as available as before.

        Raises:
            PeerTimeoutError: it is not in time.
        """
        state = control_pb2.STATE_MAINTENANCE if self._rested else control_pb2.STATE_AVAILABLE
        try:
            async with asyncio.timeout(_START_S):
                while True:
                    try:
                        async with control.connected(Path(RUN)) as connection:
                            return await control.reach(connection, state, _START_S)
                    except PeerError:  # the controller is not there yet
                        await asyncio.sleep(_AGAIN_S)
        except TimeoutError:
            raise PeerTimeoutError(f"the node was not there again within {_START_S:g} s") from None


@dataclass
class Restart:
    """What comes after: the node starts with what it has now."""

    exchange: Exchange
    says: str = "the node starts again, and is as available as before"

    def do(self) -> None:
        """Stops every unit, starts them, waits.

        Raises:
            TieError: the node does not come up.
        """
        self.exchange.start()
        asyncio.run(self.exchange.come_up())

    def undo(self) -> None:
        """Nothing: `Exchange` starts what was before, once the rest has been taken back."""


@dataclass
class Activate:
    """Another model for a running node, whose version stays: only its runtime is exchanged (`tie assets activate`).

    Attributes:
        machine: where it runs.
        units: all of its units.
        link: what its configuration names.
        bundle: where the link shall lead, relative to it.
    """

    machine: Machine
    units: list[str]
    says: str
    link: PurePosixPath
    bundle: PurePosixPath
    _before: str = ""
    _rested: bool = False

    def do(self) -> None:
        """Withdraws the node, exchanges model and runtime, and lets it return.

        Raises:
            TieError: requests do not end, or the node does not come up with that model.
        """
        self._rested = self.machine.at(MAINTENANCE).exists()
        self._before = self.machine.link(self.link)
        activate_bundle(Path(RUN), self.machine.at(self.link.parent / self.bundle))

    def undo(self) -> None:
        """Starts the node with the model that it had; nothing where it was only withdrawn, and is back."""
        link = self.machine.at(self.link)
        if not self._before:
            return
        if os.path.realpath(link) == os.path.realpath(link.parent / self._before):
            if self._rested or not self.machine.at(MAINTENANCE).exists():
                return
        else:
            active.point(link, link.parent / self._before)
        start_anew(self.machine, self.units, rested=self._rested)


def stop(machine: Machine, units: list[str]) -> None:
    """Stops a node and returns when every process of it has ended.

    Args:
        machine: where it runs.
        units: all of its units; templates stand for their instances. Its keys stay.
    """
    single = [unit for unit in units if "@" not in unit and unit not in (TARGET, KEYS) and not unit.endswith(".slice")]
    instances = [unit.replace("@", "@*") for unit in units if "@" in unit]
    machine.run("systemctl", "stop", TARGET, *single, *instances)


def start_anew(machine: Machine, units: list[str], *, rested: bool) -> None:
    """Stops a node, reads its units again and starts it.

    Args:
        machine: where it runs.
        units: all of its units.
        rested: whether it stays out of service, where it is.
    """
    stop(machine, units)
    if not rested:
        # While the controller is ended this note is all that there is of the wish.
        machine.at(MAINTENANCE).unlink(missing_ok=True)
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "start", TARGET)


async def _return() -> None:
    async with control.connected(Path(RUN)) as connection:
        await control.maintain(connection, on=False, reason="upgrade")
