"""Learn a family's rule: select a few configurations and grow a decision tree between them.

What is minimised is the mean loss: the time of what is served over the fastest known at the point, minus 1. The few
points are filled up with many more problems of the family, for which `autotile.ground.costs` says what to expect.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotile.families.features import Feature, Traits
from autotile.families.rule import Leaf, Split, Tree, leaf_of
from autotile.families.time_model import TimeModel

_LEAST_SHARE = 0.01
"""Of all weight, in a leaf at least."""
_PARENTS_SHARE = 1e-4
"""Of all weight, what the losses in all of the parent weigh in a leaf's order."""
_MIN_SPLIT_GAIN = 1e-4
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
            if gain > node.gain + _MIN_SPLIT_GAIN:
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


UNSERVED = 10.0
"""Loss where nothing can be served that was chosen: as bad as eleven times the time, so that it is avoided."""
_UNCOVERED = 1.0
"""The same for a problem between the points, where the nearest tuned size or the default is left to serve."""
_LEAST_GAIN = 1e-9
"""Of the mean loss; less is rounding."""
_FOLDS = 32
"""Left-out groups of a cross-validation; up to this many points each is left out alone."""
_MEASURED_SHARE = 0.25
"""Weight of all measured points together; the rest goes to the problems in between."""
_LEAVES_A_CONFIG = 2
"""A configuration is best in more than one corner of the sizes, but a person should still read the tree."""

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Measured:
    """What a rule is learned from.

    Attributes
    ----------
    times_us
        Shape (points, configurations); NaN where a configuration cannot be served. Every point has a number.
    proposed_by
        Whether a point's own tuning found the configuration good, same shape. What no point proposed (the default) is
        known to every rule.
    traits
        Of the points and the configurations.
    between
        Of other problems of the family and the same configurations.
    valid_between
        Whether a configuration meets the kernel's rules there, shape (other problems, configurations).
    """

    times_us: Matrix
    proposed_by: Mask
    traits: Traits
    between: Traits
    valid_between: Mask

    @property
    def losses(self) -> Matrix:
        """Times over the least at each point, minus 1."""
        return np.asarray(self.times_us / np.nanmin(self.times_us, axis=1, keepdims=True) - 1.0)


@dataclass(frozen=True)
class Learned:
    """A rule over the columns of the measured matrix.

    Attributes
    ----------
    chosen
        Columns, in the order in which the tree numbers them.
    tree
        Which of them to serve where.
    losses
        Loss of what is served at each point, shape (points,).
    held_out
        Loss at each point of a rule that was learned without it, and without what only it had proposed; NaN for a
        single point.
    """

    chosen: tuple[int, ...]
    tree: Tree
    losses: Matrix
    held_out: Matrix


def learn(measured: Measured, features: Sequence[Feature], most: int) -> Learned:
    """Choose configurations and grow a tree, from all points and, for what to expect elsewhere, without each of them.

    Parameters
    ----------
    measured
        What is known.
    features
        Those over ``most`` configurations; see `autotile.families.features.features_of`.
    most
        Configurations to choose, at most.
    """
    everywhere = np.arange(len(measured.times_us))
    folds = [everywhere[start::_FOLDS] for start in range(min(_FOLDS, len(everywhere)))] if len(everywhere) > 1 else []
    held_out = np.full(len(everywhere), np.nan)
    for fold in folds:
        rule = _learn_on(measured, np.setdiff1d(everywhere, fold), features, most)
        held_out[fold] = _served_losses(measured, *rule, fold)
    chosen, tree = _learn_on(measured, everywhere, features, most)
    return Learned(chosen, tree, _served_losses(measured, chosen, tree, everywhere), held_out)


def select_configs(costs: Matrix, weights: Matrix, most: int) -> list[int]:
    """Columns whose best one at each problem costs least on average: greedily, then by exchanges.

    Parameters
    ----------
    costs
        Of serving each configuration, shape (problems, configurations).
    weights
        What each problem counts, shape (problems,).
    most
        At most so many; fewer where more gain nothing.
    """
    weighted = costs * (weights / weights.sum())[:, None]
    chosen: list[int] = []
    best = weighted.max(axis=1)
    while len(chosen) < most:
        means = np.minimum(weighted, best[:, None]).sum(axis=0)
        new = int(np.argmin(means))
        if chosen and means[new] > best.sum() - _LEAST_GAIN:
            break
        chosen.append(new)
        best = np.minimum(best, weighted[:, new])
    return _exchanged(weighted, chosen)


