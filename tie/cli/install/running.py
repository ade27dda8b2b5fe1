"""The steps of an installation on a machine whose node runs: what takes long first, then the node is exchanged."""

from collections.abc import Sequence

from tie.cli.install.exchange import Exchange, Restart
from tie.cli.install.machine import PREFIX, Machine
from tie.cli.install.steps import Folder, Link, Step, WriteFiles


def arrange(machine: Machine, steps: Sequence[Step], units: list[str], *, drained: bool) -> list[Step]:
    """The same steps in an order, and with what it needs, that a running node gets over.

    Args:
        machine: where it runs.
        steps: of an installation.
        units: of the node.
        drained: whether the node ends what it works on first.
    """
    if not any(isinstance(step, WriteFiles) or (isinstance(step, Link) and step.place == PREFIX) for step in steps):
        return list(steps)
    exchange = Exchange(machine, units, drained)
    beside = [step for step in steps if isinstance(step, Folder)]
    rest = [step for step in steps if not isinstance(step, Folder)]
    return [*beside, exchange, *rest, Restart(exchange)]
