"""Sealed entries between the cache store and this process: opened, sealed, ready to be filed. Blocking."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from kvxfer import seals
from kvxfer.mapping import Mapping
from tie.store.client import StoreClient
from tie.warden.entry import Kind, Opener, Sealer, Shape
from tie.warden.errors import EntryError
from tie.warden.keys import ConversationKey, Root
from tie.warden.manifest import CacheFormat, Manifest
from tie.warden.media import SealedMemory


class StoredEntry:
    """An entry out of the store, its manifest open and of the wanted format, its blocks still sealed.

    Attributes:
        manifest: what it says.
        header_sha256: what a head names it by.

    Args:
        descriptor: of its memfd; belongs to this from here on.
        size: of it.
        key: the conversation's.
        kind: what it must be.
        wanted: the format that it must have.

    Raises:
        EntryError: it does not open.
    """

    def __init__(self, descriptor: int, size: int, key: ConversationKey, kind: Kind, wanted: CacheFormat) -> None:
        try:
            self._memory = SealedMemory(descriptor, size)
        finally:
            os.close(descriptor)  # the mapping is enough
        try:
            self._opener = Opener(key, kind, self._memory)
            self.manifest = Manifest.decode(self._opener.manifest, wanted)
            self._check(wanted.block_bytes if kind is Kind.SEGMENT else 0)
        except BaseException:
            self.close()
            raise
        self.header_sha256 = self._opener.header_sha256

    @classmethod
    def fetch(
        cls, store: StoreClient, index: bytes, key: ConversationKey, kind: Kind, wanted: CacheFormat
    ) -> Self | None:
        """The entry of an index, or None.

        Raises:
            EntryError: it does not open.
            StoreError: the store is gone.
        """
        found = store.get(index)
        if found is None:
            return None
        return cls(*found, key, kind, wanted)

    def _check(self, block_bytes: int) -> None:
        """What it says of itself must be what it is."""
        blocks = self.manifest.block_count if block_bytes else 0
        if (self._opener.shape.block_count, self._opener.shape.block_bytes) != (blocks, block_bytes):
            raise EntryError

    def open(self, block: int, into: memoryview) -> None:
        """Opens one block; where it does not open, the memory is zeroed.

        Raises:
            EntryError: it does not open.
        """
        self._opener.open(block, into)

    def close(self) -> None:
        """Lets go of its memory."""
        self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def sealing(store: StoreClient, key: ConversationKey, kind: Kind, manifest: Manifest) -> Iterator[Sealer]:
    """Makes an entry; after the block it can be filed with `StoreClient.put`.

    Raises:
        StoreError: there is no room for it.
        SealError: somebody else has it mapped for writing.
    """
    plaintext = manifest.encode()
    blocks = manifest.block_count if kind is Kind.SEGMENT else 0
    shape = Shape.of(plaintext, blocks, manifest.format.block_bytes if blocks else 0)
    # Nobody can open what is sealed under a request's own key once the request has ended: it ends with it.
    descriptor = store.new(shape.entry_bytes, transient=key.root is Root.REQUEST)
    try:
        # Mapped, because a process of a request may write no file of any size, not even with pwrite to a memfd.
        with Mapping(descriptor, shape.entry_bytes, writable=True) as mapping:
            # The store has made the pages present; this maps them all, without a fault for each.
            mapping.populate(0, shape.entry_bytes)
            yield Sealer(key, kind, plaintext, shape, mapping.view)
        seals.add(descriptor, seals.CONTENT)
    finally:
        os.close(descriptor)
