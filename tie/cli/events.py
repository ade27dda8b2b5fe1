"""`tie events`: what happened to the node and why, for somebody who was asleep."""

import datetime as dt
import json
from pathlib import Path

import click

from tie.cli import control, render
from tie.cli.sentences import sentence
from tie.daemon.errors import PeerError
from tie.daemon.sockets import Sockets
from tie.proto import control_pb2

_STYLES = {"error": "red", "available": "green", "given-up": "red", "disk": "red"}


@click.command()
@control.run_dir_option
@click.option("-n", "--last", type=click.IntRange(1, 256), default=30, show_default=True, help="How many.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def events(run_dir: Path, last: int, *, as_json: bool) -> int:
    """Say what happened to the node lately, why, and what there is to do about it. Newest last.

    Survives a restart of the controller; while none answers, what the last one wrote down is shown.
    """

    async def action() -> int:
        try:
            async with control.connected(run_dir) as connection:
                request = control_pb2.GetEventsRequest(last=last)
                reply = await connection.node.GetEvents(request, timeout=control.CALL_S)
        except PeerError as error:
            reply = left_behind(run_dir, last)
            if not reply.happenings:
                raise
            click.echo(f"{error}; this is what it left behind:", err=True)
        for happening in reply.happenings:
            _show(happening, as_json=as_json)
        if not reply.happenings and not as_json:
            click.echo("nothing has happened yet")
        return 0

    code: int = control.run(action)
    return code


def left_behind(run_dir: Path, last: int) -> control_pb2.Happenings:
    """The last events that the controller of `run_dir` wrote down in this boot; none where it wrote nothing."""
    from controllerd import journal  # not for a node whose controller answers
    from controllerd.clock import boottime

    path = Sockets(run_dir).control.with_name(journal.NAME)
    return journal.messages(list(journal.Journal(path, boottime).entries)[-last:], boottime())


def _show(happening: control_pb2.Happening, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({**render.as_dict(happening), "sentence": sentence(happening)}))
        return
    when = dt.datetime.fromtimestamp(happening.wall_s).astimezone()
    ago = f"{render.duration(happening.age_s)} ago"
    style = _STYLES.get(happening.after if happening.kind == "state" else happening.kind)
    click.echo(f"{when:%m-%d %H:%M:%S}  {ago:>12}  {click.style(sentence(happening), fg=style)}")
