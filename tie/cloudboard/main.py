"""tie-cloudboard, the reference CloudBoard: the node's registry on a Unix socket, the ingress on loopback."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc.aio

from tie.cloudboard import keys
from tie.cloudboard.ingress import Ingress
from tie.cloudboard.key_watch import KeyWatch
from tie.cloudboard.registry import Registry, Servicer
from tie.cloudboard.replies import reply
from tie.cloudboard.standby import StandbyPool
from tie.cloudboard.statements import Statements
from tie.daemon import log, rpc, service
from tie.daemon.config import CloudBoardConfig, NodeConfig
from tie.http import listening
from tie.http.limits import Limits
from tie.http.server import Server, affordable
from tie.proto import cloudboard_pb2_grpc


async def serve(config: NodeConfig, lifetime: service.Lifetime) -> None:
    """Serves until the daemon is asked to end.

    Raises:
        ConfigError: the address cannot be listened on, or the statement key is missing.
        SocketInUseError: another CloudBoard is live on node.sock.
    """
    registry = Registry(config.node_id, config.cloudboard.max_in_flight)
    pool = StandbyPool(config.sockets.jobhelper, config.cloudboard.standby, registry)

    def register(server: grpc.aio.Server) -> None:
        cloudboard_pb2_grpc.add_CloudBoardServicer_to_server(Servicer(registry), server)

    with listen(config.cloudboard) as bound:
        async with rpc.connect(config.sockets.kps) as kps:
            ingress = Ingress(config, registry, pool, Statements(kps), keys.read_statement_public(config))
            server = Server(ingress, limits(config.cloudboard), reply)
            ingress.metrics.watch(server)
            async with (
                rpc.serve(config.sockets.node, register, metrics=ingress.metrics.text),
                pool.running(),
                watching(KeyWatch(kps, registry)),
            ):
                log.event("ingress.listening", port=bound.getsockname()[1])
                lifetime.ready(config.sockets.node)
                await server.serve(bound, lifetime.stopping)


@asynccontextmanager
async def watching(watch: KeyWatch) -> AsyncIterator[None]:
    """Watches the key service for the length of the block."""
    task = asyncio.create_task(watch.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def listen(config: CloudBoardConfig) -> socket.socket:
    """The ingress's listening socket.

    Raises:
        ConfigError: the address is in use or not this machine's.
    """
    return listening.listen(config.host, config.port, hint="set cloudboard.port in node.toml")


def limits(config: CloudBoardConfig) -> Limits:
    """The HTTP server's limits, as far as this process can keep them."""
    connections = affordable(config.max_connections, config.max_in_flight + config.standby)
    if connections < config.max_connections:
        log.event("ingress.few-descriptors", count=connections)
    return Limits(
        connections=connections,
        connections_per_peer=config.max_connections_per_peer,
        streams=config.max_in_flight,
    )


def main() -> None:
    """Entry point of tie-cloudboard."""
    service.run("tie-cloudboard", "Reference CloudBoard: registry of this node and ingress for devices.", serve)


if __name__ == "__main__":
    main()
