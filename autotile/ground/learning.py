"""From measured times of configurations at points of a family to a few configurations and a tree between them.

What is minimised is the mean loss: the time of what is served over the fastest known at the point, minus 1. The few
points are filled up with many more problems of the family, for which `autotile.ground.costs` says what to expect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotile.ground.costs import TimeModel
from autotile.ground.features import Feature, Traits
from autotile.ground.growing import grow_tree
from autotile.ground.tree import Tree, leaf_of

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

Matrix = NDArray[np.float64]
Mask = NDArray[np.bool_]
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
        Those over ``most`` configurations; see `autotile.ground.features.features_of`.
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
