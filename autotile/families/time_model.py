"""Time model: the expected time of a configuration at problems where it was not measured.

The model of a launch is a sum of terms with non-negative weights: a constant; the work of the busiest SM (its rounds of
blocks times the depth, the operations per output); that work again for each size that is not a multiple of the vector
length; the depth alone (one block whose latency nothing hides); the number of whole waves; waves times depth; and the
bytes moved. The residuals at the measured points are interpolated to nearby problems. Measured times bound the result:
a problem that is larger in every size does not take less time.
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
    """Time model of several configurations.

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
