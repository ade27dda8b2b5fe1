"""A conversation with the model owner (owner.proto): questions, and answers with descriptors.

What comes is another process's: that it is an answer, and to this question, is checked here; what it says, and what its
descriptors are, by who asked. Blocking, with a deadline on every wait.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from google.protobuf.message import DecodeError

from kvxfer.channel import Channel
from kvxfer.doorbell import left
from kvxfer.errors import KvxferError, PeerDiedError, PeerTimeoutError
from tie.daemon import errors
from tie.proto import owner_pb2


class OwnerRefusedError(errors.RefusedError):
    """The owner refused.

    Attributes:
        code: the owner's.
    """

    def __init__(self, code: str) -> None:
        super().__init__(f"the model owner refused: {code}")
        self.code = code


class OwnerChannel:
    """One connection to the owner.

    Args:
        path: owner.sock.
        timeout: seconds to connect.

    Raises:
        PeerDiedError: no owner there.
        PeerTimeoutError: it accepts nobody.
    """

    def __init__(self, path: Path, *, timeout: float) -> None:
        with translated():
            self._channel = Channel.connect(path, timeout=timeout)

    def ask(
        self, request: owner_pb2.OwnerRequest, *wanted: str, timeout: float
    ) -> tuple[owner_pb2.OwnerReply, list[int]]:
        """The answer, which is of one of the kinds that are wanted, and its descriptors, which belong to the caller.

        Raises:
            OwnerRefusedError: it refused.
            PeerDiedError: the owner is gone.
            PeerTimeoutError: it does not answer within `timeout` seconds.
            ProtocolError: what it answers makes no sense.
        """
        deadline = time.monotonic() + timeout
        with translated():
            self._channel.send(request.SerializeToString(), timeout=left(deadline))
            message, descriptors = self._channel.receive(timeout=left(deadline))
        try:
            return _parse(message, wanted), descriptors
        except BaseException:
            close_all(descriptors)
            raise

    def close(self) -> None:
        """Ends the conversation."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _parse(message: bytes, wanted: Sequence[str]) -> owner_pb2.OwnerReply:
    reply = owner_pb2.OwnerReply()
    try:
        reply.ParseFromString(message)
    except DecodeError:
        raise errors.ProtocolError("model owner: not a reply") from None
    if reply.HasField("refused"):
        raise OwnerRefusedError(reply.refused.reason[:80])
    if reply.WhichOneof("kind") not in wanted:
        raise errors.ProtocolError("model owner: the answer to another question")
    return reply


def close_all(descriptors: Sequence[int]) -> None:
    """Closes descriptors; mappings live on."""
    for descriptor in descriptors:
        os.close(descriptor)


@contextmanager
def translated() -> Iterator[None]:
    """Turns kvxfer's errors, of the connection or of what came over it, into the suite's."""
    try:
        yield
    except PeerDiedError:
        raise errors.PeerDiedError("the model owner is not there") from None
    except PeerTimeoutError:
        raise errors.PeerTimeoutError("the model owner does not answer") from None
    except KvxferError as error:
        raise errors.ProtocolError(f"model owner: {error}") from None
