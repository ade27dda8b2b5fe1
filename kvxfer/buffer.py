"""Both ends' view of a buffer: the producer's writable one, and the consumer's, which the kernel keeps read-only.

The producer maps the memfd writable first and seals it afterwards (memfd_create(2), F_SEAL_FUTURE_WRITE): its own
mapping stays, nobody can make another one, and nobody can change the size, so no reader can be hit by SIGBUS.
"""

import os
from typing import Self

from kvxfer import seals
from kvxfer.errors import ChannelError, HeaderError, SealError
from kvxfer.header import COMMITTED, COMMITTED_OFFSET, HEADER_BYTES, Header
from kvxfer.mapping import Mapping


class ProducerBuffer:
    """The writing end. Not for several threads at once.

    Args:
        descriptor: an unsealed memfd of exactly `header.buffer_bytes`; the caller keeps and closes it. It is sealed
            here, for good.
        header: what the blocks will be.

    Raises:
        SealError: the memfd cannot be sealed, or has another size.
    """

    def __init__(self, descriptor: int, header: Header) -> None:
        self.header = header
        self.committed = 0
        seals.require(descriptor, 0, header.buffer_bytes)
        self._mapping = _mapped(descriptor, header.buffer_bytes, writable=True)
        self._view = self._mapping.view
        try:
            self._view[:HEADER_BYTES] = header.pack()
            seals.add(descriptor, seals.READ_ONLY_FOR_OTHERS)
        except BaseException:
            self._mapping.close()
            raise
        self._counter = _counter(self._view)
        self._guarded = -(-HEADER_BYTES // self._mapping.grain) * self._mapping.grain

    def populate(self, first: int, count: int) -> None:
        """Makes the pages of blocks present in one go, which costs less than a fault for each."""
        start = self.header.offset(first)
        self._mapping.populate(start, self.header.offset(first + count) - start)

    def block(self, index: int) -> memoryview:
        """The bytes of a block that is not committed yet, writable. Release it before `close`.

        Raises:
            ChannelError: there is no such block, or it is committed.
        """
        if not self.committed <= index < self.header.block_count:
            raise ChannelError("no such block, or it is committed already")
        start = self.header.offset(index)
        return self._view[start : start + self.header.block_bytes]

    def commit(self, count: int) -> None:
        """Publishes that the first `count` blocks are whole, and write-protects them in this process.

        The protection is a guard against this process's own bugs; the border is the seal. In a large buffer it moves
        in whole huge pages, and what is left over is protected with the last block.

        Raises:
            ChannelError: `count` goes backwards or beyond the last block.
        """
        if not self.committed < count <= self.header.block_count:
            raise ChannelError("blocks are committed in order, each once")
        self._guard(count)
        self.committed = count
        # One store, after the blocks; the doorbell's system call orders it for the other end.
        self._counter[0] = count

    def _guard(self, count: int) -> None:
        if count == self.header.block_count:
            start, stop = HEADER_BYTES, self.header.buffer_bytes
        else:
            end = self.header.offset(count)
            start, stop = self._guarded, end - end % self._mapping.grain
        if start < stop:
            self._mapping.protect(start, stop - start)
            self._guarded = stop

    def close(self) -> None:
        """Unmaps it. Every view from `block` must have been released."""
        self._counter.release()
        self._mapping.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ConsumerBuffer:
    """The reading end. Checks everything before it maps anything.

    Args:
        descriptor: from the producer, or the consumer's own that the producer has sealed; the caller keeps and closes
            it.
        max_bytes: the largest buffer that is accepted.

    Raises:
        SealError: not a memfd, not sealed, not of the size that its header says, or over `max_bytes`.
        HeaderError: the header is damaged or impossible.
    """

    def __init__(self, descriptor: int, *, max_bytes: int) -> None:
        size = seals.require_any_size(descriptor, seals.READ_ONLY_FOR_OTHERS)
        if not HEADER_BYTES < size <= max_bytes:
            raise HeaderError("a buffer of that size is not accepted")
        # One copy of the header in memory of our own: what is checked is what is used, whatever the producer does.
        self.header = Header.unpack(os.pread(descriptor, HEADER_BYTES, 0))
        seals.require(descriptor, seals.READ_ONLY_FOR_OTHERS, self.header.buffer_bytes)
        self._committed = 0
        self._mapping = _mapped(descriptor, self.header.buffer_bytes, writable=False)
        self._view = self._mapping.view
        self._counter = _counter(self._view)

    @property
    def committed(self) -> int:
        """How many leading blocks may be read, as the producer publishes it.

        Raises:
            HeaderError: the count went backwards or beyond the last block.
        """
        count = self._counter[0]
        if not self._committed <= count <= self.header.block_count:
            raise HeaderError("the commit counter is impossible")
        self._committed = count
        return self._committed

    def populate(self, first: int, count: int) -> None:
        """Maps the pages of committed blocks in one go."""
        start = self.header.offset(first)
        self._mapping.populate(start, self.header.offset(first + count) - start)

    def block(self, index: int) -> memoryview:
        """The bytes of a committed block, read-only. Release it before `close`.

        Raises:
            ChannelError: it is not committed.
        """
        if not 0 <= index < self._committed:
            raise ChannelError("the block is not committed")
        start = self.header.offset(index)
        return self._view[start : start + self.header.block_bytes]

    def close(self) -> None:
        """Unmaps it. Every view from `block` must have been released."""
        self._counter.release()
        self._mapping.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _counter(view: memoryview) -> memoryview:
    """The commit counter as one aligned word: read and written whole, which `struct` does not promise.

    (`struct.pack_into` clears the field before it writes it: the other end would see it go backwards.)
    """
    return view[COMMITTED_OFFSET : COMMITTED_OFFSET + COMMITTED.size].cast("I")


def _mapped(descriptor: int, size: int, *, writable: bool) -> Mapping:
    try:
        return Mapping(descriptor, size, writable=writable)
    except OSError as error:
        raise SealError(f"cannot map the memfd: {error.strerror}") from None
