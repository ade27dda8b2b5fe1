"""What the runtime and a `decoder_process` say to each other. It loads no decoder: only those who use one need it."""

import json
import struct
from dataclasses import asdict, dataclass
from typing import Final, Literal

from tie.runtime.images.exif import Pixels
from tie.runtime.images.limits import Limits

REPLY: Final = struct.Struct(">BHHH")  # 0 or a refusal; rows, columns and number of squares
LENGTH: Final = struct.Struct(">I")
GOOD: Final = 0
_LONGEST: Final = 4096  # whatever `longest_edge` says
_MOST_SIDE: Final = 2048
MOST_TILES: Final = 65


@dataclass(frozen=True, slots=True)
class Preparation:
    """How a model wants its pictures.

    Attributes:
        kind: see `tie.runtime.images.preparing`.
        side: of a square, in pixels.
        longest_edge: of the picture before it is cut; of `tiles` only.
        split: whether it is cut; of `tiles` only.
        resample: Pillow's number of the filter.
    """

    kind: Literal["tiles", "square"]
    side: int
    longest_edge: int
    split: bool
    resample: int

    def __post_init__(self) -> None:
        """Raises ValueError where no picture could be prepared so."""
        if not 1 <= self.side <= _MOST_SIDE or not 0 <= self.resample <= 5:
            raise ValueError("an image processor of this kind is not supported")
        if self.kind == "tiles" and not 1 <= self.longest_edge <= _LONGEST:
            raise ValueError("longest_edge must be from 1 to 4096")
        if self.most_tiles > MOST_TILES:
            raise ValueError("an image would become too many squares")

    @property
    def most_tiles(self) -> int:
        """Squares that a picture can become."""
        return 1 if self.kind == "square" or not self.split else (self.longest_edge // self.side + 1) ** 2 + 1


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Prepared:
    """A picture in squares.

    Attributes:
        tiles: `[n, side, side, 3]` of 8 bits; row by row, and then the whole picture.
        rows: of squares; 0 where there is only the whole picture.
        columns: of squares.
    """

    tiles: Pixels
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Orders:
    """What holds for all images."""

    limits: Limits
    preparation: Preparation

    def frame(self) -> bytes:
        """As they are sent."""
        text = json.dumps(asdict(self)).encode()
        return LENGTH.pack(len(text)) + text

    @classmethod
    def read(cls, text: bytes) -> "Orders":
        """As they are received."""
        fields = json.loads(text)
        return cls(Limits(**fields["limits"]), Preparation(**fields["preparation"]))
