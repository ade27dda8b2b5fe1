"""tie-cloudboard, the reference CloudBoard: the node's registry on a Unix socket, the ingress on loopback."""

import socket
import sys

import grpc.aio
from hypercorn.asyncio import serve as serve_http
from hypercorn.config import Config

from tie.cloudboard import keys
from tie.cloudboard.ingress import Ingress
from tie.cloudboard.registry import Registry, Servicer
from tie.cloudboard.standby import StandbyPool
from tie.cloudboard.statements import Statements
from tie.daemon import log, rpc, service
from tie.daemon.config import CloudBoardConfig, NodeConfig
from tie.daemon.errors import ConfigError
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

    listening = listen(config.cloudboard)
    async with rpc.connect(config.sockets.kps) as kps:
        ingress = Ingress(config, registry, pool, Statements(kps), keys.read_statement_public(config))
        async with rpc.serve(config.sockets.node, register, metrics=ingress.metrics.text), pool.running():
            log.event("ingress.listening", port=listening.getsockname()[1])
            lifetime.ready(config.sockets.node)
            await serve_http(
                ingress,  # type: ignore[arg-type] # plain ASGI dictionaries instead of the server's own types
                http_config(listening, config.cloudboard),
                shutdown_trigger=lifetime.stopping.wait,
                mode="asgi",
            )


def listen(config: CloudBoardConfig) -> socket.socket:
    """The ingress's listening socket.

    Raises:
        ConfigError: the address is in use or not this machine's.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listening.bind((config.host, config.port))
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror}", hint="set cloudboard.port in node.toml"
        ) from error
    return listening


def http_config(listening: socket.socket, config: CloudBoardConfig) -> Config:
    """The HTTP server's settings: HTTP/2 by prior knowledge and HTTP/1.1, in clear, no logs of its own."""
    settings = Config()
    settings.bind = [f"fd://{listening.detach()}"]
    settings.accesslog = settings.errorlog = None
    settings.include_server_header = False
    settings.h2_max_concurrent_streams = config.max_in_flight
    # When it is reached the server closes the connection under the requests that still run on it.
    settings.keep_alive_max_requests = sys.maxsize
    # The server holds a connection this long after its client has closed it, and devices use one for each request.
    settings.keep_alive_timeout = 5.0
    settings.graceful_timeout = 5.0
    return settings


def main() -> None:
    """Entry point of tie-cloudboard."""
    service.run("tie-cloudboard", "Reference CloudBoard: registry of this node and ingress for devices.", serve)


if __name__ == "__main__":
    main()
