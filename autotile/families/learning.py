"""Learning of a family's rule: select a few configurations, and learn a decision tree between them.

The objective is the mean loss: the time of the served configuration over the fastest known one at the point, minus 1.
The few measured points are complemented by many more problems of the family, with times predicted by a `TimeModel`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotile.families.rule import Feature, Leaf, Split, Traits, Tree, find_leaf

_VECTOR = 8
"""Elements of the widest access: 16 bytes of a 16-bit type."""
_REACH_DOUBLINGS = 1.0
"""Distance from a point, in doublings, at which the weight of its residual is 1/e."""
_GUESS_WEIGHT = 0.001
"""Weight of a point where a configuration was not measured, as it cannot run there, relative to a measured one. It only
breaks ties: with 0.1, guesses made a large tile take 175 us where it took 706 us."""
_PRIOR_WEIGHT = 0.3
"""Weight of a residual of zero, relative to the weight of 1 at the point itself."""
_UNKNOWN_SHARE = 0.1
"""Share of measured points among those nearby, below which a configuration is regarded as hardly known there. This and
the factor of two in `TimeModel.predict` were chosen on times of some hundred configurations of ``sgemm`` and
``gemm_mma`` at 64 and 110 sizes on an H200; similar values do about as well."""

_COMMON_TERMS = 6
"""Number of terms that do not depend on the alignment of the sizes."""
_MIN_US = 1e-9
"""Minimum of a modelled time, in microseconds."""

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class TimeModel:
    """Expected times of several configurations at problems where they were not measured.

    The model of a launch is a sum of terms with non-negative weights: a constant; the work of the busiest SM (its
    rounds of blocks times the depth, the operations per output); that work again for each size that is not a multiple
    of the vector length; the depth alone (one block whose latency nothing hides); the number of whole waves; waves
    times depth; and the bytes moved. The residuals at the measured points are interpolated to nearby problems. Measured
    times bound the result: a problem that is larger in every size does not take less time.

    Attributes
    ----------
    weights
        Weight of each term, in microseconds per unit of the term, shape (configurations, terms).
    residuals
        Logarithm of measured over modelled time, 0 where not measured, shape (points, configurations).
    times_us
        Measured times in microseconds, NaN where not measured, same shape.
    points
        Traits of the points.
    """

    weights: Matrix
    residuals: Matrix
    times_us: Matrix
    points: Traits

    @classmethod
    def fit(cls, times_us: Matrix, best_us: Matrix, traits: Traits) -> TimeModel:
        """Fit the model by least squares of relative errors.

        Where a configuration was not measured, its time is guessed from its mean ratio to the best time elsewhere.
        Guesses only decide what the measured times leave undetermined.

        Parameters
        ----------
        times_us
            Times in microseconds, shape (points, configurations); NaN where not measured. Every configuration has at
            least one time.
        best_us
            Best known time at each point, shape (points,).
        traits
            Traits of the points and the configurations.
        """
        known = np.isfinite(times_us)
        slowdown = np.nanmean(np.log(times_us / best_us[:, None]), axis=0)
        filled = np.where(known, times_us, np.exp(slowdown) * best_us[:, None])
        trust = np.where(known, 1.0, _GUESS_WEIGHT)
        weights = [_fit_weights(_terms(traits, c), filled[:, c], trust[:, c]) for c in range(times_us.shape[1])]
        modelled_us = _model_us(traits, np.array(weights))
        residuals = np.where(known, np.log(np.where(known, times_us, 1.0) / modelled_us), 0.0)
        return cls(np.array(weights), residuals, times_us, traits)

    def predict(self, traits: Traits) -> Matrix:
        """Return the expected times in microseconds at other problems, shape (problems, configurations).

        The time of a configuration that was measured at hardly any point nearby is raised by up to a factor of two: a
        model of one or two times fits them by chance, and among many such models some are far too low.
        """
        distances = np.abs(_positions(traits.sizes)[:, None, :] - _positions(self.points.sizes)[None, :, :]).sum(axis=2)
        nearness = np.exp(-distances / _REACH_DOUBLINGS)
        known = nearness @ np.isfinite(self.times_us)
        interpolated = nearness @ self.residuals / (known + _PRIOR_WEIGHT)
        share = known / nearness.sum(axis=1, keepdims=True)
        expected_us = _model_us(traits, self.weights) * np.exp(interpolated)
        return np.asarray(self._bound(traits, expected_us) * (1.0 + np.exp(-share / _UNKNOWN_SHARE)))

    def _bound(self, traits: Traits, expected_us: Matrix) -> Matrix:
        """Limit expected times to those measured at a larger problem (upper bound) and a smaller one (lower bound).

        The model assumes that two blocks on an SM take twice the time of one, where they often take hardly more. Where
        only one of the two problems has aligned sizes, the bound is scaled by the modelled cost of the alignment.
        """
        here, there = _misalignment_ratio(traits, self.weights), _misalignment_ratio(self.points, self.weights)
        smaller, larger = _is_within(traits.sizes, self.points.sizes), _is_within(self.points.sizes, traits.sizes)
        upper_us, lower_us = np.full_like(expected_us, np.inf), np.zeros_like(expected_us)
        for point, times_us in enumerate(self.times_us):  # NaN bounds nothing
            ratio, below, above = here / there[point], smaller[:, point], larger[point]
            upper_us[below] = np.fmin(upper_us, times_us * np.maximum(ratio, 1.0))[below]
            lower_us[above] = np.fmax(lower_us, times_us * np.minimum(ratio, 1.0))[above]
        bounded = np.maximum(np.minimum(expected_us, upper_us), lower_us)
        return np.asarray(np.where(lower_us > upper_us, expected_us, bounded))  # contradicting bounds are ignored


def _fit_weights(terms: Matrix, times_us: Matrix, trust: Matrix) -> Matrix:
    from scipy.optimize import nnls  # the import takes 0.1 s, and serving does not need it

    relative = terms * (trust / times_us)[:, None]
    scale = np.maximum(relative.max(axis=0), 1e-300)
    weights, _ = nnls(relative / scale, trust)
    return np.asarray(weights / scale)


def _terms(traits: Traits, config: int) -> Matrix:
    """Return the terms of a configuration's time at each problem, shape (problems, terms)."""
    depth = traits.flops / traits.outputs if traits.flops.any() else np.ones_like(traits.outputs)
    rounds, waves = traits.rounds[:, config], np.ceil(traits.waves[:, config])
    ragged = [rounds * depth * (sizes % _VECTOR != 0) for sizes in traits.sizes.values()]
    common = [np.ones_like(depth), depth, rounds * depth, waves, waves * depth, traits.bytes]
    return np.stack([*common, *ragged], axis=1)


