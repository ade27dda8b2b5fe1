"""What an operator says to a running node: status, recycle, maintenance, metrics."""

import json
from pathlib import Path

import click
from rich.console import Console
from rich.live import Live

from tie.cli import control, render
from tie.daemon.errors import RefusedError
from tie.proto import control_pb2, metrics_pb2

_RECYCLE_S = 900.0
_WATCH_S = 7 * 86400.0


@click.command()
@control.run_dir_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object; with --watch one a line.")
@click.option("--watch", is_flag=True, help="Follow until Ctrl-C.")
def status(run_dir: Path, *, as_json: bool, watch: bool) -> int:
    """Show the node's state and its parts. Exit code 0 when it is available, 3 when not."""

    async def once() -> int:
        async with control.connected(run_dir) as connection:
            reply = await connection.node.GetStatus(control_pb2.GetStatusRequest(), timeout=control.CALL_S)
        if as_json:
            click.echo(json.dumps(render.as_dict(reply), indent=2))
        else:
            Console(highlight=False).print(render.status_table(reply))
        return 0 if reply.state == control_pb2.STATE_AVAILABLE else 3

    async def follow() -> int:
        console = Console(highlight=False)
        async with control.connected(run_dir) as connection:
            updates = connection.node.Watch(control_pb2.WatchRequest(), timeout=_WATCH_S)
            if as_json:
                async for reply in updates:
                    click.echo(json.dumps(render.as_dict(reply)))
            elif not console.is_terminal:  # nothing can be drawn over there: one after the other, each at once
                async for reply in updates:
                    console.print(render.status_table(reply), "")
            else:
                with Live(console=console, auto_refresh=False) as live:
                    async for reply in updates:
                        live.update(render.status_table(reply), refresh=True)
        return 0

    code: int = control.run(follow if watch else once)
    return code


@click.command()
@control.run_dir_option
@click.option("--reason", default="operator", show_default=True, help="For the node's records (`tie events`).")
@click.option("--deadline", type=click.FloatRange(0), help="Seconds that running requests get [default: the node's].")
@click.option("--now", is_flag=True, help="Do not wait for running requests: cut them; their users are told.")
@click.option("--json", "as_json", is_flag=True, help="Progress as JSON lines.")
def recycle(run_dir: Path, reason: str, deadline: float | None, *, now: bool, as_json: bool) -> int:
    """Replace the runtime by a fresh one: drain, end, start, attach the weights that are still in memory."""

    async def action() -> int:
        milliseconds = 1 if now or deadline == 0 else int((deadline or 0) * 1000)  # 0 stands for the node's own
        request = control_pb2.RecycleRequest(reason=reason, drain_deadline_ms=milliseconds)
        last = control_pb2.RecycleProgress()
        shown = -1
        async with control.connected(run_dir) as connection:
            async for progress in connection.node.Recycle(request, timeout=_RECYCLE_S):
                last = progress
                if as_json:
                    click.echo(json.dumps(render.as_dict(progress)))
                elif progress.state != shown and not progress.finished:
                    shown = progress.state
                    flight = f", {progress.in_flight} requests in flight" if progress.in_flight else ""
                    click.echo(f"{progress.elapsed_s:6.1f} s  {render.state_word(progress.state)}{flight}")
        if not last.finished or last.error:
            raise RefusedError(f"the recycle did not succeed: {last.error or 'the stream ended early'}")
        if not as_json:
            old, new = last.old_instance_id[:8], last.new_instance_id[:8]
            cut = f"; {last.cut} request{'s' * (last.cut != 1)} had not ended and had to be cut" if last.cut else ""
            click.echo(f"{last.elapsed_s:6.1f} s  done: instance {old} is gone, {new} serves{cut}")
        return 0

    code: int = control.run(action)
    return code


@click.command()
@control.run_dir_option
@click.argument("switch", type=click.Choice(["on", "off"]))
@click.option("--reason", default="operator", show_default=True, help="For the node's records (`tie events`).")
def maintenance(run_dir: Path, switch: str, reason: str) -> int:
    """Take the node out of service, or back in."""

    async def action() -> int:
        request = control_pb2.SetMaintenanceRequest(on=switch == "on", reason=reason)
        async with control.connected(run_dir) as connection:
            reply = await connection.node.SetMaintenance(request, timeout=control.CALL_S)
        click.echo(f"maintenance is {switch}; the node's state now: {render.state_word(reply.state)}")
        return 0

    code: int = control.run(action)
    return code


@click.command()
@control.run_dir_option
def metrics(run_dir: Path) -> int:
    """Print the node's metrics as Prometheus text.

    Those of the controller, CloudBoard, the status probe, gpuhealthd, the model owner and the cache store, each with
    its label `daemon`. The key protection service is in nobody's reach but the job helpers', and not among them.
    """

    async def action() -> int:
        async with control.connected(run_dir) as connection:
            reply = await connection.metrics.Scrape(metrics_pb2.ScrapeRequest(), timeout=control.CALL_S)
        click.echo(reply.text, nl=False)
        return 0

    code: int = control.run(action)
    return code
