"""The node's key statement for devices: fetched from the key protection service, kept briefly."""

import time
from typing import Final

import grpc.aio

from tie.daemon import log
from tie.daemon.errors import PeerError
from tie.proto import kps_pb2, kps_pb2_grpc

FRESH_S: Final = 2.0
TIMEOUT_S: Final = 3.0


class NoStatementError(PeerError):
    """The key protection service does not answer."""


class Statements:
    """The current key statement.

    After a restart of the key protection service an old statement is given out for `FRESH_S` at most, and not even that
    once a request has come back with an unknown key (`forget`).
    """

    def __init__(self, kps: grpc.aio.Channel) -> None:
        self._kps: kps_pb2_grpc.KeyProtectionAsyncStub = kps_pb2_grpc.KeyProtectionStub(kps)
        self._statement: kps_pb2.KeyStatement | None = None
        self._fetched = 0.0

    async def current(self) -> kps_pb2.KeyStatement:
        """The statement.

        Raises:
            NoStatementError: it cannot be had now.
        """
        if self._statement is None or time.monotonic() - self._fetched > FRESH_S:
            try:
                self._statement = await self._kps.GetStatement(
                    kps_pb2.GetStatementRequest(), timeout=TIMEOUT_S, wait_for_ready=True
                )
            except grpc.aio.AioRpcError as error:
                self._statement = None
                log.failure("statement.failed", error)
                raise NoStatementError("the key protection service does not answer") from None
            self._fetched = time.monotonic()
        return self._statement

    def forget(self) -> None:
        """The node no longer knows the key of this statement."""
        self._statement = None
