"""`tie assets activate`: another bundle for a running node.

The node is withdrawn first and told only then: no request sees the old bundle's tokenizer with the new one's weights.
Who interrupts it before the node is withdrawn leaves it as it was, who does so later leaves it withdrawn: `tie
maintenance off` brings it back, with whichever bundle is active.
What the model owner holds of the old bundle goes when the new runtime attaches: weights where those changed, system
prompts' blocks always.
"""

import asyncio
from pathlib import Path

import click
import grpc.aio

from tie.assets import active
from tie.assets.bundle import open_bundle
from tie.cli import control, settings
from tie.daemon.errors import BundleError, PeerError, RefusedError
from tie.proto import control_pb2

_MOVE_S = 900.0
_REASON = "asset"
_FAILURES = (PeerError, RefusedError, grpc.aio.AioRpcError)  # the last becomes one of ours where the connection ends


def activate_bundle(run_dir: Path, bundle: Path) -> None:
    """Exchanges the bundle of the node in `run_dir`; returns when the node is as available as before.

    Raises:
        BundleError: the bundle is damaged, or the node's cannot be exchanged: nothing has been done.
        TieError: the node could not be told, or does not come up with it: the old bundle is active again, and the
            node stays withdrawn where it was withdrawn for this.
    """
    link = Path(settings.load_running(run_dir).model.bundle)
    if not link.is_symlink():
        raise BundleError(f"{link} is not a link, so this node's bundle cannot be exchanged")
    wanted, old = bundle.absolute(), link.parent / link.readlink()
    if open_bundle(wanted).manifest == open_bundle(link).manifest:
        active.point(link, wanted)
        click.echo(f"{wanted}: the node serves this release already")
        return
    asyncio.run(_exchange(run_dir, link, wanted, old))


async def _exchange(run_dir: Path, link: Path, wanted: Path, old: Path) -> None:
    async with control.connected(run_dir) as connection:
        status = await connection.node.GetStatus(control_pb2.GetStatusRequest(), timeout=control.CALL_S)
        resting = status.maintenance
        click.echo("withdrawing the node")
        try:
            await control.maintain(connection, on=True, reason=_REASON)
            await control.reach(connection, control_pb2.STATE_MAINTENANCE, _MOVE_S)
        except BaseException:  # an interrupt, too
            if not resting:
                await _return(connection)
            raise
        opened = active.point(link, wanted)
        click.echo(f"recycling the runtime with {opened.manifest.model} {opened.manifest.release}")
        try:
            await _recycle(connection)
        except _FAILURES:
            active.point(link, old)
            click.echo(f"the node does not come up with it: {old} is active again, and the node stays withdrawn")
            raise
        if not resting:
            await control.maintain(connection, on=False, reason=_REASON)
            await control.reach(connection, control_pb2.STATE_AVAILABLE, _MOVE_S)
        click.echo(f"{wanted}: active")


async def _return(connection: control.Control) -> None:
    """Puts the node in service again; what keeps it from that is said, for another error is on its way already."""
    try:
        await control.maintain(connection, on=False, reason=_REASON)
    except _FAILURES:
        click.echo("the node could not be put in service again: tie maintenance off", err=True)


async def _recycle(connection: control.Control) -> None:
    request = control_pb2.RecycleRequest(reason=_REASON)
    async for progress in connection.node.Recycle(request, timeout=_MOVE_S):
        if progress.finished:
            if progress.error:
                raise RefusedError(f"the recycle did not succeed: {progress.error}")
            return
    raise PeerError("the recycle's progress ended early")
