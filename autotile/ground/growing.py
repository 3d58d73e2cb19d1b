"""Grow a decision tree so that what its leaves serve loses as little time as possible."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotile.ground.features import Feature
from autotile.ground.tree import Leaf, Split, Tree

_LEAST_SHARE = 0.01
"""Of all weight, in a leaf at least."""
_PARENTS_SHARE = 1e-4
"""Of all weight, what the losses in all of the parent weigh in a leaf's order."""
_LEAST_GAIN = 1e-4
"""In mean loss over all points, 0.01 %: less is not worth a question, nor a less plain one in place of another."""

_TILES = (256, 128, 64, 32, 16, 8, 4, 2)

Matrix = NDArray[np.float64]
Vector = NDArray[np.float64]
Mask = NDArray[np.bool_]


def grow_tree(losses: Matrix, weights: Vector, features: Sequence[Feature], table: Matrix, most_leaves: int) -> Tree:
    """A tree that is split where that gains most, as long as a question is worth reading.

    Parameters
    ----------
    losses
        What serving a configuration at a point costs over the best, 0.05 for 5 %; shape (points, configurations).
        Finite also where a configuration cannot be served: then what is served in its place.
    weights
        What each point counts, shape (points,).
    features
        What may be asked.
    table
        Values of the features, shape (points, features).
    most_leaves
        At most so many.
    """
    grower = _Grower(losses, weights, features, table)
    for _ in range(1, most_leaves):
        if not grower.split_once():
            break
    return grower.tree


@dataclass(eq=False)
class _Node:
    points: Mask
    scores: Vector
    """Mean loss of each configuration, mixed with the parent's."""
    question: tuple[int, float] | None = None
    gain: float = 0.0
    children: tuple[_Node, _Node] | None = None


class _Grower:
    def __init__(self, losses: Matrix, weights: Vector, features: Sequence[Feature], table: Matrix) -> None:
        self._weights = weights / weights.sum()
        self._losses = losses * self._weights[:, None]
        self._features = features
        self._table = table
        self._order = np.argsort(table, axis=0, kind="stable")
        self._root = self._node(np.ones(len(losses), np.bool_), self._losses.sum(axis=0))
        self._leaves = [self._root]

    @property
    def tree(self) -> Tree:
        return self._frozen(self._root)

    def split_once(self) -> bool:
        """Split the leaf that gains most; False where none gains anything."""
        node = max(self._leaves, key=lambda leaf: leaf.gain)
        if node.question is None:
            return False
        feature, threshold = node.question
        low = node.points & (self._table[:, feature] <= threshold)
        node.children = (self._node(low, node.scores), self._node(node.points & ~low, node.scores))
        self._leaves.remove(node)
        self._leaves += node.children
        return True

    def _node(self, points: Mask, parents: Vector) -> _Node:
        total = self._losses[points].sum(axis=0) + _PARENTS_SHARE * parents
        node = _Node(points, total / (self._weights[points].sum() + _PARENTS_SHARE))
        self._find_question(node)
        return node

    def _find_question(self, node: _Node) -> None:
        """The question that leaves the least loss, of those that leave about as much the plainest."""
        whole = float(self._losses[node.points].sum(axis=0).min())
        for feature in range(len(self._features)):
            order = self._order[node.points[self._order[:, feature]], feature]
            values = self._table[order, feature]
            weight = np.cumsum(self._weights[order])
            heavy = (weight[:-1] >= _LEAST_SHARE) & (weight[-1] - weight[:-1] >= _LEAST_SHARE)
            cuts = np.flatnonzero((values[:-1] < values[1:]) & heavy)
            if not len(cuts):
                continue
            below = np.cumsum(self._losses[order], axis=0)
            lost = below[cuts].min(axis=1) + (below[-1] - below[cuts]).min(axis=1)
            best = int(np.argmin(lost))
            gain = whole - float(lost[best])
            if gain > node.gain + _LEAST_GAIN:
                low, high = values[cuts[best] : cuts[best] + 2]
                node.gain, node.question = gain, (feature, threshold_between(float(low), float(high)))

    def _frozen(self, node: _Node) -> Tree:
        if node.children is None or node.question is None:
            return Leaf(tuple(int(number) for number in np.argsort(node.scores, kind="stable")))
        feature, threshold = node.question
        low, high = node.children
        return Split(self._features[feature], threshold, self._frozen(low), self._frozen(high))


def threshold_between(low: float, high: float) -> float:
    """A number from ``low`` up to but not including ``high`` at which times may well change.

    From a whole number that is one divided by a large power of two, where a row of tiles ends: 128 between 120 and 137.
    Else it is a short one. Either lies near the geometric mean, where that exists.
    """
    middle = math.sqrt(low * high) if low > 0 else (low + high) / 2
    for tile in _TILES if low >= 1.0 and low == int(low) else ():
        whole = max(round(middle / tile), math.ceil(low / tile)) * tile
        if whole < high and tile <= 2 * middle:
            return float(whole)
    for digits in range(2, 17):
        rounded = float(f"{middle:.{digits}g}")
        if low <= rounded < high:
            return rounded
    return low
