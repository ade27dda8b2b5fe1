"""One transfer: a buffer, and a channel that is its doorbell and its death notice.

    consumer → producer   REQUEST(first block)             where the consumer decides when it begins
    producer → consumer   OFFER, with the memfd unless the consumer made it
    producer → consumer   COMMIT(count)*                   doorbells: the buffer's header says how many for certain
    producer → consumer   FINISH(count)                    all blocks are whole; nothing follows
    either → the other    ABORT(reason)                    at any time; nothing follows

End-of-file before FINISH is the other end's death. A COMMIT that finds the queue full is left out: the reader has
messages enough to wake up for, and finds the newer count in the header when it reads them. So a producer never waits
for its consumer, until FINISH.
"""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Final, Self

from kvxfer.buffer import ConsumerBuffer, ProducerBuffer
from kvxfer.channel import Channel
from kvxfer.doorbell import Kind, abort, left, message, parse, receive
from kvxfer.errors import AbortReason, ChannelError, HeaderError, KvxferError, PeerTimeoutError, SealError
from kvxfer.header import Header

__all__ = ["Consumer", "Producer", "abort", "await_request", "request"]

# Batches grow from the least to the most, and shrink again towards the end.
_LEAST_BATCH: Final = 1 << 20
_MOST_BATCH: Final = 4 << 20


def request(channel: Channel, first_block: int, *, timeout: float) -> None:
    """Asks the producer at the other end to begin, with block number `first_block` of its sequence.

    Raises:
        PeerDiedError: it is gone.
        PeerTimeoutError: it does not read.
    """
    channel.send(message(Kind.REQUEST, first_block), timeout=timeout)


def await_request(channel: Channel, *, timeout: float) -> int:
    """Waits until the consumer asks; gives the block number that it wants first.

    Raises:
        PeerDiedError: it is gone.
        PeerTimeoutError: it did not ask within `timeout` seconds.
        TransferAbortedError: it does not want anything.
        ChannelError: it said something else.
    """
    kind, count = receive(channel, time.monotonic() + timeout)
    if kind is not Kind.REQUEST:
        raise ChannelError("something else than a request")
    return count


