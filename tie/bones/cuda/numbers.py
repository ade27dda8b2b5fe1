"""What one forward pass is told, as numbers: the rows, where their keys and values go, and the pages of each sequence.

They are int32 and go to the device in one copy, from memory that the device can read itself (pinned), so that the host
does not wait for it.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tie.bones.batch import Rows, Span

Ints32 = npt.NDArray[np.int32]

_NONE: Final = np.zeros(0, dtype=np.int64)
NOTHING: Final = Rows(tokens=_NONE, positions=_NONE, spans=(), wanted=_NONE)
"""No rows; to be padded."""


@dataclass(frozen=True, slots=True, eq=False)
class PageTable:
    """The sequences of a pass in compressed rows, as flashinfer takes them.

    Sequence i has the new rows `row_starts[i]:row_starts[i + 1]` and the pages
    `pages[page_starts[i]:page_starts[i + 1]]`; the last of these has `last_lengths[i]` tokens, the new ones included.

    Attributes:
        row_starts: `[sequences + 1]`.
        page_starts: `[sequences + 1]`.
        last_lengths: `[sequences]`.
        pages: blocks of the pool.
    """

    row_starts: Ints32
    page_starts: Ints32
    last_lengths: Ints32
    pages: Ints32


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """A pass on the host.

    Attributes:
        rows: how many.
        wanted: how many of them need logits.
        packed: of each row token, position, block and place within the block; then the wanted rows; then the pages.
        table: the sequences.
    """

    rows: int
    wanted: int
    packed: Ints32
    table: PageTable


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """A pass on the device, int64: what PyTorch takes for an index everywhere.

    Attributes:
        tokens: `[rows]`.
        positions: `[rows]`, within the sequence.
        blocks: `[rows]`, where a row's keys and values go.
        places: `[rows]`, and at which token of that block.
        wanted: `[n]`, the rows that need logits.
    """

    tokens: Tensor
    positions: Tensor
    blocks: Tensor
    places: Tensor
    wanted: Tensor


def number(rows: Rows, block_tokens: int) -> Numbers:
    """A checked batch as numbers."""
    counts = [span.count for span in rows.spans]
    used = [span.blocks[: -(-span.end // block_tokens)] for span in rows.spans]
    owners = [span.blocks[np.arange(span.start, span.end) // block_tokens] for span in rows.spans]
    pages = np.concatenate(used)
    parts = (rows.tokens, rows.positions, *owners, rows.positions % block_tokens, rows.wanted, pages)
    table = PageTable(
        row_starts=_starts(counts),
        page_starts=_starts([len(blocks) for blocks in used]),
        last_lengths=np.array([(span.end - 1) % block_tokens + 1 for span in rows.spans], dtype=np.int32),
        pages=pages.astype(np.int32),
    )
    return Numbers(len(rows.tokens), len(rows.wanted), np.concatenate(parts).astype(np.int32), table)


def padded(rows: Rows, size: int, scratch: int) -> Rows:
    """Decoding rows, filled up to `size` with sequences of one token in a block that nobody reads.

    Logits are wanted of `size` rows as well: those that are asked for come first.
    """
    more = size - len(rows.tokens)
    span = Span(0, 1, np.array([scratch], dtype=np.int64))
    return Rows(
        tokens=np.pad(rows.tokens, (0, more)),
        positions=np.pad(rows.positions, (0, more)),
        spans=rows.spans + (span,) * more,
        wanted=np.pad(rows.wanted, (0, size - len(rows.wanted))),
    )


def inputs(numbers: Tensor, rows: int, wanted: int) -> Inputs:
    """The sections of `Numbers.packed` before its pages, on the device that it has been sent to."""
    wide = numbers[: 4 * rows + wanted].long()
    tokens, positions, blocks, places = wide[: 4 * rows].view(4, rows)
    return Inputs(tokens, positions, blocks, places, wide[4 * rows :])


class Upload:
    """Memory on the host and its like on the device.

    Args:
        size: numbers that it has room for at first; `send` makes more where it must.
        device: the target.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._device = device
        self._make(size)

    def _make(self, size: int) -> None:
        pinned = self._device.type == "cuda"
        self._host = torch.empty(size, dtype=torch.int32, pin_memory=pinned)
        self.target = torch.zeros(size, dtype=torch.int32, device=self._device)

    def send(self, numbers: Ints32) -> Tensor:
        """Copies them to the begin of `target`, and returns that part of it.

        The device must be through with what was sent before.
        """
        if len(numbers) > len(self.target):
            self._make(2 * len(numbers))
        host, target = self._host[: len(numbers)], self.target[: len(numbers)]
        host.copy_(torch.from_numpy(numbers))
        return target.copy_(host, non_blocking=True)


def _starts(counts: list[int]) -> Ints32:
    return np.cumsum([0, *counts], dtype=np.int32)
