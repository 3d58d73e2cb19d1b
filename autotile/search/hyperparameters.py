"""Hyperparameters of Gaussian process regression: their priors, and a maximum a posteriori fit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.linalg.lapack import dpotrf, dpotri, dpotrs

from autotile.search.gaussian_process import Floats, Hyperparameters

_LENGTH = 0.7
"""Prior median of a length scale with one group, in units of a parameter's range. It grows with the fourth root of the
number of groups, since distances grow with its square root (Hvarfner et al., 2024, use the square root; half that
exponent was best on recorded spaces)."""

_LENGTH_SPREAD = 1.0
"""Prior standard deviation of the logarithm of a length scale."""

_LENGTH_BOUNDS = (-3.0, 4.5)
"""Bounds of the logarithm of a length scale."""

_NOISE = 0.01
"""Prior median of the variance of the noise, relative to that of the targets."""

_NOISE_SPREAD = 1.5
_NOISE_BOUNDS = (1e-5, 1.0)
_MIN_NOISE = 1e-6
_AMPLITUDE_TRIALS = 2.0
_MAX_STEPS = 30
"""Maximum number of optimiser steps; the prior keeps the start near the optimum."""

_TOLERANCE = 1e-3
"""Decrease of the negative log posterior density below which an optimiser step is not worth its time."""

_SUFFICIENT_DECREASE = 1e-4
_MIN_STEP = 1e-3
_MIN_CURVATURE = 1e-9


def fit(
    points: Floats,
    targets: Floats,
    groups: NDArray[np.int64],
    noise: Floats | float = 0.0,
    *,
    start: Hyperparameters | None = None,
    max_steps: int = _MAX_STEPS,
) -> Hyperparameters:
    """Fit the maximum a posteriori hyperparameters, with log-normal priors and the amplitude integrated out.

    Parameters
    ----------
    points
        Coordinates of the observations, shape (n, coordinates).
    targets
        Targets with mean 0 and deviation 1, shape (n,).
    groups
        Group of each coordinate, shape (coordinates,); coordinates of a group share a length scale.
    noise
        Known variance of each target, added to the fitted one, shape (n,).
    start
        Hyperparameters that the optimiser starts from, of the first coordinates; None for the medians of the priors.
    max_steps
        Maximum number of optimiser steps.
    """
    likelihood = _Likelihood(points, targets, groups, noise)
    bounds = np.array([_LENGTH_BOUNDS] * likelihood.groups + [np.log(_NOISE_BOUNDS)])
    first = likelihood.center.copy()
    if start is not None:
        shared = groups[: len(start.scale)]
        first[shared] = -np.log(start.scale[: len(shared)])
        first[-1] = np.log(start.noise)
    covariance = np.diag(np.square(likelihood.spread))
    if start is not None and start.covariance is not None and start.covariance.shape == covariance.shape:
        covariance = start.covariance
    fitted, covariance = _minimum(
        likelihood, first, bounds, inverse=covariance, longest=likelihood.spread, max_steps=max_steps
    )
    return Hyperparameters(np.exp(-fitted[:-1])[groups], float(np.exp(fitted[-1])) + _MIN_NOISE, covariance)


def informative(ascending: NDArray[np.int64], max_count: int) -> NDArray[np.int64]:
    """Select at most ``max_count`` trials to fit to: half of them the best, the others evenly spaced.

    The cost of a fit grows with the cube of their number.

    Parameters
    ----------
    ascending
        Indices of the trials, from the best to the worst.
    max_count
        Maximum number of trials.
    """
    if len(ascending) <= max_count:
        return np.sort(ascending)
    half = max_count // 2
    others = np.linspace(half, len(ascending) - 1, half).astype(np.int64)
    return np.sort(np.concatenate([ascending[:half], ascending[others]]))


def _minimum(
    function: Callable[[Floats], tuple[float, Floats]],
    start: Floats,
    bounds: Floats,
    *,
    inverse: Floats,
    longest: Floats,
    max_steps: int,
) -> tuple[Floats, Floats]:
    """Minimise a function with its gradient over a box by BFGS (Nocedal and Wright, 2006, algorithm 6.1).

    There are few variables, and the function takes 0.1 ms. SciPy's optimiser takes as long again for each step, and its
    import longer than all fits of a session.

    Parameters
    ----------
    function
        Return the value and its gradient.
    start, bounds
        First point, and the least and the largest value of each variable, shape (variables, 2).
    inverse
        First estimate of the inverse Hessian.
    longest
        Longest step of each variable.
    max_steps
        Maximum number of steps.

    Returns
    -------
    minimum, inverse
        Minimum within the box, and the last estimate of the inverse Hessian.
    """
    low, high = bounds.T
    point = np.clip(start, low, high)
    value, gradient = function(point)
    for _ in range(max_steps):
        held = np.where(gradient > 0, point <= low, point >= high)
        direction = np.where(held, 0.0, -inverse @ np.where(held, 0.0, gradient))
        direction /= max(1.0, float(np.abs(direction / longest).max()))
        slope = float(gradient @ direction)
        if slope > -_TOLERANCE:
            break
        step = 1.0
        while True:
            tried = np.clip(point + step * direction, low, high)
            reached, steepness = function(tried)
            if reached <= value + _SUFFICIENT_DECREASE * step * slope:
                break
            step /= 2
            if step < _MIN_STEP:
                return point, inverse
        moved, change = tried - point, steepness - gradient
        curvature = float(moved @ change)
        if curvature > _MIN_CURVATURE:
            scaled = inverse @ change
            shrunk = np.outer(scaled, moved) / curvature
            grown = (1 + float(change @ scaled) / curvature) * np.outer(moved, moved) / curvature
            inverse = inverse + grown - shrunk - shrunk.T
        point, value, gradient = tried, reached, steepness
    return point, inverse


class _Likelihood:
    """Negative log posterior density of log length scales and log noise, with its gradient.

    Of the symmetric matrices, only the pairs below the diagonal are computed.
    """

    def __init__(
        self, points: Floats, targets: Floats, groups: NDArray[np.int64], known_noise: Floats | float = 0.0
    ) -> None:
        self.groups = int(groups.max()) + 1
        self._targets = targets
        self._known_noise = known_noise + _MIN_NOISE
        self._count = len(targets)
        first, second = np.tril_indices(self._count, -1)
        self._pairs = first + self._count * second
        """Index of each pair in a matrix whose columns are contiguous, as LAPACK expects them."""
        self._squares: Floats = np.zeros((self.groups, len(first)))
        for group, column in zip(groups, points.T, strict=True):
            self._squares[group] += np.square(column[first] - column[second])
        length = np.log(_LENGTH) + 0.25 * np.log(self.groups)
        self.center: Floats = np.append(np.full(self.groups, length), np.log(_NOISE))
        self.spread = np.append(np.full(self.groups, _LENGTH_SPREAD), _NOISE_SPREAD)

    def __call__(self, logarithms: Floats) -> tuple[float, Floats]:
        weights, noise = np.exp(-2 * logarithms[:-1]), float(np.exp(logarithms[-1]))
        reach = np.sqrt(5 * weights @ self._squares)
        decay = np.exp(-reach)
        covariance: Floats = np.zeros(self._count**2)
        covariance[self._pairs] = (1 + reach * (1 + reach / 3)) * decay
        covariance[:: self._count + 1] = 1 + noise + self._known_noise
        factor, fault = dpotrf(covariance.reshape(self._count, self._count).T, lower=1, clean=0, overwrite_a=1)
        if fault:
            raise np.linalg.LinAlgError("the covariance is not positive definite")
        determinant = np.log(np.diag(factor)).sum()
        solved, _ = dpotrs(factor, self._targets, lower=1)
        inverse, _ = dpotri(factor, lower=1, overwrite_c=1)
        freedom = self._count + _AMPLITUDE_TRIALS
        amplitude = (float(self._targets @ solved) + _AMPLITUDE_TRIALS) / freedom
        slope = inverse.T.ravel()[self._pairs] - np.outer(solved / amplitude, solved).ravel()[self._pairs]
        # d kernel / d log length = 5/3 (1 + reach) decay * weight * square; a pair counts twice, the slope half
        by_length = (5 / 3) * weights * (self._squares @ (slope * (1 + reach) * decay))
        by_noise = 0.5 * noise * (np.trace(inverse) - float(solved @ solved) / amplitude)
        deviations = (logarithms - self.center) / self.spread
        value = 0.5 * freedom * np.log(amplitude) + determinant + 0.5 * (deviations @ deviations)
        return float(value), np.append(by_length, by_noise) + deviations / self.spread
