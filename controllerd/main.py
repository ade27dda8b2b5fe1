"""tie-controllerd: supervises the inference stack, coordinates recycling, speaks for the node to CloudBoard."""

import asyncio

import grpc.aio

from controllerd.control_service import NodeControl
from controllerd.controller import Controller
from controllerd.scrape import node_metrics
from tie.daemon import rpc
from tie.daemon.config import NodeConfig
from tie.daemon.service import Lifetime, run
from tie.proto import control_pb2_grpc


async def serve(config: NodeConfig, lifetime: Lifetime) -> None:
    """Runs the daemon until it is asked to stop."""
    controller = Controller(config)
    sockets = config.sockets
    sources = {
        "cloudboard": sockets.node,
        "probe": sockets.probe,
        "gpuhealthd": sockets.gpuhealth,
        "owner": sockets.owner_control,
        "store": sockets.store_control,
    }

    def register(server: grpc.aio.Server) -> None:
        control_pb2_grpc.add_NodeControlServicer_to_server(
            NodeControl(controller, config.controller.heartbeat_s), server
        )

    async with rpc.serve(sockets.control, register, metrics=lambda: node_metrics(controller, sources)):
        supervising = asyncio.create_task(controller.run())
        stopping = asyncio.create_task(lifetime.stopping.wait())
        try:
            lifetime.ready(sockets.control)
            await asyncio.wait({supervising, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if supervising.done():
                supervising.result()  # it ends only by a bug, and then the daemon must end as well
            controller.witness.end(reachable=sockets.control.exists())
        finally:
            supervising.cancel()
            stopping.cancel()
            await asyncio.gather(supervising, stopping, return_exceptions=True)


def main() -> None:
    """The daemon's entry point."""
    run("tie-controllerd", "Supervises the inference stack and speaks for the node to CloudBoard.", serve)


if __name__ == "__main__":
    main()
