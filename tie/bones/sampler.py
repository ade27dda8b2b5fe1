"""Chooses the next token of each sequence from its logits.

A row is worked on alone, and its randomness is a function of its seed and position only (a counter-based generator:
Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), so the same logits give the same token in any batch.

Order of work: repetition, frequency and presence penalties; bias; allowed, bad and banned tokens and the grammar's
mask; temperature; top-k; top-p; min-p. Cuts are by value: tokens that tie with the last one kept are kept as well.

What has no top-k and no mask that leaves few tokens is drawn in compiled code where that is built (`native.drawing`),
by the same rules and from the same random numbers; its weights differ by rounding.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tie.bones.errors import InputError, SamplingError
from tie.bones.native import drawing
from tie.bones.sampling import Floats, Ids, Sampled, SampleRow, SamplingParams, as_ids, check_ids

__all__ = ["Floats", "SampleRow", "Sampled", "SamplingParams", "sample"]

# For each byte of a mask, what is added to the eight logits that it stands for: the same work whatever a mask allows.
_FORBIDDEN = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf)
_FORBIDDEN = _FORBIDDEN.astype(np.float32)
_NEVER_ZERO = 1e-300  # beside a time of 0, whose chance is 2^-53, weight 0 would be no number


def sample(logits: Floats, rows: Sequence[SampleRow]) -> list[Sampled]:
    """Chooses one token per row. A pure function: same arguments, same result; `logits` are not changed.

    Args:
        logits: `[rows, vocab_size]` float32; a tensor of PyTorch's on the CPU is as good.
        rows: one for each row of `logits`.

    Raises:
        InputError: the shapes do not match, or a token id is outside the vocabulary.
        SamplingError: some rows leave no token to choose; it names them.
    """
    table = np.ascontiguousarray(logits)
    if table.ndim != 2 or len(rows) != len(table) or table.dtype != np.float32:
        raise InputError("logits must be float32, one row for each row to sample")
    if not rows:
        return []
    chosen, failed = [], []
    scratch = np.empty(table.shape[1], dtype=np.float32)  # one for all rows: it stays in the cache
    dice = _Dice()
    compiled = drawing.loaded()
    drawer = drawing.Drawer(compiled, scratch) if compiled else None
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # what is infinite is found here
        for index, (original, row) in enumerate(zip(table, rows, strict=True)):
            edited = _edit(original, row)
            token_id = int(edited.argmax())
            # Where a logit is NaN or infinite, so is the maximum; after the edits, also where everything is masked.
            sound = np.isfinite(edited[token_id]) and (edited is original or np.isfinite(original.max()))
            if not sound:
                failed.append(index)
            elif not row.params.greedy:
                token_id = _draw(edited, edited[token_id], row, scratch, dice, drawer=drawer)
            chosen.append(token_id)
    if failed:
        raise SamplingError("some rows leave no token to choose", failed)
    return [_report(table[index], chosen[index], row.logprobs) for index, row in enumerate(rows)]


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
        mask = _FORBIDDEN.take(row.mask.view(np.uint8), axis=0).reshape(-1)[:vocab_size]
        x[: len(mask)] += mask
        x[len(mask) :] = -np.inf
    return x


class _Dice:
    """Randomness that is a function of a row's seed and position: one generator, set to where each row's begins."""

    def __init__(self) -> None:
        self._philox = np.random.Philox()
        self._start = self._philox.state
        self._generator = np.random.Generator(self._philox)

    def cast(self, seed: int, position: int) -> np.random.Generator:
        """Set to where the row's numbers begin. A new one, with this key and counter, takes eight times as long."""
        self._start["state"] = {
            "key": np.array([seed, 0], dtype=np.uint64),
            "counter": np.array([0, position, 0, 0], dtype=np.uint64),
        }
        self._philox.state = self._start
        return self._generator


def _draw(
    x: Floats, largest: np.float32, row: SampleRow, scratch: Floats, dice: _Dice, *, drawer: drawing.Drawer | None
) -> int:
    """Draws from softmax(x / temperature) after top-k, top-p and min-p; `largest` is the maximum of x.

    `scratch` is as long as x, and overwritten: with weights, by `drawer` too.
    """
    params = row.params
    numbers = dice.cast(params.seed, row.position)
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
    if drawer and kept is x:
        weights = scratch
        choice, inside = drawer.draw(x, float(largest), numbers, params)
        goal = math.inf if inside else params.top_p * float(weights.sum(dtype=np.float64))
    else:
        weights = np.subtract(kept, largest, out=scratch[: len(kept)])
        weights *= np.float32(1 / params.temperature)
        np.exp(weights, out=weights)
        if params.min_p > 0:
            weights[weights < np.float32(params.min_p)] = 0
        sums = _bucket_sums(weights)
        goal = params.top_p * float(sums.sum(dtype=np.float64)) if 0 < params.top_p < 1 else math.inf
        choice = _race(weights, sums, numbers)
    # One outside the nucleus is drawn again, from what is likelier: that costs less than to find the nucleus first.
    while not _inside_nucleus(weights, choice, goal):
        likelier = np.flatnonzero(weights > weights[choice])
        ids = likelier if ids is None else ids[likelier]
        weights = weights[likelier]
        choice = _race(weights, _bucket_sums(weights), numbers)
    return choice if ids is None else int(ids[choice])


def _bucket_sums(weights: Floats) -> Floats:
    sums: Floats = np.add.reduceat(weights, np.arange(0, len(weights), drawing.NEIGHBOURS))
    return sums


def _race(weights: Floats, sums: Floats, dice: np.random.Generator) -> int:
    """A token with the probability of its share of all weights.

    Each rings at a time of exponential distribution, with its weight as the rate, and the first one is it (the
    Gumbel-max trick; Maddison et al. 2014, arXiv 1411.0030): first among buckets of neighbours, then among those of one
    bucket, which needs few random numbers. Weights that differ by rounding give another token only where two ring at
    the same time, as good as never. (Where one number is looked up in the running sum of all weights, each border
    between two tokens moves with the whole sum before it.)
    """
    times = dice.standard_exponential(len(sums) + drawing.NEIGHBOURS) + _NEVER_ZERO
    start = int((times[: len(sums)] / sums).argmin()) * drawing.NEIGHBOURS
    among = weights[start : start + drawing.NEIGHBOURS]
    return start + int((times[len(sums) :][: len(among)] / among).argmin())


def _inside_nucleus(weights: Floats, choice: int, goal: float) -> bool:
    """Whether a token is in the smallest set of largest weights whose sum is `goal`: all likelier ones are less."""
    if goal == math.inf:
        return True
    likelier = weights > weights[choice]
    # To pick out many costs ten times as much as to multiply all, and to pick out few a quarter.
    few = 16 * np.count_nonzero(likelier) < len(weights)
    return float((weights[likelier] if few else weights * likelier).sum(dtype=np.float64)) < goal


def _kth_largest(values: Floats, k: int) -> np.floating[Any]:
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
