"""A prompt with images, as a cached conversation sees it: which tokens are certain, and of which images.

To the tokens one image is like another of its size. So each is known by a digest under the conversation's own key, and
what was cached is good up to the first image that is another one than before.
"""

import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field

from tie.assets.images import Placeholders, Size
from tie.proto import runtime_pb2
from tie.warden.manifest import Image


@dataclass(slots=True, repr=False)
class Prompt:
    """One request's.

    Attributes:
        ids: token ids, one for each image.
        images: their files.
        placeholders: what stands for images; None: the model takes none.
        digests: of the images, once the conversation's key has been at hand.
        sizes: of the first images, as far as they are known.
    """

    ids: tuple[int, ...]
    images: tuple[bytes, ...] = ()
    placeholders: Placeholders | None = None
    digests: Sequence[bytes] = ()
    sizes: list[Size] = field(default_factory=list)

    def recognise(self, earlier: Sequence[Image]) -> None:
        """Takes over the sizes of the images that are those of an earlier turn, up to the first that is not."""
        self.sizes = []
        for digest, image in zip(self.digests, earlier, strict=False):
            size = image.rows, image.columns
            known = self.placeholders is not None and self.placeholders.possible(size)
            if not known or not hmac.compare_digest(digest, image.digest):
                return
            self.sizes.append(size)

    @property
    def certain(self) -> tuple[int, ...]:
        """Its first tokens with those of images: up to the first image that is not known, and never the last token."""
        if self.placeholders is None:
            return self.ids[:-1]
        unknown = len(self.images) - len(self.sizes)
        whole = self.placeholders.expanded(self.ids, [*self.sizes, *[None] * unknown])
        return whole.ids[: whole.spans[len(self.sizes)][0] if unknown else -1]

    def known_sizes(self) -> list[runtime_pb2.ImageSize]:
        """For the runtime: of all images, or of none where none is known."""
        known = [runtime_pb2.ImageSize(known=True, rows=rows, columns=columns) for rows, columns in self.sizes]
        return [*known, *[runtime_pb2.ImageSize()] * (len(self.images) - len(known))] if known else []

    def whole(self, looked: Sequence[runtime_pb2.ImageSize]) -> tuple[tuple[int, ...], list[Image]] | None:
        """All its tokens, and its images, by what the runtime says of them; None where it says what cannot be."""
        if self.placeholders is None:
            return self.ids, []
        sizes = [(size.rows, size.columns) for size in looked]
        if len(sizes) != len(self.images) or not all(map(self.placeholders.possible, sizes)):
            return None
        images = [Image(digest, *size) for digest, size in zip(self.digests, sizes, strict=True)]
        return self.placeholders.expanded(self.ids, sizes).ids, images
