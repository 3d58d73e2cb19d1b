"""Gaussian process regression with a Matern-5/2 kernel, extended one observation at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular

from autotile.search.hyperparameters import Hyperparameters, matern

Floats = NDArray[np.float64]
Singles = NDArray[np.float32]

_LEAST_VARIANCE = 1e-6
"""Keeps a deviation from being zero where an observation was made."""

_AMPLITUDE_TRIALS = 2
"""Observations that the prior of the amplitude is worth, at amplitude 1."""


class GaussianProcess:
    """A posterior at fixed points, given observations that are added one by one.

    With K = L L^T over the observations, it keeps L and the rows of L^-1 k(observations, points). An observation adds a
    row to each, which costs one pass over the second instead of a new factorisation. Targets enter only when a
    prediction is made, so that several can share the factors, and so that observations without a target yet only
    lower the variance: they are taken to have just what was expected of them.

    Parameters
    ----------
    parameters
        Length scales and noise.
    points
        Where predictions are made, shape (points, coordinates).
    observed
        The first observations, shape (n, coordinates).
    noise
        Variance of each of them beyond that of all, for a kernel that is 1 at distance 0, shape (n,).
    """

    def __init__(
        self, parameters: Hyperparameters, points: Floats, observed: Floats, noise: Floats | float = 0.0
    ) -> None:
        self._parameters = parameters
        self._observed: Floats = observed * parameters.scale
        count = len(observed)
        self._factor: Floats = np.zeros((2 * count + 64,) * 2)
        covariance = _matern_between(self._observed, self._observed)
        covariance.flat[:: count + 1] += parameters.noise + noise
        self._factor[:count, :count] = np.linalg.cholesky(covariance)
        self.look_at(points)

    def look_at(self, points: Floats) -> None:
        """Make predictions at these points from now on, shape (points, coordinates)."""
        count = len(self)
        self._points: Singles = (points * self._parameters.scale).astype(np.float32)
        self._squares: Singles = np.square(self._points).sum(axis=1)
        self._rows: Singles = np.zeros((len(self._factor), len(points)), np.float32)
        across = _matern_between(self._observed.astype(np.float32), self._points)
        factor = self._factor[:count, :count].astype(np.float32)
        self._rows[:count] = solve_triangular(factor, across, lower=True, check_finite=False, overwrite_b=True)
        self._explained: Singles = np.square(self._rows[:count]).sum(axis=0)

    def __len__(self) -> int:
        return len(self._observed)

    def observe(self, point: Floats) -> None:
        """Add an observation at a point, shape (coordinates,)."""
        count = len(self)
        self._reserve(count + 1)
        scaled = point * self._parameters.scale
        known = matern(np.square(self._observed - scaled).sum(axis=1))
        row = solve_triangular(self._factor[:count, :count], known, lower=True, check_finite=False)
        rest = np.sqrt(max(1 + self._parameters.noise - float(row @ row), _LEAST_VARIANCE))
        self._factor[count, :count] = row
        self._factor[count, count] = rest
        single = scaled.astype(np.float32)
        across = matern(np.maximum(self._squares + single @ single - 2 * (self._points @ single), 0))
        added = (across - row.astype(np.float32) @ self._rows[:count]) / np.float32(rest)
        self._rows[count] = added
        self._explained += added * added
        self._observed = np.concatenate([self._observed, scaled[None]])

    def predict(self, targets: Floats, known: NDArray[np.bool_]) -> tuple[Floats, Floats]:
        """Mean of each target and their common deviation at the points.

        Parameters
        ----------
        targets
            Shape (targets, observations); the deviation is scaled by the spread of the first.
        known
            Observations whose targets count, shape (observations,).

        Returns
        -------
        mean : numpy.ndarray
            Shape (targets, points).
        deviation : numpy.ndarray
            Shape (points,).
        """
        whitened = self._whiten(targets, known)
        mean = whitened.astype(np.float32) @ self._rows[: len(self)]
        squares = float(whitened[0] @ whitened[0])
        amplitude = (squares + _AMPLITUDE_TRIALS) / (np.count_nonzero(known) + _AMPLITUDE_TRIALS)
        variance = amplitude * np.maximum(1 - self._explained.astype(np.float64), _LEAST_VARIANCE)
        return mean.astype(np.float64), np.sqrt(variance)

    def _whiten(self, targets: Floats, known: NDArray[np.bool_]) -> Floats:
        """Solve L x = targets, with 0, no surprise, in place of what is not known."""
        found = np.zeros_like(targets)
        first = int(np.argmin(known)) if not known.all() else len(known)  # those in flight are the newest, mostly
        leading = self._factor[:first, :first]
        found[:, :first] = solve_triangular(leading, targets[:, :first].T, lower=True, check_finite=False).T
        for index in first + np.flatnonzero(known[first:]):
            expected = found[:, :index] @ self._factor[index, :index]
            found[:, index] = (targets[:, index] - expected) / self._factor[index, index]
        return found

    def _reserve(self, count: int) -> None:
        if count > len(self._rows):
            self._factor = _grown(self._factor, (2 * count, 2 * count))
            self._rows = _grown(self._rows, (2 * count, self._rows.shape[1]))


def _grown(array: NDArray[Any], shape: tuple[int, int]) -> NDArray[Any]:
    """The same array with zeros behind its rows and columns."""
    larger = np.zeros(shape, array.dtype)
    larger[: array.shape[0], : array.shape[1]] = array
    return larger


def _matern_between(left: NDArray[Any], right: NDArray[Any]) -> NDArray[Any]:
    squared = np.square(left).sum(axis=1)[:, None] + np.square(right).sum(axis=1) - 2 * (left @ right.T)
    return matern(np.maximum(squared, 0))
