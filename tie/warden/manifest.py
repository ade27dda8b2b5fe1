"""What is written inside an entry: for which model its blocks are, of which tokens, and, in a head, in which segments.

An authentic manifest was written by an earlier request of the same user, perhaps by an older release of this code:
it is checked all the same before anything is made of it.
"""

from dataclasses import dataclass
from typing import Final, Self

from google.protobuf.message import DecodeError

from tie.proto import warden_pb2
from tie.warden.entry import MAX_BLOCKS
from tie.warden.errors import EntryError
from tie.warden.keys import INDEX_BYTES

_SHA256_BYTES: Final = 32
MAX_SQUARES: Final = 64  # that an image may have in a row or a column


@dataclass(frozen=True, slots=True)
class CacheFormat:
    """What makes KV blocks of one runtime readable to another: all of it must be equal."""

    model: str
    release: str
    layout: str
    block_tokens: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment as a head names it.

    Attributes:
        index: where the store has it.
        block_count: how many blocks of the conversation it holds, after those of the segments before it.
        header_sha256: of its header: that entry and no other.
    """

    index: bytes
    block_count: int
    header_sha256: bytes


@dataclass(frozen=True, slots=True)
class Image:
    """An image of a conversation.

    Attributes:
        digest: of its file; see `ConversationKey.digests`.
        rows: of squares that it is cut into; 0: it is not.
        columns: of squares.
    """

    digest: bytes
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The sealed manifest of a head or a segment.

    Attributes:
        format: of the blocks.
        first_token: position of the first of `token_ids`.
        token_ids: of the positions that the blocks hold: whole blocks.
        segments: of a head, in order.
        prefix_sha256: of the shared system prefix before them, or empty.
        images: of a head: all of the conversation, in order.
    """

    format: CacheFormat
    first_token: int
    token_ids: tuple[int, ...]
    segments: tuple[Segment, ...] = ()
    prefix_sha256: bytes = b""
    images: tuple[Image, ...] = ()

    @property
    def block_count(self) -> int:
        """Blocks that `token_ids` fill."""
        return len(self.token_ids) // self.format.block_tokens

    def encode(self) -> bytes:
        """The plaintext."""
        message = warden_pb2.Manifest(
            model=self.format.model,
            release=self.format.release,
            layout=self.format.layout,
            block_tokens=self.format.block_tokens,
            block_bytes=self.format.block_bytes,
            first_token=self.first_token,
            token_ids=self.token_ids,
            prefix_sha256=self.prefix_sha256,
        )
        for segment in self.segments:
            message.segments.add(
                index=segment.index, block_count=segment.block_count, header_sha256=segment.header_sha256
            )
        for image in self.images:
            message.images.add(digest=image.digest, rows=image.rows, columns=image.columns)
        return message.SerializeToString(deterministic=True)

    @classmethod
    def decode(cls, plaintext: bytes, wanted: CacheFormat) -> Self:
        """Reads a manifest that must be of `wanted`'s format.

        Raises:
            EntryError: it is of another, or not a manifest.
        """
        message = warden_pb2.Manifest()
        try:
            message.ParseFromString(plaintext)
        except DecodeError:
            raise EntryError from None
        segments = tuple(Segment(each.index, each.block_count, each.header_sha256) for each in message.segments)
        manifest = cls(
            CacheFormat(message.model, message.release, message.layout, message.block_tokens, message.block_bytes),
            message.first_token,
            tuple(message.token_ids),
            segments,
            message.prefix_sha256,
            tuple(Image(each.digest, each.rows, each.columns) for each in message.images),
        )
        manifest._check(wanted)
        return manifest

    def _check(self, wanted: CacheFormat) -> None:
        tokens = wanted.block_tokens
        if not (
            self.format == wanted
            and self.first_token % tokens == 0
            and self.token_ids
            and len(self.token_ids) % tokens == 0
            and self.block_count <= MAX_BLOCKS
            and len(self.prefix_sha256) in {0, _SHA256_BYTES}
            and all(
                len(segment.index) == INDEX_BYTES
                and len(segment.header_sha256) == _SHA256_BYTES
                and segment.block_count > 0
                for segment in self.segments
            )
            and all(
                len(image.digest) == _SHA256_BYTES and max(image.rows, image.columns) <= MAX_SQUARES
                for image in self.images
            )
            and (not self.segments or sum(segment.block_count for segment in self.segments) == self.block_count)
        ):
            raise EntryError
