"""What rank 0 and another rank say to each other (ranks.proto), and batches as messages.

A message may be longer than a packet: each packet begins with a byte that says whether it is the last one.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

from google.protobuf.message import Message

from kvxfer.channel import MAX_MESSAGE, Channel
from kvxfer.errors import KvxferError, PeerDiedError, PeerTimeoutError
from tie.bones.batch import Batch, SequenceSlice
from tie.daemon import errors, frames
from tie.proto import ranks_pb2

M = TypeVar("M", bound=Message)
MAX_BYTES: Final = 64 * 1024 * 1024
_PART: Final = MAX_MESSAGE - 1
_MORE, _LAST = b"\0", b"\1"


class RankChannel:
    """One end. Not for several threads at once."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def send(self, message: Message, descriptors: Sequence[int] = (), *, timeout: float) -> None:
        """Sends one message; descriptors go with its first packet, and stay the caller's.

        Raises:
            PeerDiedError: the other end is gone.
            PeerTimeoutError: it does not read.
        """
        data = message.SerializeToString()
        with _translated():
            for start in range(0, max(1, len(data)), _PART):
                flag = _LAST if start + _PART >= len(data) else _MORE
                self._channel.send(flag + data[start : start + _PART], descriptors, timeout=timeout)
                descriptors = ()

    def receive(self, kind: type[M], *, timeout: float) -> tuple[M, list[int]]:
        """The next message, and its descriptors, which belong to the caller. `timeout` is for each of its packets.

        Raises:
            PeerDiedError: the other end is gone.
            PeerTimeoutError: it says nothing.
            ProtocolError: what it says is no such message.
        """
        with _translated():
            packet, descriptors = self._channel.receive(timeout=timeout)
            data = bytearray(packet[1:])
            while packet[:1] == _MORE and len(data) <= MAX_BYTES:
                packet, more = self._channel.receive(timeout=timeout)
                descriptors += more
                data += packet[1:]
        if len(data) > MAX_BYTES:
            raise errors.ProtocolError("a rank's message is too long")
        return frames.parse(bytes(data), kind), descriptors

    def close(self) -> None:
        """Ends the connection: the other end sees it."""
        self._channel.close()


def step_of(batch: Batch) -> ranks_pb2.ToRank:
    """A batch, checked before, as a message."""
    step = ranks_pb2.Step(copies=[block for pair in batch.copies for block in pair])
    for part in batch.slices:
        step.slices.add(
            tokens=part.tokens, start=part.start, blocks=part.blocks, logits=part.logits, residence=part.residence
        )
    return ranks_pb2.ToRank(step=step)


def batch_of(step: ranks_pb2.Step) -> Batch:
    """The batch of a message. Whoever computes it checks it."""
    return Batch(
        tuple(
            SequenceSlice(
                list(part.tokens),
                part.start,
                list(part.blocks),
                part.logits,
                part.residence if part.HasField("residence") else None,
            )
            for part in step.slices
        ),
        tuple(zip(step.copies[::2], step.copies[1::2], strict=True)),
    )


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except PeerDiedError:
        raise errors.PeerDiedError("a rank is gone") from None
    except PeerTimeoutError:
        raise errors.PeerTimeoutError("a rank does not answer") from None
    except KvxferError as error:
        raise errors.ProtocolError(f"a rank: {error}") from None
