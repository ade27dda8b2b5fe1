"""A small classifier in plain numpy, and how well it does: extremely randomized trees, and the area under the curve.

Extra-Trees (Geurts, Ernst, Wehenkel 2006): each node takes the best of a few random cuts. They need no tuning, see
thresholds, several modes and combinations of features, and are hard to fool with features that say nothing.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
Labels = NDArray[np.bool_]

_TREES = 100
_SMALLEST = 12  # examples in a leaf
_REDRAWS = 500


@dataclass(frozen=True)
class Area:
    """The area under the receiver's operating curve: 0.5 is guessing, 1 is knowing.

    Attributes:
        value: of held-out examples.
        low: where its 95 % interval begins (bootstrap).
        high: and ends.
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f}-{self.high:.3f})"


def separation(features: Values, labels: Labels, seed: int = 0) -> Area:
    """How well trees tell two kinds apart that they have not seen: each half by the trees of the other.

    Args:
        features: [examples, features].
        labels: [examples], True for one of the kinds.
        seed: of everything random.
    """
    dice = np.random.default_rng(seed)
    order = dice.permutation(len(labels))
    scores = np.empty(len(labels))
    half = np.empty(len(labels), bool)
    for label in (False, True):  # as many of each kind on both sides
        half[order[labels[order] == label]] = np.arange((labels == label).sum()) % 2 == 0
    for side in (False, True):
        trees = [_grown(features[half != side], labels[half != side], dice) for _ in range(_TREES)]
        scores[half == side] = np.mean([_leaves(tree, features[half == side]) for tree in trees], axis=0)
    kinds = [np.flatnonzero(labels == label) for label in (False, True)]
    redrawn = [
        area(scores[drawn], labels[drawn])
        for drawn in (np.concatenate([dice.choice(kind, len(kind)) for kind in kinds]) for _ in range(_REDRAWS))
    ]
    low, high = np.quantile(redrawn, (0.025, 0.975))
    return Area(area(scores, labels), float(low), float(high))


def area(scores: Values, labels: Labels) -> float:
    """The chance that one of the kind scores higher than one of the other, a tie counting half (Mann-Whitney)."""
    _, place, count = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2)[place]
    positive = int(labels.sum())
    return float((ranks[labels].sum() - positive * (positive + 1) / 2) / (positive * (len(labels) - positive)))


@dataclass(frozen=True)
class _Cut:
    feature: int
    at: float
    below: "_Cut | float"
    above: "_Cut | float"


def _grown(features: Values, labels: Labels, dice: np.random.Generator) -> "_Cut | float":
    share = float(labels.mean())
    if len(labels) < 2 * _SMALLEST or share in {0.0, 1.0}:
        return share
    low, high = features.min(axis=0), features.max(axis=0)
    telling = np.flatnonzero(low < high)
    if not len(telling):
        return share
    # Many cuts to choose from: most features say nothing, and the few that do must be found.
    chosen = dice.choice(telling, max(8, len(telling)))
    at = dice.uniform(low[chosen], high[chosen])
    above = features[:, chosen] > at
    best = int(np.argmin(_impurity(above, labels)))
    side = above[:, best]
    if not _SMALLEST <= side.sum() <= len(labels) - _SMALLEST:
        return share
    return _Cut(
        int(chosen[best]),
        float(at[best]),
        _grown(features[~side], labels[~side], dice),
        _grown(features[side], labels[side], dice),
    )


def _impurity(above: NDArray[np.bool_], labels: Labels) -> Values:
    """The Gini impurity of both sides of each cut, weighted by their sizes."""
    many = above.sum(axis=0).astype(float)
    few = len(labels) - many
    hits = above[labels].sum(axis=0)
    misses = labels.sum() - hits
    with np.errstate(divide="ignore", invalid="ignore"):
        impurity = hits * (1 - hits / many) + misses * (1 - misses / few)
    return np.where((many < _SMALLEST) | (few < _SMALLEST), np.inf, impurity)


def _leaves(tree: "_Cut | float", features: Values) -> Values:
    if not isinstance(tree, _Cut):
        return np.full(len(features), tree)
    above = features[:, tree.feature] > tree.at
    out = np.empty(len(features))
    out[~above], out[above] = _leaves(tree.below, features[~above]), _leaves(tree.above, features[above])
    return out
