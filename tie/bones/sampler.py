"""Chooses the next token of each sequence from its logits.

A row is worked on alone, and its randomness is a function of its seed and position only (a counter-based generator:
Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), so the same logits give the same token in any batch.

Order of work: repetition, frequency and presence penalties; bias; allowed, bad and banned tokens and the grammar's
mask; temperature; top-k; top-p; min-p. Cuts are by value: tokens that tie with the last one kept are kept as well.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tie.bones.errors import InputError, SamplingError
from tie.bones.sampling import Floats, Ids, Sampled, SampleRow, SamplingParams, as_ids, check_ids

__all__ = ["Floats", "SampleRow", "Sampled", "SamplingParams", "sample"]

_BUCKET = 256  # of the two-level search in `_invert`
_FIRST_NUCLEUS = 256  # tokens that the search for the nucleus sorts at first
_DRAWER_BITS = 45  # of a double's 52 for the fraction: 128 drawers for each power of 2
_DRAWERS = 128 * 64  # below 2^-64 of the largest weight all share one

Doubles = npt.NDArray[np.float64]


def sample(logits: Floats, rows: Sequence[SampleRow]) -> list[Sampled]:
    """Chooses one token per row. A pure function: same arguments, same result; `logits` are not changed.

    Args:
        logits: `[rows, vocab_size]` float32; a tensor of PyTorch's on the CPU is as good.
        rows: one for each row of `logits`.

    Raises:
        InputError: the shapes do not match, or a token id is outside the vocabulary.
        SamplingError: some rows leave no token to choose; it names them.
    """
    table = np.asarray(logits)
    if table.ndim != 2 or len(rows) != len(table) or table.dtype != np.float32:
        raise InputError("logits must be float32, one row for each row to sample")
    if not rows:
        return []
    chosen, largest = np.empty(len(rows), dtype=np.int64), np.empty(len(rows), dtype=np.float32)
    sound = np.isfinite(table.max(axis=1))  # false where a logit is NaN or infinite
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows becomes infinite, and is found below
        for index, row in enumerate(rows):
            edited = _edit(table[index], row)
            chosen[index] = edited.argmax()
            largest[index] = edited[chosen[index]]
            if not row.params.greedy and np.isfinite(largest[index]):
                chosen[index] = _draw(edited, float(largest[index]), row)
    # After the edits the maximum is not finite where everything is masked.
    if failed := np.flatnonzero(~(sound & np.isfinite(largest))).tolist():
        raise SamplingError("some rows leave no token to choose", failed)
    return [_report(table[index], int(chosen[index]), row.logprobs) for index, row in enumerate(rows)]


def _edit(logits: Floats, row: SampleRow) -> Floats:
    """Penalties, bias and masks; a copy where there are any."""
    if not row.edited:
        return logits
    params, vocab_size = row.params, len(logits)
    params.check_vocabulary(vocab_size)
    x = logits.copy()
    if params.repetition != 1:
        seen = check_ids(np.union1d(as_ids(row.prompt_ids), as_ids(row.output_ids)), vocab_size)
        x[seen] = np.where(x[seen] > 0, x[seen] / params.repetition, x[seen] * params.repetition)
    if params.frequency_penalty or params.presence_penalty:
        seen, counts = np.unique(check_ids(as_ids(row.output_ids), vocab_size), return_counts=True)
        x[seen] -= (params.frequency_penalty * counts + params.presence_penalty).astype(np.float32)
    if params.logit_bias:
        ids, bias = params.bias
        x[ids] += bias
    if params.allowed_ids is not None:
        kept = x[params.allowed]
        x.fill(-np.inf)
        x[params.allowed] = kept
    x[params.bad] = -np.inf
    if len(row.banned):
        x[check_ids(as_ids(row.banned), vocab_size)] = -np.inf
    if row.mask is not None:
        bits = np.unpackbits(row.mask.view(np.uint8), bitorder="little", count=vocab_size)
        x[bits == 0] = -np.inf
    return x


def _draw(x: Floats, largest: float, row: SampleRow) -> int:
    """Draws from softmax(x / temperature) after top-k, top-p and min-p; `largest` is the maximum of x."""
    params = row.params
    ids: Ids | None = None
    kept = x
    if row.mask is not None or params.allowed_ids is not None:
        left = x > -np.inf
        if 2 * np.count_nonzero(left) < len(x):  # mostly a few tokens, and no more need be looked at
            ids = np.flatnonzero(left)
            kept = x[ids]
    if 0 < params.top_k < len(kept):
        survivors = np.flatnonzero(kept >= _kth_largest(kept, params.top_k))
        ids = survivors if ids is None else ids[survivors]
        kept = kept[survivors]
    # Relative to the likeliest token, whose weight is 1.
    weights: Doubles = np.exp((kept.astype(np.float64) - largest) / params.temperature)
    least = params.min_p
    if 0 < params.top_p < 1:
        least = max(least, _nucleus(weights, params.top_p))
    if least > 0:
        survivors = np.flatnonzero(weights >= least)
        ids = survivors if ids is None else ids[survivors]
        weights = weights[survivors]
    uniform = np.random.Generator(np.random.Philox(key=params.seed, counter=row.position)).random()
    choice = _invert(weights, uniform)
    return choice if ids is None else int(ids[choice])


def _nucleus(weights: Doubles, top_p: float) -> float:
    """The least weight in the smallest set of largest weights that has `top_p` of the sum."""
    goal = top_p * weights.sum()
    few = len(weights) > _FIRST_NUCLEUS  # mostly enough
    largest: Doubles = np.sort(weights[weights >= _kth_largest(weights, _FIRST_NUCLEUS)] if few else weights)[::-1]
    sums = largest.cumsum()
    if sums[-1] < goal and len(largest) < len(weights):
        return _wide_nucleus(weights, goal)
    return float(largest[min(np.searchsorted(sums, goal), len(largest) - 1)])


def _wide_nucleus(weights: Doubles, goal: float) -> float:
    """The same where it has very many tokens, without sorting them.

    Weights are sorted into drawers by the leading bits of their numbers, which are their logarithm, roughly; only the
    drawer in which the goal is reached is looked at more closely.
    """
    drawers = weights.view(np.int64) >> _DRAWER_BITS
    drawers -= drawers.max() - _DRAWERS
    np.maximum(drawers, 0, out=drawers)
    sums = np.bincount(drawers, weights, _DRAWERS + 1)[::-1].cumsum()
    place = min(int(np.searchsorted(sums, goal)), _DRAWERS)
    inside = np.sort(weights[drawers == _DRAWERS - place])[::-1]
    rest = goal - (sums[place - 1] if place else 0.0)
    index = min(int(np.searchsorted(inside.cumsum(), rest)), len(inside) - 1)
    return float(inside[index]) if len(inside) else 0.0


def _kth_largest(values: Floats | Doubles, k: int) -> np.floating[Any]:
    """The k-th largest value, 1 <= k <= len(values).

    Where k is small, values are first laid out in columns: k columns reach the k-th largest of the columns' maxima, so
    at least k values do, and what lies below need not be partitioned.
    """
    columns = max(512, 8 * k)
    rows = len(values) // columns
    if rows >= 4:
        maxima = values[: rows * columns].reshape(rows, columns).max(axis=0)
        values = values[values >= np.partition(maxima, -k)[-k]]
    kth: np.floating[Any] = np.partition(values, -k)[-k]
    return kth


def _invert(weights: Doubles, uniform: float) -> int:
    """The index at which the running sum of weights passes `uniform` of the whole: never one of weight 0.

    In two levels, as summing up a large vocabulary costs ten times its mere sum.
    """
    sums = np.add.reduceat(weights, np.arange(0, len(weights), _BUCKET)).cumsum()
    goal = uniform * sums[-1]
    bucket = min(int(np.searchsorted(sums, goal, side="right")), int(np.flatnonzero(np.diff(sums, prepend=0.0))[-1]))
    inside = weights[bucket * _BUCKET : (bucket + 1) * _BUCKET]
    within = inside.cumsum()
    rest = goal - (sums[bucket - 1] if bucket else 0.0)
    # Rounding may leave the goal at the very end of the bucket: then its last token of any weight.
    index = min(int(np.searchsorted(within, rest, side="right")), int(np.flatnonzero(inside)[-1]))
    return bucket * _BUCKET + index


def _report(logits: Floats, token_id: int, logprobs: int | None) -> Sampled:
    if logprobs is None:
        return Sampled(token_id)
    largest = float(logits.max())
    normal = largest + math.log(np.exp(logits.astype(np.float64) - largest).sum())
    count = min(logprobs, len(logits))
    if count == 0:
        return Sampled(token_id, float(logits[token_id]) - normal)
    candidates = np.flatnonzero(logits >= _kth_largest(logits, count))
    top = candidates[np.argsort(-logits[candidates], kind="stable")][:count]
    return Sampled(
        token_id,
        float(logits[token_id]) - normal,
        tuple(top.tolist()),
        tuple((logits[top].astype(np.float64) - normal).tolist()),
    )
