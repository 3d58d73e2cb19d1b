"""What a configuration is expected to take where it was not measured: a model fitted to its times at a few points.

The time of a launch is taken to be a sum of parts, none of them negative: a constant, the work of the busiest SM (the
rounds of blocks that it is given, times the depth of an output), that work again for each size that no vector divides,
the depth alone (what one block takes whose latency nothing hides), whole waves, their depth, and the bytes moved. What
the sum leaves over at the measured points is carried to their neighbours. And a problem that is larger in every way
takes no less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotile.families.features import Traits

_VECTOR = 8
"""Elements of the widest access: 16 bytes of a 16-bit type."""
_REACH_DOUBLINGS = 1.0
"""At this distance from a point its remainder counts 1/e."""
_GUESSED = 0.001
"""Weight of a point where a configuration was not measured, as it cannot run there, against one where it was. It only
breaks ties: at 0.1, guesses had a large tile take 175 us where it took 706 us."""
_DOUBT = 0.3
"""Weight of no remainder at all, against a weight of 1 at the point itself."""
_STRANGE_SHARE = 0.1
"""Of the points nearby, where a configuration was measured at so few of them that it is hardly known there. Like the
doubling by which it is doubted, chosen on times of some hundred configurations of ``sgemm`` and ``gemm_mma`` at 64 and
110 sizes on an H200; values nearby do about as well."""

_PLAIN_PARTS = 6
"""Parts of the sum that do not ask whether vectors fit."""
_LEAST_US = 1e-9

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class TimeModel:
    """Expected times of several configurations.

    Attributes
    ----------
    weights
        Of the parts, shape (configurations, parts), in microseconds a unit of each part.
    remainders
        Logarithm of measured over modelled time at each point, 0 where it was not measured, (points, configurations).
    times_us
        As measured, NaN where it was not, same shape.
    points
        Traits of the points.
    """

    weights: Matrix
    remainders: Matrix
    times_us: Matrix
    points: Traits

    @classmethod
    def fit(cls, times_us: Matrix, best_us: Matrix, traits: Traits) -> TimeModel:
        """Fit by least squares of relative errors.

        Where a configuration was not measured, it is guessed to be as much slower than the best as it is elsewhere.
        Guesses only decide what a few measured times leave open.

        Parameters
        ----------
        times_us
            Shape (points, configurations); NaN where a configuration was not measured. Each has a number.
        best_us
            Least time known at each point, shape (points,).
        traits
            Of the points and configurations.
        """
        known = np.isfinite(times_us)
        slower = np.nanmean(np.log(times_us / best_us[:, None]), axis=0)
        filled = np.where(known, times_us, np.exp(slower) * best_us[:, None])
        trusted = np.where(known, 1.0, _GUESSED)
        weights = [_fitted(_parts(traits, c), filled[:, c], trusted[:, c]) for c in range(times_us.shape[1])]
        modelled = _sums(traits, np.array(weights))
        remainders = np.where(known, np.log(np.where(known, times_us, 1.0) / modelled), 0.0)
        return cls(np.array(weights), remainders, times_us, traits)

    def predict(self, traits: Traits) -> Matrix:
        """Expected times in microseconds at other problems, shape (problems, configurations).

        Where a configuration was measured at hardly any of the points nearby, it is taken for up to twice as slow as
        the model says: a model of one or two times fits them by chance, and of many such models some err far to the
        low side.
        """
        distances = np.abs(_positions(traits.sizes)[:, None, :] - _positions(self.points.sizes)[None, :, :]).sum(axis=2)
        nearness = np.exp(-distances / _REACH_DOUBLINGS)
        known = nearness @ np.isfinite(self.times_us)
        carried = nearness @ self.remainders / (known + _DOUBT)
        share = known / nearness.sum(axis=1, keepdims=True)
        expected_us = _sums(traits, self.weights) * np.exp(carried)
        return np.asarray(self._between(traits, expected_us) * (1.0 + np.exp(-share / _STRANGE_SHARE)))

    def _between(self, traits: Traits, expected_us: Matrix) -> Matrix:
        """Expected times, but none above that of a larger problem or below that of a smaller one.

        The model takes two blocks of an SM for twice the time of one, and they often take hardly more: what was
        measured bounds it. Where the sizes of only one of the two fit vectors, the bound moves by what that is worth.
        """
        here, there = _unaligned(traits, self.weights), _unaligned(self.points, self.weights)
        smaller, larger = _is_within(traits.sizes, self.points.sizes), _is_within(self.points.sizes, traits.sizes)
        most, least = np.full_like(expected_us, np.inf), np.zeros_like(expected_us)
        for point, times_us in enumerate(self.times_us):  # NaN bounds nothing
            worse, below, above = here / there[point], smaller[:, point], larger[point]
            most[below] = np.fmin(most, times_us * np.maximum(worse, 1.0))[below]
            least[above] = np.fmax(least, times_us * np.minimum(worse, 1.0))[above]
        bounded = np.maximum(np.minimum(expected_us, most), least)
        return np.asarray(np.where(least > most, expected_us, bounded))  # bounds that contradict each other say nothing


def _fitted(parts: Matrix, times_us: Matrix, trusted: Matrix) -> Matrix:
    from scipy.optimize import nnls  # 0.1 s, which serving has no use for

    relative = parts * (trusted / times_us)[:, None]
    scale = np.maximum(relative.max(axis=0), 1e-300)
    weights, _ = nnls(relative / scale, trusted)
    return np.asarray(weights / scale)


def _parts(traits: Traits, config: int) -> Matrix:
    """Parts of a configuration's time at each problem, shape (problems, parts)."""
    depth = traits.flops / traits.outputs if traits.flops.any() else np.ones_like(traits.outputs)
    rounds, waves = traits.rounds[:, config], np.ceil(traits.waves[:, config])
    ragged = [rounds * depth * (sizes % _VECTOR != 0) for sizes in traits.sizes.values()]
    plain = [np.ones_like(depth), depth, rounds * depth, waves, waves * depth, traits.bytes]
    return np.stack([*plain, *ragged], axis=1)


def _sums(traits: Traits, weights: Matrix) -> Matrix:
    sums = [_parts(traits, config) @ row for config, row in enumerate(weights)]
    return np.asarray(np.maximum(np.stack(sums, axis=1), _LEAST_US))


def _unaligned(traits: Traits, weights: Matrix) -> Matrix:
    """Modelled times over what they would be if vectors fitted every size, shape (problems, configurations)."""
    fitting = weights.copy()
    fitting[:, _PLAIN_PARTS:] = 0.0
    return np.asarray(_sums(traits, weights) / _sums(traits, fitting))


def _is_within(inner: Mapping[str, NDArray[np.float64]], outer: Mapping[str, NDArray[np.float64]]) -> NDArray[np.bool_]:
    """Whether no size of one problem is above the other's, and no flag differs, shape (inner, outer)."""
    found = [_no_larger(inner[name][:, None], outer[name][None, :]) for name in inner]
    return np.asarray(np.logical_and.reduce(found))


def _no_larger(size: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.bool_]:
    return np.asarray((size == other) | ((size <= other) & (size > 0)))  # only flags are 0


def _positions(sizes: Mapping[str, NDArray[np.float64]]) -> Matrix:
    """Coordinates in doublings; a flag that is 0 lies one below one that is 1."""
    return np.stack([np.log2(np.maximum(column, 0.5)) for column in sizes.values()], axis=1)
