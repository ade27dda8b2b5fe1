"""A cached conversation, as one request sees it: a head that names segments, whose blocks may fit this prompt.

Blocking: each method runs on a thread of its own, one at a time. What a method cannot do costs the reuse, never the
request: the runtime computes what it does not get. docs/warden.md has the whole picture.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvxfer import doorbell, transfer
from kvxfer.channel import Channel
from kvxfer.errors import AbortReason, ChannelError, TransferAbortedError
from kvxfer.header import Header, buffer_bytes
from kvxfer.transfer import Consumer, Producer
from tie.app.entries import StoredEntry, sealing
from tie.app.placed import Prompt
from tie.assets.prefix import SharedPrefix, common_length
from tie.store.client import StoreClient, random_index
from tie.warden.entry import Kind
from tie.warden.errors import EntryError
from tie.warden.keys import ConversationKey, Root
from tie.warden.manifest import CacheFormat, Image, Manifest, Segment

MAX_SEGMENTS: Final = 16  # a conversation of more is sealed anew as one


@dataclass(slots=True)
class _Kept:
    """A segment of which the first `blocks` blocks fit this prompt."""

    index: bytes
    entry: StoredEntry
    blocks: int


class Conversation:
    """One request's view of it.

    Args:
        key: the conversation's; closed by `close`.
        cache_format: of this runtime's blocks.
        store: socket of the cache store.
        prefix: of this prompt: blocks that the runtime has for all, and that are never exported.
        timeout: seconds for each step of it that waits for another process.
        ttl_s: how long what it files is to live.
    """

    def __init__(
        self,
        key: ConversationKey,
        cache_format: CacheFormat,
        store: Path,
        *,
        prefix: SharedPrefix,
        timeout: float,
        ttl_s: float,
    ) -> None:
        self._key = key
        self._format = cache_format
        self._store_path = store
        self._prefix = prefix
        self._first = 0  # block of the prompt that the cached ones begin with
        self._timeout = timeout
        self._ttl_s = ttl_s
        self._store: StoreClient | None = None
        self._kept: list[_Kept] = []

    @property
    def lasting(self) -> bool:
        """Whether a later request can find what is saved."""
        return self._key.root is not Root.REQUEST

    @property
    def blocks(self) -> int:
        """Blocks that are cached and fit this prompt, the shared prefix aside."""
        return sum(kept.blocks for kept in self._kept)

    def look_up(self, prompt: Prompt) -> None:
        """Finds the longest run of cached whole blocks that `prompt` begins with; its last token is never among them.

        What is known of its images is noted in it.

        Raises:
            StoreError: the store is gone.
        """
        prompt.digests = self._key.digests(prompt.images)
        store = self._store = StoreClient(self._store_path, timeout=self._timeout)
        if not self.lasting:
            return  # nothing has been filed under a key as new as the request
        try:
            head = StoredEntry.fetch(store, self._key.index(), self._key, Kind.HEAD, self._format)
            if head is None:
                return
            with head:
                self._collect(store, head.manifest, prompt)
        except EntryError:
            return  # as if it were not there; what was collected before is good

    def _collect(self, store: StoreClient, head: Manifest, prompt: Prompt) -> None:
        prompt.recognise(head.images)
        tokens = self._format.block_tokens
        # What was saved before a prefix was shared, or by a runtime that had none, begins at the prompt's beginning.
        self._first = self._prefix.blocks if head.prefix_sha256 else 0
        if (head.first_token, head.prefix_sha256) != (
            self._first * tokens,
            self._prefix.sha256 if self._first else b"",
        ):
            return
        left = common_length(head.token_ids, prompt.certain[self._first * tokens :]) // tokens
        first = 0
        for segment in head.segments:
            if left <= 0:
                return
            entry = StoredEntry.fetch(store, segment.index, self._key, Kind.SEGMENT, self._format)
            if entry is None:
                return
            used = min(left, segment.block_count)
            named = head.token_ids[first * tokens : (first + segment.block_count) * tokens]
            if (
                entry.header_sha256 != segment.header_sha256
                or entry.manifest.first_token != head.first_token + first * tokens
                or entry.manifest.prefix_sha256 != head.prefix_sha256
                or entry.manifest.token_ids[: len(named)] != named
            ):
                entry.close()
                raise EntryError
            self._kept.append(_Kept(segment.index, entry, used))
            first += segment.block_count
            left -= segment.block_count

    def restore(self, channel: Channel, buffer: int) -> None:
        """Opens the blocks into a buffer of the runtime's, one by one, while the runtime takes them.

        Args:
            channel: of the transfer.
            buffer: the runtime's memfd for exactly these blocks.

        Raises:
            EntryError: a block does not open; the runtime has been told, and nothing of it is kept.
            KvxferError: the runtime does not want them.
        """
        header = self._header(self._first, self.blocks)
        with Producer(channel, buffer, header, passing=False, timeout=self._timeout) as producer:
            try:
                sealed = self._sealed_blocks()
                for batch in producer.batches():
                    for number in batch:
                        entry, block = sealed[number]
                        with producer.block(number) as target:
                            entry.open(block, target)
            except EntryError:
                producer.abort(AbortReason.CORRUPT)
                self._forget()
                raise
            producer.finish(timeout=self._timeout)

    def save(self, tokens: Sequence[int], images: Sequence[Image], channel: Channel) -> None:
        """Seals the blocks that no kept segment has, files them as a new segment, and then the new head.

        Args:
            tokens: of the whole sequence: prompt and answer.
            images: of the prompt.
            channel: of the export.

        Raises:
            KvxferError: the runtime does not give them.
            StoreError: the store does not take them.
        """
        store = self._store
        if store is None:
            doorbell.abort(channel, AbortReason.CANCELLED)
            return
        if len(self._kept) >= MAX_SEGMENTS:
            self._forget()
        if not self._kept:
            self._first = self._prefix.blocks
        first = self._first + self.blocks
        transfer.request(channel, first, timeout=self._timeout)
        try:
            added = self._seal_segment(store, tokens, first, channel)
        except TransferAbortedError as error:
            if error.reason is not AbortReason.CANCELLED:
                raise
            self._renew(store, self._key.index())  # nothing new: what there is lives on
            return
        segments = (*(Segment(kept.index, kept.blocks, kept.entry.header_sha256) for kept in self._kept), added)
        start = self._first * self._format.block_tokens
        covered = sum(segment.block_count for segment in segments) * self._format.block_tokens
        named = tuple(tokens[start : start + covered])
        head = Manifest(self._format, start, named, segments, self._prefix_sha256, tuple(images))
        with sealing(store, self._key, Kind.HEAD, head):
            pass
        # The one moment at which the conversation changes: whoever comes later finds this head or the one before.
        store.put(self._key.index(), ttl_s=self._ttl_s)
        self._renew(store)

    def _seal_segment(self, store: StoreClient, tokens: Sequence[int], first: int, channel: Channel) -> Segment:
        most = buffer_bytes(self._format.block_bytes, max(1, len(tokens) // self._format.block_tokens))
        with Consumer(channel, max_bytes=most, timeout=self._timeout) as consumer:
            header = consumer.header
            if header != self._header(first, header.block_count) or header.first_token + header.token_count > len(
                tokens
            ):
                consumer.abort(AbortReason.INCOMPATIBLE)
                raise ChannelError("the runtime exports something else than was asked for")
            ids = tuple(tokens[header.first_token : header.first_token + header.token_count])
            manifest = Manifest(self._format, header.first_token, ids, prefix_sha256=self._prefix_sha256)
            with sealing(store, self._key, Kind.SEGMENT, manifest) as sealer:
                ready = 0
                for block in range(header.block_count):
                    if block >= ready:
                        ready = consumer.wait(block + 1, timeout=self._timeout)
                        consumer.populate(block, ready - block)
                    with consumer.block(block) as plaintext:
                        sealer.seal(plaintext)
                consumer.finish(timeout=self._timeout)
            index = random_index()
            store.put(index, ttl_s=self._ttl_s)
            return Segment(index, header.block_count, sealer.header_sha256)

    def close(self) -> None:
        """Wipes the key and lets go of everything."""
        self._forget()
        self._key.close()
        if self._store:
            self._store.close()

    @property
    def _prefix_sha256(self) -> bytes:
        return self._prefix.sha256 if self._first else b""

    def _sealed_blocks(self) -> "list[tuple[StoredEntry, int]]":
        return [(kept.entry, block) for kept in self._kept for block in range(kept.blocks)]

    def _renew(self, store: StoreClient, *more: bytes) -> None:
        """A living conversation ages as one."""
        for index in (*(kept.index for kept in self._kept), *more):
            store.renew(index, ttl_s=self._ttl_s)

    def _forget(self) -> None:
        for kept in self._kept:
            kept.entry.close()
        self._kept = []

    def _header(self, first_block: int, block_count: int) -> Header:
        return Header(
            model=self._format.model,
            release=self._format.release,
            layout=self._format.layout,
            block_tokens=self._format.block_tokens,
            block_bytes=self._format.block_bytes,
            block_count=block_count,
            first_token=first_block * self._format.block_tokens,
            token_count=block_count * self._format.block_tokens,
        )
