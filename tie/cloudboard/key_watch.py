"""Whether the key protection service answers: without it no request can be opened, and the node must not be chosen.

CloudBoard is the only one beside the jobhelpers that may reach the service; the controller hears of it with the
acknowledgements of its reports.
"""

import asyncio
import time
from typing import Final

import grpc.aio

from tie.cloudboard.registry import Registry
from tie.daemon import log
from tie.proto import cloudboard_pb2, kps_pb2, kps_pb2_grpc

PERIOD_S: Final = 1.0
TIMEOUT_S: Final = 3.0  # a restart takes less: requests wait for it, and need not be refused
_LATE_S: Final = 1.0  # a deadline that is noticed so late says that this process itself stood still


class KeyWatch:
    """Asks for the key statement once a second.

    Args:
        kps: the channel to the service.
        registry: told what came of it.
    """

    def __init__(self, kps: grpc.aio.Channel, registry: Registry) -> None:
        self._kps: kps_pb2_grpc.KeyProtectionAsyncStub = kps_pb2_grpc.KeyProtectionStub(kps)
        self._registry = registry

    async def run(self) -> None:
        """Watches for ever; cancel to end."""
        while True:
            asked = time.monotonic()
            try:
                statement = await self._kps.GetStatement(
                    kps_pb2.GetStatementRequest(), timeout=TIMEOUT_S, wait_for_ready=True
                )
            except grpc.aio.AioRpcError as error:
                if time.monotonic() - asked < TIMEOUT_S + _LATE_S:
                    self._silent(error)
            else:
                self._registry.tell_keys(cloudboard_pb2.KEY_SERVICE_ANSWERS, statement.key_id.hex())
            await asyncio.sleep(PERIOD_S)

    def _silent(self, error: grpc.aio.AioRpcError) -> None:
        if self._registry.keys != cloudboard_pb2.KEY_SERVICE_SILENT:
            log.failure("keys.silent", error)
        self._registry.tell_keys(cloudboard_pb2.KEY_SERVICE_SILENT, "")