class Producer:
    """The sending end of one transfer. Leaving its block without `finish` aborts it.

    Args:
        channel: to the consumer; the caller closes it afterwards.
        descriptor: an unsealed memfd of exactly `header.buffer_bytes`; the caller closes it.
        header: what the blocks will be.
        passing: whether the consumer gets the descriptor from here, or has it already.
        timeout: seconds that the consumer has to read.

    Raises:
        SealError: the memfd cannot be sealed, or has another size.
        PeerDiedError: the consumer is gone.
        PeerTimeoutError: it does not read.
    """

    def __init__(self, channel: Channel, descriptor: int, header: Header, *, passing: bool, timeout: float) -> None:
        self._channel = channel
        self._over = False
        self._buffer = ProducerBuffer(descriptor, header)
        try:
            channel.send(message(Kind.OFFER), [descriptor] if passing else [], timeout=timeout)
        except BaseException:
            self._buffer.close()
            raise

    def populate(self, first: int, count: int) -> None:
        """Makes the pages of blocks present in one go, which costs less than a fault for each."""
        self._buffer.populate(first, count)

    def batches(self) -> Iterator[range]:
        """All blocks in order, a few at a time: present before they are given, committed when the next are asked for.

        Waking the other end costs about what copying a small block does, so it is done once for several: few at first,
        so that the other end begins soon; few at last, so that little is left to do for it once this end is through.

        Raises:
            KvxferError: as `commit`.
        """
        header = self._buffer.header
        least, most = (max(1, size // header.block_bytes) for size in (_LEAST_BATCH, _MOST_BATCH))
        first = 0
        while rest := header.block_count - first:
            batch = range(first, first + min(rest, max(least, min(most, first, rest // 2))))
            self.populate(first, len(batch))
            yield batch
            self.commit(batch.stop)
            first = batch.stop

    def block(self, index: int) -> memoryview:
        """A block to write into. Release it before the end of the transfer."""
        return self._buffer.block(index)

    def commit(self, count: int) -> None:
        """Publishes that the first `count` blocks are whole. Never waits.

        Raises:
            PeerDiedError: the consumer is gone.
            TransferAbortedError: the consumer does not want the rest.
            ChannelError: the consumer said something else; or a block is committed twice.
        """
        self._buffer.commit(count)
        with suppress(PeerTimeoutError):
            self._channel.send(message(Kind.COMMIT, count), timeout=0)
        with suppress(PeerTimeoutError):
            receive(self._channel, time.monotonic())
            raise ChannelError("a consumer has nothing to say but that it gives up")

    def finish(self, *, timeout: float) -> None:
        """Says that all blocks are whole.

        Raises:
            ChannelError: they are not all committed.
            PeerDiedError: the consumer is gone.
            PeerTimeoutError: it does not read.
        """
        if self._buffer.committed != self._buffer.header.block_count:
            raise ChannelError("a transfer is finished when all its blocks are committed")
        self._channel.send(message(Kind.FINISH, self._buffer.committed), timeout=timeout)
        self._over = True

    def abort(self, reason: AbortReason) -> None:
        """Gives the transfer up."""
        if not self._over:
            self._over = True
            abort(self._channel, reason)

    def close(self) -> None:
        """Ends this end of the transfer; one that is not finished is aborted. The channel stays the caller's."""
        self.abort(AbortReason.UNSPECIFIED)
        self._buffer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Consumer:
    """The receiving end of one transfer. Leaving its block before the end aborts it.

    Attributes:
        header: what the buffer holds; checked against nothing but itself.

    Args:
        channel: to the producer; the caller closes it afterwards.
        max_bytes: the largest buffer that is accepted.
        timeout: seconds until the offer must be here.
        own: the memfd, where this end made it; the producer must then not send one. The caller closes it.

    Raises:
        PeerDiedError: the producer is gone.
        PeerTimeoutError: no offer came.
        TransferAbortedError: it gave up.
        ChannelError: it said something else.
        SealError: the buffer is not sealed as it must be. (The producer has been told, as for the next.)
        HeaderError: its header is damaged or impossible.
    """

    def __init__(self, channel: Channel, *, max_bytes: int, timeout: float, own: int | None = None) -> None:
        self._channel = channel
        self._over = False
        descriptor = _offered(channel, own, time.monotonic() + timeout)
        with ExitStack() as stack:
            if own is None:
                stack.callback(os.close, descriptor)  # the mapping is enough
            try:
                self._buffer = ConsumerBuffer(descriptor, max_bytes=max_bytes)
            except (SealError, HeaderError):
                abort(channel, AbortReason.PROTOCOL)
                raise
        self.header = self._buffer.header

    def wait(self, count: int, *, timeout: float) -> int:
        """Waits until `count` blocks are committed; gives how many are.

        Raises:
            PeerDiedError: the producer is gone; at once.
            PeerTimeoutError: they were not committed within `timeout` seconds.
            TransferAbortedError: it gave up.
            ChannelError: it broke the protocol.
            HeaderError: its commit counter is impossible.
        """
        deadline = time.monotonic() + timeout
        while (committed := self._buffer.committed) < count:
            if self._over:
                raise ChannelError("the producer finished before all its blocks were committed")
            self._listen(deadline)
        return committed

    def finish(self, *, timeout: float) -> None:
        """Waits until the producer says that all blocks are whole. Only then may they be relied on. Raises as `wait`.

        Raises:
            PeerDiedError: the producer is gone; at once.
        """
        deadline = time.monotonic() + timeout
        while not self._over:
            self._listen(deadline)
        self.wait(self.header.block_count, timeout=0)

    def populate(self, first: int, count: int) -> None:
        """Maps the pages of committed blocks in one go."""
        self._buffer.populate(first, count)

    def block(self, index: int) -> memoryview:
        """A committed block, read-only. Release it before the end of the transfer."""
        return self._buffer.block(index)

    def abort(self, reason: AbortReason) -> None:
        """Gives the transfer up."""
        if not self._over:
            self._over = True
            abort(self._channel, reason)

    def close(self) -> None:
        """Ends this end of the transfer; one that is not finished is aborted. The channel stays the caller's."""
        self.abort(AbortReason.CANCELLED)
        self._buffer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _listen(self, deadline: float) -> None:
        kind, count = receive(self._channel, deadline)
        if kind not in {Kind.COMMIT, Kind.FINISH} or count > self._buffer.committed:
            raise ChannelError("the producer announced what it did not commit")
        if kind is Kind.FINISH:
            if count != self.header.block_count:
                raise ChannelError("the producer finished before all its blocks were committed")
            self._over = True


def _offered(channel: Channel, own: int | None, deadline: float) -> int:
    """The descriptor of the offer: the consumer's own, or the one that came along."""
    received, descriptors = channel.receive(timeout=left(deadline))
    try:
        kind, _ = parse(received)
        if kind is not Kind.OFFER or len(descriptors) != (own is None):
            raise ChannelError("something else than an offer")
    except KvxferError:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return descriptors[0] if own is None else own