def _model_us(traits: Traits, weights: Matrix) -> Matrix:
    """Return the modelled times in microseconds, shape (problems, configurations)."""
    sums = [_terms(traits, config) @ row for config, row in enumerate(weights)]
    return np.asarray(np.maximum(np.stack(sums, axis=1), _MIN_US))


def _misalignment_ratio(traits: Traits, weights: Matrix) -> Matrix:
    """Return modelled times over those if every size were aligned, shape (problems, configurations)."""
    aligned = weights.copy()
    aligned[:, _COMMON_TERMS:] = 0.0
    return np.asarray(_model_us(traits, weights) / _model_us(traits, aligned))


def _is_within(inner: Mapping[str, NDArray[np.float64]], outer: Mapping[str, NDArray[np.float64]]) -> NDArray[np.bool_]:
    """Return whether no size of a problem exceeds another's and no flag differs, shape (inner, outer)."""
    found = [_is_no_larger(inner[name][:, None], outer[name][None, :]) for name in inner]
    return np.asarray(np.logical_and.reduce(found))


def _is_no_larger(size: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.bool_]:
    return np.asarray((size == other) | ((size <= other) & (size > 0)))  # only flags are 0


def _positions(sizes: Mapping[str, NDArray[np.float64]]) -> Matrix:
    """Return coordinates in doublings, shape (problems, sizes); the two values of a flag are one doubling apart."""
    return np.stack([np.log2(np.maximum(column, 0.5)) for column in sizes.values()], axis=1)


_MIN_LEAF_SHARE = 0.01
"""Minimum share of a leaf in the total weight."""
_PARENT_SHARE = 1e-4
"""Weight of the parent's losses in the order of a leaf, as a share of the total weight."""
_MIN_SPLIT_GAIN = 1e-4
"""Minimum gain of a split in mean loss over all points, 0.01 %, and of a split by a less simple feature over one by a
simpler feature."""
_TILES = (256, 128, 64, 32, 16, 8, 4, 2)
"""Preferred divisors of a threshold between sizes."""

