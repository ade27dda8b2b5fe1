"""What one forward pass is asked to do: slices of sequences, laid out as flat rows.

A row is one token of one sequence. Decode (one row a sequence), prefill in chunks (many) and verification of speculated
tokens (a few) are all slices, and mix in one batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tie.bones.config import ModelConfig
from tie.bones.errors import InputError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Given:
    """Positions of a slice that are vectors already, say an image's, in the place of their tokens' embeddings.

    Attributes:
        first: the first of them, counted from the slice's own beginning.
        vectors: `[n, hidden_size]` float32.
    """

    first: int
    vectors: Floats


@dataclass(frozen=True, slots=True, repr=False)
class SequenceSlice:
    """The next tokens of one sequence.

    Attributes:
        tokens: their ids, at least one.
        start: tokens of the sequence that the KV cache holds already.
        blocks: the sequence's block table; covers start + len(tokens) tokens.
        logits: how many of the last rows need logits: 0 in the middle of a prefill, 1 at its end and for decode, more
            for verification.
        residence: names the sequence for as long as it holds its blocks, and never again: slices of one residence
            whose ends meet continue each other, and nobody else writes into their blocks. The executor may keep
            things from one to the next. None: it may not.
        given: runs of its positions that are vectors already; their tokens' ids are not looked at.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    logits: int
    residence: int | None = None
    given: tuple[Given, ...] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass.

    Attributes:
        slices: no two of them may write into the same block.
        copies: (source, target) blocks: the former's content goes to the latter, in order, before anything else.
    """

    slices: tuple[SequenceSlice, ...]
    copies: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """A checked slice: `count` tokens from position `start`, with its block table as an array."""

    start: int
    count: int
    blocks: Ints
    residence: int | None = None

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + self.count


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Rows:
    """A checked batch as flat rows. Slices of one row (decode) come first; each kind from the shortest sequence on.

    Attributes:
        tokens: `[rows]` token ids.
        positions: `[rows]` positions within the sequence.
        spans: the slices in row order.
        wanted: the rows that need logits, in batch order.
        given: runs of rows that are vectors already: the first one's number, and the vectors.
    """

    tokens: Ints
    positions: Ints
    spans: tuple[Span, ...]
    wanted: Ints
    given: tuple[tuple[int, Floats], ...] = ()


def lay_out(batch: Batch, config: ModelConfig, *, num_blocks: int, block_tokens: int) -> Rows:
    """Checks a batch against the model and the KV pool, and lays it out as flat rows.

    Raises:
        InputError: an empty batch or slice, a token outside the vocabulary, a sequence beyond the model's context, a
            block outside the pool, a table too short, a block written twice, more logits than rows, or vectors that do
            not fit.
    """
    if not batch.slices:
        raise InputError("the batch is empty")
    if any(not 0 <= block < num_blocks for pair in batch.copies for block in pair):
        raise InputError("a block to copy is outside the pool")
    tokens: list[Ints] = []
    spans: list[Span] = []
    written: set[int] = set()
    for item in batch.slices:
        ids = as_ints(item.tokens)
        span = Span(item.start, len(ids), as_ints(item.blocks), item.residence)
        if span.count == 0:
            raise InputError("a slice has no tokens")
        if ids.min() < 0 or ids.max() >= config.vocab_size:
            raise InputError("a token is outside the vocabulary")
        if span.start < 0 or span.end > config.context_tokens:
            raise InputError("a sequence is longer than the model's context")
        if len(span.blocks) * block_tokens < span.end:
            raise InputError("a block table does not cover its sequence")
        if span.blocks.min() < 0 or span.blocks.max() >= num_blocks:
            raise InputError("a block is outside the pool")
        if not 0 <= item.logits <= span.count:
            raise InputError("more logits are asked than there are rows")
        for part in item.given:
            good = part.vectors.dtype == np.float32 and part.vectors.shape[1:] == (config.hidden_size,)
            if not good or part.first < 0 or part.first + len(part.vectors) > span.count:
                raise InputError("vectors of another shape, or for more positions, than a slice has")
        targets = span.blocks[span.start // block_tokens : -(-span.end // block_tokens)].tolist()
        if len(written.union(targets)) != len(written) + len(targets):
            raise InputError("a block is written twice in one batch")
        written.update(targets)
        tokens.append(ids)
        spans.append(span)

    order = sorted(range(len(spans)), key=lambda index: (spans[index].count > 1, spans[index].end))
    ends = np.empty(len(spans), dtype=np.int64)
    ends[order] = np.cumsum([spans[index].count for index in order])
    wanted = [np.arange(end - item.logits, end) for item, end in zip(batch.slices, ends, strict=True)]
    return Rows(
        tokens=np.concatenate([tokens[index] for index in order]),
        positions=np.concatenate([np.arange(spans[index].start, spans[index].end) for index in order]),
        spans=tuple(spans[index] for index in order),
        wanted=np.concatenate(wanted),
        given=tuple(
            (int(end) - span.count + part.first, part.vectors)
            for item, span, end in zip(batch.slices, spans, ends, strict=True)
            for part in item.given
        ),
    )


def as_ints(values: Sequence[int]) -> Ints:
    """Token ids or blocks as an array, `[n]`.

    Raises:
        InputError: they are not whole numbers.
    """
    try:
        array = np.array(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise InputError("token ids and blocks must be whole numbers") from error
    if array.size and array.dtype.kind not in "iu":
        raise InputError("token ids and blocks must be whole numbers")
    return array.astype(np.int64, copy=False).reshape(-1)
