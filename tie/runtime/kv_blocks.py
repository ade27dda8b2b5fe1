"""Blocks as they go from and into the executor's memory, and what is checked before one is believed."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvxfer.channel import Channel
from kvxfer.doorbell import left
from kvxfer.errors import AbortReason
from kvxfer.header import Header
from kvxfer.transfer import Consumer, Producer
from tie.runtime import sequence as sequences


class BlockMemory(Protocol):
    """What those who copy blocks need of an executor."""

    def read_block(self, block: int, target: memoryview) -> None:
        """Copies a block's bytes into `target`, which has as many. From any thread, while no step writes the block."""

    def write_block(self, block: int, source: memoryview) -> None:
        """Copies them back, as `read_block` gave them."""


class PartMemory(BlockMemory, Protocol):
    """One rank's part of all blocks; the only rank's are the blocks themselves."""

    @property
    def block_bytes(self) -> int:
        """Bytes of its slice of a block."""
        ...


@dataclass(frozen=True, slots=True)
class Format:
    """What blocks of this runtime are; every header must agree with it, field by field."""

    model: str
    release: str
    layout: str
    block_tokens: int
    block_bytes: int

    def header(self, first_block: int, block_count: int) -> Header:
        """The header of a buffer with these blocks."""
        return Header(
            model=self.model,
            release=self.release,
            layout=self.layout,
            block_tokens=self.block_tokens,
            block_bytes=self.block_bytes,
            block_count=block_count,
            first_token=first_block * self.block_tokens,
            token_count=block_count * self.block_tokens,
        )


class Restored:
    """Blocks that were received and checked: the keys and values of a prompt's first tokens. Closed once they are used.

    Attributes:
        first_block: block of the prompt that they begin with: those before are a registered system prompt's.
        block_count: how many.
    """

    def __init__(self, consumer: Consumer, on_close: Callable[[], None]) -> None:
        self.first_block = consumer.header.first_token // consumer.header.block_tokens
        self.block_count = consumer.header.block_count
        self._consumer = consumer
        self._on_close = on_close
        self._open = True

    def copy_into(self, memory: BlockMemory, target: sequences.Sequence, may_go_on: Callable[[], bool]) -> bool:
        """Copies the next of them, one at least, and more while `may_go_on`; whether all are there. The step thread's.

        What is there, a shared prefix included, is what counts as computed, so a target that has lost its blocks begins
        anew.
        """
        tokens = self._consumer.header.block_tokens
        end = self.first_block + self.block_count
        for number in range(target.computed // tokens, end):
            with self._consumer.block(number - self.first_block) as source:
                memory.write_block(target.blocks[number], source)
            target.computed += tokens
            if not may_go_on():
                break
        return target.computed >= end * tokens

    def close(self) -> None:
        """Lets go of them. A second time does nothing."""
        if self._open:
            self._open = False
            self._consumer.close()
            self._on_close()


@dataclass(frozen=True, slots=True)
class Kept:
    """A finished sequence's whole computed blocks, held until `release` is called, once, from any thread."""

    blocks: tuple[int, ...]
    release: Callable[[], None]


def receive(
    channel: Channel, descriptor: int, size: int, expected: Format, *, prompt_tokens: int, deadline: float
) -> Consumer | None:
    """All blocks of an import, whole, mapped, and of the format that is expected. None: of another.

    Args:
        channel: to the app.
        descriptor: the buffer, which this runtime made.
        size: of it.
        expected: this runtime's format.
        prompt_tokens: the prompt's length; its last token at least is always computed.
        deadline: on the monotonic clock.

    Raises:
        KvxferError: the app gave up, died, was too slow, or broke the protocol.
    """
    consumer = Consumer(channel, max_bytes=size, timeout=left(deadline), own=descriptor)
    try:
        header = consumer.header
        first, tokens = divmod(header.first_token, expected.block_tokens)
        fits = header == expected.header(first, header.block_count) and not tokens
        if not fits or header.first_token + header.token_count >= prompt_tokens:
            consumer.abort(AbortReason.INCOMPATIBLE)
            consumer.close()
            return None
        ready = 0
        while ready < header.block_count:
            committed = consumer.wait(ready + 1, timeout=left(deadline))
            # The step thread is not to pay for the faults, and here they overlap with what is still to come.
            consumer.populate(ready, committed - ready)
            ready = committed
        consumer.finish(timeout=left(deadline))
    except BaseException:
        consumer.close()
        raise
    return consumer


def send(
    channel: Channel, descriptor: int, header: Header, memory: BlockMemory, blocks: Sequence[int], *, timeout: float
) -> None:
    """Copies blocks out, one by one.

    Args:
        channel: to the app.
        descriptor: a buffer of the header's size.
        header: what the blocks are.
        memory: where they lie.
        blocks: their numbers, in order.
        timeout: seconds that the app has to take them.

    Raises:
        KvxferError: the app gave up, died, or was too slow.
    """
    deadline = time.monotonic() + timeout
    with Producer(channel, descriptor, header, passing=True, timeout=left(deadline)) as producer:
        for batch in producer.batches():
            for index in batch:
                with producer.block(index) as target:
                    memory.read_block(blocks[index], target)
        producer.finish(timeout=left(deadline))
