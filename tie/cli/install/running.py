"""The steps of an installation on a machine whose node runs: what takes long first, then the node is exchanged."""

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from tie.cli import settings
from tie.cli.install.exchange import Activate, Exchange, Restart
from tie.cli.install.machine import PREFIX, RUN, Machine
from tie.cli.install.model import ACTIVE
from tie.cli.install.steps import Folder, Link, Step, WriteFiles
from tie.daemon.errors import ConfigError


def arrange(machine: Machine, steps: Sequence[Step], units: list[str], *, restart: str) -> list[Step]:
    """The same steps in an order, and with what it needs, that a running node gets over.

    Args:
        machine: where it runs.
        steps: of an installation.
        units: of the node.
        restart: "drained": the node ends what it works on first; "now": that is cut off; "no": it goes on running with
            what it has.

    Raises:
        ConfigError: the node cannot go on running with what it has.
    """
    model = [step for step in steps if isinstance(step, Link) and step.place == ACTIVE and _serves(ACTIVE)]
    if restart == "no":
        if model:
            # Each request's app begins with what the link names, and would have another tokenizer than the runtime.
            raise ConfigError(
                "a running node does not get another model without its runtime", hint="leave --restart=no out"
            )
        return list(steps)
    if (model and restart == "now") or any(_needs_exchange(machine, step) for step in steps):
        beside = [step for step in steps if _is_beside(machine, step)]
        rest = [step for step in steps if not _is_beside(machine, step)]
        exchange = Exchange(machine, units, drained=restart == "drained")
        return [*beside, exchange, *rest, Restart(exchange)]
    rest = [step for step in steps if step not in model]
    return rest + [Activate(machine, units, step.says, step.place, step.target) for step in model]


def _serves(link: PurePosixPath) -> bool:
    """Whether the running node's model is what a link names: an operator's configuration may name another place."""
    return Path(settings.load_running(Path(RUN)).model.bundle) == Path(link)


def _is_beside(machine: Machine, step: Step) -> bool:
    """Whether it makes something that nobody uses yet."""
    return isinstance(step, Folder) and not machine.at(step.place).exists()


def _needs_exchange(machine: Machine, step: Step) -> bool:
    if isinstance(step, Folder):  # the node runs from it, damaged as it is
        return not _is_beside(machine, step)
    return isinstance(step, WriteFiles) or (isinstance(step, Link) and step.place == PREFIX)