Vector = NDArray[np.float64]
Mask = NDArray[np.bool_]
Indices = NDArray[np.int64]


def learn_tree(losses: Matrix, weights: Vector, features: Sequence[Feature], table: Matrix, max_leaves: int) -> Tree:
    """Learn a decision tree by repeatedly splitting the leaf with the largest gain.

    Parameters
    ----------
    losses
        Loss of serving each configuration at each point, 0.05 for 5 %, shape (points, configurations). Where a
        configuration cannot be served, the loss of its substitute; finite everywhere.
    weights
        Weight of each point, shape (points,).
    features
        Features to split by, simplest first.
    table
        Values of the features, shape (points, features).
    max_leaves
        Maximum number of leaves; fewer where no split gains enough.
    """
    learner = _TreeLearner(losses, weights, features, table)
    for _ in range(1, max_leaves):
        if not learner.split_once():
            break
    return learner.tree


@dataclass(eq=False)
class _Node:
    points: Mask
    scores: Vector
    """Mean loss of each configuration, blended with that in the parent."""
    split: tuple[int, float] | None = None
    """Best split: number of the feature, and threshold."""
    gain: float = 0.0
    children: tuple[_Node, _Node] | None = None


class _TreeLearner:
    def __init__(self, losses: Matrix, weights: Vector, features: Sequence[Feature], table: Matrix) -> None:
        self._weights = weights / weights.sum()
        self._weighted = losses * self._weights[:, None]
        self._features = features
        self._table = table
        self._order = np.argsort(table, axis=0, kind="stable")
        self._root = self._make_node(np.ones(len(losses), np.bool_), self._weighted.sum(axis=0))
        self._leaves = [self._root]

    @property
    def tree(self) -> Tree:
        return self._to_tree(self._root)

    def split_once(self) -> bool:
        """Split the leaf with the largest gain; return False if no split gains enough."""
        node = max(self._leaves, key=lambda leaf: leaf.gain)
        if node.split is None:
            return False
        feature, threshold = node.split
        low = node.points & (self._table[:, feature] <= threshold)
        node.children = (self._make_node(low, node.scores), self._make_node(node.points & ~low, node.scores))
        self._leaves.remove(node)
        self._leaves += node.children
        return True

    def _make_node(self, points: Mask, parent_scores: Vector) -> _Node:
        total = self._weighted[points].sum(axis=0) + _PARENT_SHARE * parent_scores
        node = _Node(points, total / (self._weights[points].sum() + _PARENT_SHARE))
        self._find_split(node)
        return node

    def _find_split(self, node: _Node) -> None:
        """Find the split with the least loss; among nearly equal ones, that by the simplest feature."""
        whole = float(self._weighted[node.points].sum(axis=0).min())
        for feature in range(len(self._features)):
            order = self._order[node.points[self._order[:, feature]], feature]
            values = self._table[order, feature]
            weight = np.cumsum(self._weights[order])
            heavy = (weight[:-1] >= _MIN_LEAF_SHARE) & (weight[-1] - weight[:-1] >= _MIN_LEAF_SHARE)
            cuts = np.flatnonzero((values[:-1] < values[1:]) & heavy)
            if not len(cuts):
                continue
            below = np.cumsum(self._weighted[order], axis=0)
            remaining = below[cuts].min(axis=1) + (below[-1] - below[cuts]).min(axis=1)
            best = int(np.argmin(remaining))
            gain = whole - float(remaining[best])
            if gain > node.gain + _MIN_SPLIT_GAIN:
                low, high = values[cuts[best] : cuts[best] + 2]
                node.gain, node.split = gain, (feature, threshold_between(float(low), float(high)))

    def _to_tree(self, node: _Node) -> Tree:
        if node.children is None or node.split is None:
            return Leaf(tuple(int(number) for number in np.argsort(node.scores, kind="stable")))
        feature, threshold = node.split
        low, high = node.children
        return Split(self._features[feature], threshold, self._to_tree(low), self._to_tree(high))


