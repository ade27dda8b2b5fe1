"""The operator's connection to tie-controllerd."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
import grpc
import grpc.aio

from tie.cli import settings
from tie.daemon import rpc
from tie.daemon.errors import PeerError, PeerTimeoutError, RefusedError
from tie.device.errors import UnreachableError
from tie.proto import control_pb2, control_pb2_grpc, metrics_pb2_grpc

CALL_S = 10.0
_CONNECT_S = 3.0
F = TypeVar("F", bound=Callable[..., Any])


def run_dir_option(function: F) -> F:
    """Adds `--run-dir`, with the same default everywhere."""
    return click.option(
        "--run-dir",
        type=click.Path(path_type=Path),
        default=settings.default_run_dir,
        help="The node's run directory [default: $TIE_RUN_DIR or /run/tie].",
    )(function)


class Control:
    """Stubs for one node's controller."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.node: Any = control_pb2_grpc.NodeControlStub(channel)
        self.metrics: Any = metrics_pb2_grpc.MetricsStub(channel)


@asynccontextmanager
async def connected(run_dir: Path) -> AsyncIterator[Control]:
    """A connection to the controller of the node in `run_dir`; errors of calls inside the block become ours.

    Raises:
        ConfigError: no node runs there.
        UnreachableError: the controller does not answer, or ended.
        PeerTimeoutError: a call's deadline passed.
        RefusedError: it refused.
    """
    config = settings.load_running(run_dir)
    async with rpc.connect(config.sockets.control) as channel:
        try:
            await rpc.wait_ready(channel, _CONNECT_S)
        except TimeoutError:
            raise UnreachableError(f"no controller answers in {run_dir}: is `tie up` still running?") from None
        try:
            yield Control(channel)
        except grpc.aio.AioRpcError as error:
            raise _translate(error) from None


async def maintain(connection: Control, *, on: bool, reason: str) -> None:
    """Takes the node out of service, or back in; answered at once, before the node is where it shall be."""
    request = control_pb2.SetMaintenanceRequest(on=on, reason=reason)
    await connection.node.SetMaintenance(request, timeout=CALL_S)


async def reach(connection: Control, state: "control_pb2.State.ValueType", timeout: float) -> None:
    """Waits until the node is in `state`; in maintenance also until nothing is in flight.

    Raises:
        PeerError: the controller's reports ended before.
        grpc.aio.AioRpcError: not within `timeout` seconds, or the controller ended.
    """
    async for status in connection.node.Watch(control_pb2.WatchRequest(), timeout=timeout):
        if status.state == state and (state != control_pb2.STATE_MAINTENANCE or not status.in_flight):
            return
    raise PeerError("the controller ended its reports early")


def _translate(error: grpc.aio.AioRpcError) -> PeerError | RefusedError:
    code = error.code()
    if code is grpc.StatusCode.UNAVAILABLE:
        return UnreachableError("the controller ended or does not answer")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return PeerTimeoutError("the controller did not answer in time")
    return RefusedError(f"the controller refused: {error.details() or code.name.lower()}")


def run(action: Callable[[], Any]) -> Any:
    """Runs an async command to its end; Ctrl-C is a quiet end."""
    try:
        return asyncio.run(action())
    except KeyboardInterrupt:
        return 130
