"""Blocks of keys and values that tell what they were computed for, and the app's side of their transfers."""

import dataclasses
import os

import torch

from kvxfer.channel import Channel
from kvxfer.transfer import Producer
from tie.bones.blocks import HostBlocks
from tie.runtime.kv_blocks import Format

VOCABULARY = 259
TOKENS = 4
BYTES = 64
BLOCKS = 24
WAIT_S = 20
FORMAT = Format("model", "release", "layout", TOKENS, BYTES)


class Memory(HostBlocks):
    """Blocks of an executor, and an executor: each position's bytes say which token it was computed for, after which.

    The next token depends on every position before it, through the bytes: a wrong block gives another answer.
    """

    def __init__(self) -> None:
        self.data = bytearray(BLOCKS * BYTES)
        self.computed = 0

    def block_view(self, block: int) -> memoryview:
        return memoryview(self.data)[block * BYTES : (block + 1) * BYTES]

    def forward(self, batch):
        rows = []
        for source, target in getattr(batch, "copies", ()):
            self.block_view(target)[:] = self.block_view(source)
        for part in batch.slices:
            self.computed += len(part.tokens)
            width = BYTES // TOKENS
            for offset, token in enumerate(part.tokens):
                position = part.start + offset
                before = self._at(part.blocks, position - 1) if position else 0
                value = (before * 31 + token + 7) % (1 << 32)
                view = self.block_view(part.blocks[position // TOKENS])
                start = position % TOKENS * width
                view[start : start + width] = value.to_bytes(4, "little") * (width // 4)
                if offset >= len(part.tokens) - part.logits:
                    rows.append(value % 255)
        logits = torch.zeros(len(rows), VOCABULARY)
        for index, token in enumerate(rows):
            logits[index, token] = 10.0
        return logits

    def _at(self, blocks, position):
        start = position % TOKENS * (BYTES // TOKENS)
        return int.from_bytes(self.block_view(blocks[position // TOKENS])[start : start + 4], "little")


@dataclasses.dataclass
class Promised:
    """What an app has been given: a ticket, its end of a channel, and for an import a buffer."""

    ticket: bytes
    channel: Channel
    buffer: int | None = None

    def close(self) -> None:
        self.channel.close()
        if self.buffer is not None:
            os.close(self.buffer)


def promised(grant) -> Promised:
    """As if the descriptors had come over a socket."""
    descriptors = [os.dup(descriptor) for descriptor in grant.descriptors]
    grant.close()
    return Promised(grant.ticket, Channel.adopt(descriptors[0]), *descriptors[1:])


def fill(promise: Promised, header, contents) -> None:
    """Sends the blocks of an import."""
    with Producer(promise.channel, promise.buffer, header, passing=False, timeout=WAIT_S) as producer:
        for index, content in enumerate(contents):
            with producer.block(index) as view:
                view[:] = content
            producer.commit(index + 1)
        producer.finish(timeout=WAIT_S)


CONTENTS = [bytes([number]) * BYTES for number in (1, 2, 3)]