def threshold_between(low: float, high: float) -> float:
    """Return a threshold in the interval from ``low`` (included) to ``high`` (excluded), near the geometric mean.

    Between sizes it is a multiple of a large power of two, where a row of tiles ends: 128 between 120 and 137.
    Otherwise it has as few digits as possible.
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


UNSERVED_LOSS = 10.0
"""Loss at a point where none of the selected configurations can be served: equal to eleven times the best time."""
_UNCOVERED_LOSS = 1.0
"""The same at an unmeasured problem, for which the nearest tuned size or the default can still be served."""
_MIN_GAIN = 1e-9
"""Minimum gain in mean loss; less is rounding error."""
_FOLDS = 32
"""Number of folds of the cross-validation; with no more points than this, each is left out alone."""
_MEASURED_SHARE = 0.25
"""Share of all measured points in the total weight; the rest is that of the unmeasured problems."""
_LEAVES_PER_CONFIG = 2
"""A configuration may be best in more than one region of the sizes, but the tree must remain readable."""


@dataclass(frozen=True)
class TrainingData:
    """The data that a rule is learned from.

    Attributes
    ----------
    times_us
        Measured times in microseconds, shape (points, configurations); NaN where a configuration cannot be served.
        Every point has at least one time.
    proposed_by
        Whether the tuning of a point proposed the configuration, same shape. A configuration that no point proposed
        (the default) is available to every rule.
    traits
        Traits of the points and the configurations.
    unmeasured
        Traits of other problems of the family and the same configurations.
    is_valid
        Whether a configuration meets the kernel's rules at these other problems, shape (problems, configurations).
    """

    times_us: Matrix
    proposed_by: Mask
    traits: Traits
    unmeasured: Traits
    is_valid: Mask

    @property
    def losses(self) -> Matrix:
        """Times over the best time at each point, minus 1, shape (points, configurations)."""
        return np.asarray(self.times_us / np.nanmin(self.times_us, axis=1, keepdims=True) - 1.0)


@dataclass(frozen=True)
class LearnedRule:
    """A rule over the columns of the training data.

    Attributes
    ----------
    chosen
        Columns of the selected configurations, in the order in which the tree numbers them.
    tree
        Decision tree between them.
    losses
        Loss of the served configuration at each point, shape (points,).
    held_out
        Loss at each point of a rule that was learned without this point and without the configurations that only this
        point proposed, shape (points,); NaN for a single point.
    """

    chosen: tuple[int, ...]
    tree: Tree
    losses: Vector
    held_out: Vector


def learn_rule(data: TrainingData, features: Sequence[Feature], max_configs: int) -> LearnedRule:
    """Learn a rule from all points, and estimate its loss at other problems by cross-validation.

    Parameters
    ----------
    data
        Times at the points, and traits of other problems.
    features
        Features over ``max_configs`` configurations, see `autotile.families.rule.list_features`.
    max_configs
        Maximum number of configurations of the rule.
    """
    everywhere = np.arange(len(data.times_us))
    folds = [everywhere[start::_FOLDS] for start in range(min(_FOLDS, len(everywhere)))] if len(everywhere) > 1 else []
    held_out = np.full(len(everywhere), np.nan)
    for fold in folds:
        rule = _learn_on(data, np.setdiff1d(everywhere, fold), features, max_configs)
        held_out[fold] = _served_losses(data, *rule, fold)
    chosen, tree = _learn_on(data, everywhere, features, max_configs)
    return LearnedRule(chosen, tree, _served_losses(data, chosen, tree, everywhere), held_out)


def select_configs(losses: Matrix, weights: Vector, max_configs: int) -> list[int]:
    """Select the columns with the least mean loss of the best one at each problem: greedily, then by exchange.

    Parameters
    ----------
    losses
        Loss of serving each configuration, shape (problems, configurations).
    weights
        Weight of each problem, shape (problems,).
    max_configs
        Maximum number of columns; fewer are returned where more gain nothing.
    """
    weighted = losses * (weights / weights.sum())[:, None]
    chosen: list[int] = []
    best = weighted.max(axis=1)
    while len(chosen) < max_configs:
        means = np.minimum(weighted, best[:, None]).sum(axis=0)
        new = int(np.argmin(means))
        if chosen and means[new] > best.sum() - _MIN_GAIN:
            break
        chosen.append(new)
        best = np.minimum(best, weighted[:, new])
    return _exchange(weighted, chosen)


def _exchange(weighted: Matrix, chosen: list[int]) -> list[int]:
    """Replace one column by another for as long as that gains."""
    improved = len(chosen) > 1
    while improved:
        improved = False
        for place in range(len(chosen)):
            others = weighted[:, [column for at, column in enumerate(chosen) if at != place]].min(axis=1)
            means = np.minimum(weighted, others[:, None]).sum(axis=0)
            new = int(np.argmin(means))
            if means[new] < means[chosen[place]] - _MIN_GAIN:
                chosen[place] = new
                improved = True
    return chosen


def _learn_on(
    data: TrainingData, points: Indices, features: Sequence[Feature], max_configs: int
) -> tuple[tuple[int, ...], Tree]:
    """Learn from some of the points; return the selected columns and the tree between them."""
    proposed_by, losses = data.proposed_by, data.losses[points]
    known = proposed_by[points].any(axis=0) | ~proposed_by.any(axis=0)
    columns = np.flatnonzero(known & np.isfinite(losses).any(axis=0))
    predicted = _predict_losses(data, points, columns)
    all_losses = [np.where(np.isfinite(losses[:, columns]), losses[:, columns], UNSERVED_LOSS)]
    all_losses += [np.where(np.isfinite(predicted), predicted, _UNCOVERED_LOSS)]
    selected = select_configs(np.concatenate(all_losses), _weights(len(points), len(predicted)), max_configs)
    chosen = tuple(int(columns[c]) for c in selected)
    usable = [feature for feature in features if max(feature.config, feature.over) < len(chosen)]
    served = np.flatnonzero(np.isfinite(predicted[:, selected]).any(axis=1))
    measured, unmeasured = data.traits.select(chosen).rows(points), data.unmeasured.select(chosen).rows(served)
    tree = learn_tree(
        np.concatenate([_fill_in(losses[:, chosen]), _fill_in(predicted[served][:, selected])]),
        _weights(len(points), len(served)),
        usable,
        np.concatenate([measured.table(usable), unmeasured.table(usable)]),
        _LEAVES_PER_CONFIG * max_configs,
    )
    return chosen, tree


def _predict_losses(data: TrainingData, points: Indices, columns: Indices) -> Matrix:
    """Return the losses of columns at the unmeasured problems, predicted from some of the points; NaN if not valid."""
    known = columns.tolist()
    measured, unmeasured = data.traits.select(known).rows(points), data.unmeasured.select(known)
    times_us = data.times_us[np.ix_(points, columns)]
    predicted_us = TimeModel.fit(times_us, np.nanmin(data.times_us[points], axis=1), measured).predict(unmeasured)
    valid = data.is_valid[:, columns]
    best_us = np.where(valid, predicted_us, np.inf).min(axis=1, keepdims=True)
    return np.where(valid, predicted_us / best_us - 1.0, np.nan)


def _weights(points: int, unmeasured: int) -> Vector:
    """Return the weight of each point, then of each unmeasured problem."""
    shares = (_MEASURED_SHARE, 1.0 - _MEASURED_SHARE) if unmeasured else (1.0, 0.0)
    return np.repeat(np.array(shares) / np.maximum((points, unmeasured), 1), (points, unmeasured))


def _fill_in(losses: Matrix) -> Matrix:
    """Return the losses with that of a substitute where a configuration cannot be served: the best other on average."""
    if not len(losses):
        return losses
    finite = np.isfinite(losses)
    penalised = np.where(finite, losses, UNSERVED_LOSS)
    substitute = np.full(len(losses), UNSERVED_LOSS)
    for column in np.argsort(penalised.mean(axis=0), kind="stable")[::-1]:
        substitute = np.where(finite[:, column], losses[:, column], substitute)
    return np.where(finite, losses, substitute[:, None])


def _served_losses(data: TrainingData, chosen: Sequence[int], tree: Tree, points: Indices) -> Vector:
    """Return the loss at each point of the configuration that a tree serves there: the first of its leaf that runs."""
    losses = data.losses[np.ix_(points, np.array(chosen))]
    found = []
    for row, point in zip(losses, points, strict=True):
        problem = data.traits.select(chosen).rows(np.array([point]))
        order = find_leaf(tree, problem).order
        found.append(next((row[number] for number in order if np.isfinite(row[number])), UNSERVED_LOSS))
    return np.array(found)
