"""What stands for an image in a prompt: the tokens that a model was trained to find around its squares."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tie.assets.manifest import Images, Manifest
from tie.assets.tokenizer import Tokenizer

MAX_IMAGES: Final = 8  # of one request
MAX_IMAGE_BYTES: Final = 8 * 1024 * 1024  # of the file of each
_AROUND: Final = "<fake_token_around_image>"
_WHOLE: Final = "<global-img>"


Size = tuple[int, int]
"""Rows and columns of squares that an image is cut into; 0 and 0: it is not cut."""


@dataclass(frozen=True, slots=True, repr=False)
class Expanded:
    """A prompt with the tokens of its images.

    Attributes:
        ids: its token ids.
        spans: of each image: the position of its first token, and the one after its last.
    """

    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]


class Placeholders:
    """Turns the one token that a chat template has for an image into as many as its squares take.

    The tokens are Idefics3's and SmolVLM's for pictures that are cut, and the image token alone for LLaVA.

    Args:
        images: how the model wants them.
        square: positions that a square takes.
        tokenizer: the bundle's.
    """

    def __init__(self, images: Images, square: int, tokenizer: Tokenizer) -> None:
        self.token_id = images.token_id
        self._plain = images.kind == "square"
        self._split = images.split
        self._most = images.longest_edge // images.side + 1
        self._square = square
        self._tokenizer = tokenizer
        self._token = tokenizer.token_text(images.token_id) or ""

    @classmethod
    def of(cls, manifest: Manifest, tokenizer: Tokenizer) -> "Placeholders | None":
        """Those of a model; None where it takes no images."""
        vision = manifest.architecture.vision
        return cls(manifest.images, vision.tokens, tokenizer) if manifest.images and vision else None

    def possible(self, size: Size) -> bool:
        """Whether an image can be cut so."""
        rows, columns = size
        return size == (0, 0) or (self._split and 0 < rows <= self._most and 0 < columns <= self._most)

    def ids(self, rows: int, columns: int) -> list[int]:
        """What stands for an image of so many squares; of 0 rows: for one that is not cut."""
        if self._plain:
            return [self.token_id] * self._square
        square = self._token * self._square
        text = "".join(
            "".join(f"{_AROUND}<row_{row + 1}_col_{column + 1}>{square}" for column in range(columns)) + "\n"
            for row in range(rows)
        )
        text += ("\n" if rows else "") + f"{_AROUND}{_WHOLE}{square}{_AROUND}"
        return self._tokenizer.encode(text, special=True)

    def expanded(self, prompt: Sequence[int], sizes: Sequence[Size | None]) -> Expanded:
        """The prompt with each image's tokens in the place of its one.

        Args:
            prompt: with one image token for each image.
            sizes: of each; where one is not known, its one token stays.
        """
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        left = iter(sizes)
        for token in prompt:
            size = next(left) if token == self.token_id else None
            start = len(ids)
            ids += [token] if size is None else self.ids(*size)
            if token == self.token_id:
                spans.append((start, len(ids)))
        return Expanded(tuple(ids), tuple(spans))
