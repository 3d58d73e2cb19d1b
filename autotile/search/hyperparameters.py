"""Length scales and noise of a Gaussian process, fitted to what was observed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_solve
from scipy.optimize import minimize

Floats = NDArray[np.float64]

_LENGTH = 0.7
"""Median of the prior of a length scale with one group, in units of a parameter's whole range; it grows with the
fourth root of the groups, since distances grow with their square root (Hvarfner et al., 2024, have it grow with the
square root; half that exponent served best on recorded spaces)."""

_LENGTH_SPREAD = 1.0
"""Deviation of the logarithm of a length scale."""

_LENGTH_BOUNDS = (-3.0, 4.5)
"""Of its logarithm."""

_NOISE = 0.01
"""Median of the prior of the noise's variance, over that of the targets."""

_NOISE_SPREAD = 1.5
_NOISE_BOUNDS = (1e-5, 1.0)
_LEAST_NOISE = 1e-6
_AMPLITUDE_TRIALS = 2.0
_STEPS = 30
"""Most steps of the optimiser; the prior keeps the start near the optimum."""


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """What a kernel needs to know.

    Attributes
    ----------
    scale
        Reciprocal length scale of each coordinate, shape (coordinates,).
    noise
        Variance of the noise, for a kernel that is 1 at distance 0.
    """

    scale: Floats
    noise: float


def matern(squared: NDArray[Any]) -> NDArray[Any]:
    """Matern-5/2 kernel of squared distances (Rasmussen and Williams, 2006, equation 4.17)."""
    reach = np.sqrt(5 * squared)
    return np.asarray((1 + reach + reach * reach / 3) * np.exp(-reach))


def fit(points: Floats, targets: Floats, groups: NDArray[np.int64], noise: Floats | float = 0.0) -> Hyperparameters:
    """Find the likeliest hyperparameters a posteriori, with log-normal priors and the amplitude integrated out.

    Parameters
    ----------
    points
        Coordinates of the observations, shape (n, coordinates).
    targets
        Shape (n,), of mean 0 and deviation 1.
    groups
        Group of each coordinate, shape (coordinates,); a group shares a length scale.
    noise
        Variance of each target that is known, beside that which is fitted, shape (n,).
    """
    likelihood = _Likelihood(points, targets, groups, noise)
    bounds = [_LENGTH_BOUNDS] * likelihood.groups + [(np.log(_NOISE_BOUNDS[0]), np.log(_NOISE_BOUNDS[1]))]
    found = minimize(
        likelihood, likelihood.center, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": _STEPS}
    ).x
    return Hyperparameters(np.exp(-found[:-1])[groups], float(np.exp(found[-1])) + _LEAST_NOISE)


def informative(ascending: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Trials to fit to, given their order from the best to the worst: the best, and others evenly spread.

    A fit costs the cube of the trials, so there are at most so many.
    """
    if len(ascending) <= most:
        return np.sort(ascending)
    half = most // 2
    others = np.linspace(half, len(ascending) - 1, half).astype(np.int64)
    return np.sort(np.concatenate([ascending[:half], ascending[others]]))


class _Likelihood:
    """Negative logarithm of the posterior density of log length scales and log noise, with its gradient."""

    def __init__(
        self, points: Floats, targets: Floats, groups: NDArray[np.int64], known_noise: Floats | float = 0.0
    ) -> None:
        self.groups = int(groups.max()) + 1
        self._targets = targets
        self._known_noise = known_noise + _LEAST_NOISE
        self._count = len(targets)
        self._squares: Floats = np.zeros((self.groups, self._count**2))
        for group, column in zip(groups, points.T, strict=True):
            self._squares[group] += np.square(column[:, None] - column[None, :]).ravel()
        length = np.log(_LENGTH) + 0.25 * np.log(self.groups)
        self.center: Floats = np.append(np.full(self.groups, length), np.log(_NOISE))
        self._spread = np.append(np.full(self.groups, _LENGTH_SPREAD), _NOISE_SPREAD)

    def __call__(self, logarithms: Floats) -> tuple[float, Floats]:
        weights, noise = np.exp(-2 * logarithms[:-1]), float(np.exp(logarithms[-1]))
        reach = np.sqrt(5 * (weights @ self._squares)).reshape(self._count, self._count)
        decay = np.exp(-reach)
        covariance = (1 + reach + reach * reach / 3) * decay
        covariance.flat[:: self._count + 1] += noise + self._known_noise
        factor = np.linalg.cholesky(covariance)
        inverse = cho_solve((factor, True), np.eye(self._count), check_finite=False)
        solved = inverse @ self._targets
        freedom = self._count + _AMPLITUDE_TRIALS
        amplitude = (float(self._targets @ solved) + _AMPLITUDE_TRIALS) / freedom
        slope = 0.5 * (inverse - np.outer(solved, solved) / amplitude)
        # the derivative of the kernel by the logarithm of a length is 5/3 (1 + reach) decay times weight and square
        by_length = weights * (self._squares @ (slope * (5 / 3) * (1 + reach) * decay).ravel())
        by_noise = noise * np.trace(slope)
        away = (logarithms - self.center) / self._spread
        value = 0.5 * freedom * np.log(amplitude) + np.log(np.diag(factor)).sum() + 0.5 * (away @ away)
        return float(value), np.append(by_length, by_noise) + away / self._spread