def _exchanged(weighted: Matrix, chosen: list[int]) -> list[int]:
    """Replace one column by another as long as that gains."""
    improved = len(chosen) > 1
    while improved:
        improved = False
        for place in range(len(chosen)):
            others = weighted[:, [column for at, column in enumerate(chosen) if at != place]].min(axis=1)
            means = np.minimum(weighted, others[:, None]).sum(axis=0)
            new = int(np.argmin(means))
            if means[new] < means[chosen[place]] - _LEAST_GAIN:
                chosen[place] = new
                improved = True
    return chosen


def _learn_on(
    measured: Measured, points: Numbers, features: Sequence[Feature], most: int
) -> tuple[tuple[int, ...], Tree]:
    """Chosen columns, and a tree between them, from some of the points."""
    proposed_by, losses = measured.proposed_by, measured.losses[points]
    known = proposed_by[points].any(axis=0) | ~proposed_by.any(axis=0)
    columns = np.flatnonzero(known & np.isfinite(losses).any(axis=0))
    expected = _expected_losses(measured, points, columns)
    costs = [np.where(np.isfinite(losses[:, columns]), losses[:, columns], UNSERVED)]
    costs += [np.where(np.isfinite(expected), expected, _UNCOVERED)]
    selected = select_configs(np.concatenate(costs), _weights(len(points), len(expected)), most)
    chosen = tuple(int(columns[c]) for c in selected)
    asked = [feature for feature in features if _is_over(feature, len(chosen))]
    served = np.flatnonzero(np.isfinite(expected[:, selected]).any(axis=1))
    here, between = measured.traits.select(chosen).rows(points), measured.between.select(chosen).rows(served)
    tree = grow_tree(
        np.concatenate([_filled(losses[:, chosen]), _filled(expected[served][:, selected])]),
        _weights(len(points), len(served)),
        asked,
        np.concatenate([here.table(asked), between.table(asked)]),
        _LEAVES_A_CONFIG * most,
    )
    return chosen, tree


def _expected_losses(measured: Measured, points: Numbers, columns: Numbers) -> Matrix:
    """Losses of columns at the problems between the points, as some of the points let expect; NaN where not valid."""
    known = columns.tolist()
    here, between = measured.traits.select(known).rows(points), measured.between.select(known)
    times_us = measured.times_us[np.ix_(points, columns)]
    expected_us = TimeModel.fit(times_us, np.nanmin(measured.times_us[points], axis=1), here).predict(between)
    valid = measured.valid_between[:, columns]
    least_us = np.where(valid, expected_us, np.inf).min(axis=1, keepdims=True)
    return np.where(valid, expected_us / least_us - 1.0, np.nan)


def _weights(points: int, between: int) -> Matrix:
    shares = (_MEASURED_SHARE, 1.0 - _MEASURED_SHARE) if between else (1.0, 0.0)
    return np.repeat(np.array(shares) / np.maximum((points, between), 1), (points, between))


def _is_over(feature: Feature, configs: int) -> bool:
    return max(feature.config, feature.over) < configs


def _filled(losses: Matrix) -> Matrix:
    """Losses with what would be served in place of what cannot be: the best of the others on average."""
    if not len(losses):
        return losses
    finite = np.isfinite(losses)
    penalised = np.where(finite, losses, UNSERVED)
    substitute = np.full(len(losses), UNSERVED)
    for column in np.argsort(penalised.mean(axis=0), kind="stable")[::-1]:
        substitute = np.where(finite[:, column], losses[:, column], substitute)
    return np.where(finite, losses, substitute[:, None])


def _served_losses(measured: Measured, chosen: Sequence[int], tree: Tree, points: Numbers) -> Matrix:
    """Loss at each point of what a tree serves there: the first of its leaf's that can be."""
    losses = measured.losses[np.ix_(points, np.array(chosen))]
    found = []
    for row, point in zip(losses, points, strict=True):
        view = measured.traits.select(chosen).rows(np.array([point]))
        order = leaf_of(tree, view).order
        found.append(next((row[number] for number in order if np.isfinite(row[number])), UNSERVED))
    return np.array(found)
