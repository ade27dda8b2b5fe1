"""`tie doctor`: says what this machine lacks and how to get it."""

import dataclasses
import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from tie.cli import checks, settings
from tie.cli.checks import Level
from tie.cli.install.checks import installed
from tie.cli.install.machine import Machine

_STYLE = {Level.OK: "green", Level.NOTE: "yellow", Level.MISSING: "bold red"}


@click.command()
@click.option("--run-dir", type=click.Path(path_type=Path), default=settings.default_run_dir, help="As for `tie up`.")
@click.option("--host", default="127.0.0.1", show_default=True, help="As configured for the ingress.")
@click.option("--port", type=click.IntRange(1, 65535), default=8443, show_default=True, help="As for `tie up`.")
@click.option("--json", "as_json", is_flag=True, help="The results as a JSON list.")
def doctor(run_dir: Path, host: str, port: int, *, as_json: bool) -> int:
    """Say what this machine lacks and how to get it. Exit code 1 when a node cannot run."""
    results = [*checks.all_checks(run_dir.absolute(), host, port), *installed(Machine())]
    missing = sum(result.level is Level.MISSING for result in results)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(result) for result in results], indent=2))
        return 1 if missing else 0
    console = Console(highlight=False)
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for result in results:
        table.add_row(f"[{_STYLE[result.level]}]{result.level}[/]", result.name, result.found)
        if result.level is not Level.OK:
            table.add_row("", "", f"[dim]→ {result.hint}[/]")
    console.print(table)
    notes = sum(result.level is Level.NOTE for result in results)
    if missing:
        console.print(f"\n{missing} missing: a node does not run here until that is mended")
    else:
        console.print(f"\na node can run here{f' ({notes} notes)' if notes else ''}")
    return 1 if missing else 0
