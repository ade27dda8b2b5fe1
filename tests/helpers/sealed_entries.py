"""Entries as the cache store has them."""

import os

from kvxfer import seals
from tie.warden.media import SealedMemory


def stored(data: bytes | bytearray) -> SealedMemory:
    """Bytes where the store has them."""
    descriptor = seals.create("entry", len(data))
    try:
        os.pwrite(descriptor, data, 0)
        seals.add(descriptor, seals.IMMUTABLE)
        return SealedMemory(descriptor, len(data))
    finally:
        os.close(descriptor)
