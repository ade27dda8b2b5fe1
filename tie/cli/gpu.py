"""`tie gpu`: what gpuhealthd says of each device."""

import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from tie.cli import control, render
from tie.daemon.errors import PeerDiedError
from tie.proto import control_pb2, gpuhealth_pb2

_STYLES = {"healthy": "green", "degraded": "yellow", "unavailable": "red"}
_ACTIONS = {
    "none": "nothing to do",
    "recycle runtime": "the node recycles its runtime by itself",
    "reset gpu": "reset the GPU; everything that holds it lets go first, the model owner too",
    "reboot": "reboot the machine",
    "service": "have the hardware looked at",
}
_UNITS = {"celsius": "°C", "watts": "W", "percent": "%", "ratio": "", "count": "", "enum": "", "mask": "", "": ""}


def value_text(reading: gpuhealth_pb2.Reading) -> str:
    """A reading for people; what was not measured is a dash, never a zero."""
    if not reading.measured:
        return "-"
    if reading.unit == "bytes":
        return render.size(reading.value)
    if reading.unit == "mask":
        return f"{int(reading.value):#x}"
    return f"{reading.value:g} {_UNITS.get(reading.unit, reading.unit)}".rstrip()


def device_table(device: gpuhealth_pb2.DeviceVerdict, *, everything: bool) -> Table:
    """One device; without `everything` only what was measured."""
    verdict = render.word(gpuhealth_pb2.Verdict.DESCRIPTOR, device.verdict)
    table = Table(box=None, padding=(0, 3, 0, 2), show_header=False, title_justify="left")
    table.title = f"[bold]{device.name}[/]  {device.id}  [{_STYLES.get(verdict, 'red')}]{verdict}[/]"
    for reason in device.reasons:
        table.add_row("[bold]reason[/]", reason)
    action = render.word(gpuhealth_pb2.Action.DESCRIPTOR, device.action)
    if action != "none":
        table.add_row("[bold]to mend it[/]", _ACTIONS.get(action, action))
    for reading in device.readings:
        if everything or reading.measured:
            table.add_row(reading.name.replace("_", " "), value_text(reading))
    return table


@click.command()
@control.run_dir_option
@click.option("--all", "everything", is_flag=True, help="Also what was not measured.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def gpu(run_dir: Path, *, everything: bool, as_json: bool) -> int:
    """Show each GPU's verdict, its reasons, what would mend it, and telemetry.

    Exit code 0 when the hardware may serve (healthy or degraded), 3 when not.
    """

    async def action() -> int:
        async with control.connected(run_dir) as connection:
            status = await connection.node.GetStatus(control_pb2.GetStatusRequest(), timeout=control.CALL_S)
        if not status.gpu_peer.connected:
            raise PeerDiedError("gpuhealthd does not answer the controller: its own log says why")
        node = status.gpu
        verdict = render.word(gpuhealth_pb2.Verdict.DESCRIPTOR, node.verdict)
        if as_json:
            click.echo(json.dumps(render.as_dict(node), indent=2))
        else:
            console = Console(highlight=False)
            reasons = f" ({', '.join(node.reasons)})" if node.reasons else ""
            age = "not looked at yet" if node.age_s < 0 else f"looked at {render.duration(node.age_s)} ago"
            console.print(f"{node.provider} provider, {age}: [{_STYLES.get(verdict, 'red')}]{verdict}[/]{reasons}")
            for device in node.devices:
                console.print()
                console.print(device_table(device, everything=everything))
        return 3 if verdict not in {"healthy", "degraded"} else 0

    code: int = control.run(action)
    return code
