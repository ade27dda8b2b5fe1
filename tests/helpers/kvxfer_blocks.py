"""A transfer of a few blocks, and what they hold."""

from kvxfer.header import Header

BLOCKS = 6
HEADER = Header("m", "r", "l", block_tokens=4, block_bytes=5000, block_count=BLOCKS, first_token=8, token_count=23)
MOST = 1 << 20


def content(block: int) -> bytes:
    """What a block holds."""
    return bytes((block * 31 + position) % 251 for position in range(HEADER.block_bytes))


def write(producer, block: int) -> None:
    """Writes a block and commits it."""
    with producer.block(block) as view:
        view[:] = content(block)
    producer.commit(block + 1)


def read(consumer, block: int) -> bytes:
    """What the consumer sees of a block."""
    with consumer.block(block) as view:
        return bytes(view)
