"""Gaussian process regression with a Matern-5/2 kernel, extended by one observation at a time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from autotile.settings import variable_set

# OpenBLAS makes a thread a core when SciPy is imported. On 16 cores each of them then spun for 0.12 s, beside the first
# compilers, before it went to sleep; now after 2 ** 4 clock cycles instead of 2 ** 26.
with variable_set("OPENBLAS_THREAD_TIMEOUT", "4"):
    from scipy.linalg.lapack import dpotrf, dpotri, dpotrs, dtrtri
    from scipy.special import ndtr


class _OneBlasThread:
    """Context that limits BLAS to one thread; entering it again within itself costs nothing."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._entered = 0
        self._limit: AbstractContextManager[object] = nullcontext()

    def __enter__(self) -> None:
        with self._lock:
            self._entered += 1
            if self._entered == 1:
                self._limit = _controller().limit(limits=1, user_api="blas")
                self._limit.__enter__()

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._entered -= 1
            if self._entered == 0:
                self._limit.__exit__(None, None, None)


_ONE_BLAS_THREAD = _OneBlasThread()


def one_blas_thread() -> AbstractContextManager[None]:
    """Return a context in which BLAS uses one thread, in all threads of the process.

    On two busy cores, a proposal over 14,712 rows took 190 ms with OpenBLAS's default number of threads, which wait for
    each other spinning, and 4 ms with one.
    """
    return _ONE_BLAS_THREAD


@cache
def _controller() -> ThreadpoolController:
    """Return a controller of the loaded BLAS libraries, NumPy's and SciPy's."""
    import scipy.linalg  # noqa: F401 - SciPy has a BLAS of its own

    return ThreadpoolController()


Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """Hyperparameters of a kernel that is 1 at distance 0.

    Attributes
    ----------
    scale
        Reciprocal length scale of each coordinate, shape (coordinates,).
    noise
        Variance of the noise.
    covariance
        Estimated posterior covariance of the logarithms of the length scale of each group and of the noise, shape
        (groups + 1, groups + 1), with which a later fit begins; None if they are not fitted.
    """

    scale: Floats
    noise: float
    covariance: Floats | None = None


def matern(squared: NDArray[Any]) -> NDArray[Any]:
    """Return the Matern-5/2 kernel of squared distances (Rasmussen and Williams, 2006, equation 4.17)."""
    reach = np.sqrt(5 * squared)
    return np.asarray((1 + reach * (1 + reach / 3)) * np.exp(-reach))


Singles = NDArray[np.float32]

_SPARE = 64
"""Number of observations that memory is reserved for."""

_MIN_VARIANCE = 1e-6
"""Lower limit of a variance, which would be zero at an observation."""

_PRIOR_TRIALS = 2
"""Weight of the prior of the amplitude, which is 1, in observations."""


class GaussianProcess:
    """A posterior at given points, to which observations are added.

    With K = L L^T over the observations, it keeps L, L^-1, and L^-1 k(observations, point) of each point. An
    observation adds a row to the first two and an element to the others, at the cost of one pass over the last two
    instead of a new factorisation. Targets are passed to `predict` only: several targets can share the factors, and an
    observation whose target is not known yet reduces the variance and leaves the mean unchanged.

    Parameters
    ----------
    parameters
        Length scales and noise.
    points
        Coordinates of the points of predictions, shape (points, coordinates).
    observed
        Coordinates of the first observations, shape (n, coordinates).
    noise
        Known variance of each of these, added to the common one, for a kernel that is 1 at distance 0, shape (n,).
    """

    def __init__(
        self,
        parameters: Hyperparameters,
        points: Floats,
        observed: Floats,
        noise: Floats | float = 0.0,
    ) -> None:
        self._scale = parameters.scale
        self._noise = parameters.noise
        self._count = count = len(observed)
        self._observed: Floats = np.zeros((count + _SPARE, observed.shape[1]))
        self._observed[:count] = observed * self._scale
        self._observed_squares: Floats = np.zeros(count + _SPARE)
        self._observed_squares[:count] = np.square(self._observed[:count]).sum(axis=1)
        covariance = self._prior_with(self._observed[:count], self._observed_squares[:count])
        covariance.flat[:: count + 1] += self._noise + noise
        self._factor: Floats = np.zeros((count + _SPARE,) * 2)
        self._factor[:count, :count] = np.linalg.cholesky(covariance)
        self._inverse: Floats = np.zeros_like(self._factor)
        self._inverse[:count, :count] = np.tril(dtrtri(self._factor[:count, :count], lower=1)[0])
        self._single_inverse: Singles = self._inverse.astype(np.float32)
        self.set_points(points)

    def set_points(self, points: Floats) -> None:
        """Set the points of predictions, shape (points, coordinates)."""
        self._points: Singles = np.zeros((0, len(self._scale)), np.float32)
        self._squares: Singles = np.zeros(0, np.float32)
        self._explained: Singles = np.zeros(0, np.float32)
        self._whitened: Singles = np.zeros((0, len(self._factor)), np.float32)
        self.replace_points(np.zeros(0, np.int64), points)

    def replace_points(self, indices: NDArray[np.int64], points: Floats) -> None:
        """Replace the points of predictions with the given indices, and append the others, shape (n, coordinates)."""
        count, appended = self._count, len(points) - len(indices)
        if appended:
            indices = np.append(indices, len(self._points) + np.arange(appended))
            self._points = _longer(self._points, appended)
            self._squares = _longer(self._squares, appended)
            self._explained = _longer(self._explained, appended)
            self._whitened = _longer(self._whitened, appended)
        scaled = (points * self._scale).astype(np.float32)
        squares = np.square(scaled).sum(axis=1)
        across = self._prior_with(scaled, squares)
        whitened = across @ self._single_inverse[:count, :count].T
        self._points[indices] = scaled
        self._squares[indices] = squares
        self._explained[indices] = np.square(whitened).sum(axis=1)
        self._whitened[indices, :count] = whitened

    def __len__(self) -> int:
        return self._count

    def observe(self, points: Floats) -> None:
        """Add observations at points, shape (n, coordinates); several at once take little longer than one."""
        count, end = self._count, self._count + len(points)
        self._reserve(end)
        scaled = points * self._scale
        squares = np.square(scaled).sum(axis=1)
        inverse = self._inverse[:count, :count]
        rows = self._prior_with(scaled, squares) @ inverse.T
        covariance = _prior_between(scaled, squares, scaled, squares) - rows @ rows.T
        covariance.flat[:: len(points) + 1] = np.maximum(np.diag(covariance) + self._noise, _MIN_VARIANCE)
        factor = np.linalg.cholesky(covariance)
        unwhitened = np.linalg.inv(factor)
        self._factor[count:end, :count] = rows
        self._factor[count:end, count:end] = factor
        self._inverse[count:end, :count] = -unwhitened @ (rows @ inverse)
        self._inverse[count:end, count:end] = np.tril(unwhitened)
        self._single_inverse[count:end, :end] = self._inverse[count:end, :end]
        single = scaled.astype(np.float32)
        across = _prior_between(self._points, self._squares, single, np.square(single).sum(axis=1))
        across -= self._whitened[:, :count] @ rows.T.astype(np.float32)
        added = across @ unwhitened.T.astype(np.float32)
        self._whitened[:, count:end] = added
        self._explained += np.square(added).sum(axis=1)
        self._observed[count:end] = scaled
        self._observed_squares[count:end] = squares
        self._count = end

    def predict(self, targets: Floats, known: NDArray[np.bool_]) -> tuple[Floats, Floats]:
        """Predict each target at the points.

        Parameters
        ----------
        targets
            Targets, shape (targets, observations).
        known
            Whether the targets of an observation are known, shape (observations,).

        Returns
        -------
        mean : numpy.ndarray
            Means, shape (targets, points).
        deviation : numpy.ndarray
            Standard deviation of the first target, shape (points,).
        """
        solved = self._whiten(targets, known)
        seen = self._whitened[:, : self._count]
        mean = np.stack([seen @ each for each in solved.astype(np.float32)])  # faster than one product of matrices
        squares = float(solved[0] @ solved[0])
        amplitude = (squares + _PRIOR_TRIALS) / (np.count_nonzero(known) + _PRIOR_TRIALS)
        variance = amplitude * np.maximum(1 - self._explained.astype(np.float64), _MIN_VARIANCE)
        return mean.astype(np.float64), np.sqrt(variance)

    def _prior_with(self, points: NDArray[Any], squares: NDArray[Any]) -> NDArray[Any]:
        """Return the prior covariance of scaled points with the observations, in the precision of the points."""
        observed, of_observed = self._observed[: self._count], self._observed_squares[: self._count]
        kind = points.dtype
        return _prior_between(points, squares, observed.astype(kind, copy=False), of_observed.astype(kind, copy=False))

    def among(self, indices: NDArray[np.int64]) -> Posterior:
        """Return the posterior at some of the points, by their indices, until the next observation."""
        return Posterior(
            self._points[indices],
            self._squares[indices],
            self._whitened[indices, : self._count],
            np.maximum(1 - self._explained[indices], np.float32(_MIN_VARIANCE)),
            self._noise,
        )

    def _whiten(self, targets: Floats, known: NDArray[np.bool_]) -> Floats:
        """Solve L x = targets, with x = 0 for unknown targets, which are as expected."""
        solved = np.zeros_like(targets)
        first = int(np.argmin(known)) if not known.all() else len(known)  # unknown targets are mostly the newest
        inverse = self._inverse[:first, :first]
        for each, target in zip(solved, targets, strict=True):  # faster than one product of matrices
            each[:first] = inverse @ target[:first]
        for index in first + np.flatnonzero(known[first:]):
            expected = solved[:, :index] @ self._factor[index, :index]
            solved[:, index] = (targets[:, index] - expected) / self._factor[index, index]
        return solved

    def _reserve(self, count: int) -> None:
        if count > len(self._factor):
            larger = count + _SPARE
            self._observed = _longer(self._observed, larger - len(self._observed))
            self._observed_squares = _longer(self._observed_squares, larger - len(self._observed_squares))
            self._factor = _padded(self._factor, (larger, larger))
            self._inverse = _padded(self._inverse, (larger, larger))
            self._single_inverse = _padded(self._single_inverse, (larger, larger))
            self._whitened = _padded(self._whitened, (len(self._whitened), larger))


@dataclass(frozen=True, slots=True)
class Posterior:
    """Covariances between a few points, given the observations."""

    points: Singles
    squares: Singles
    whitened: Singles
    variance: Singles
    noise: float

    def explained_by(self, index: int) -> Floats:
        """Return the share of the variance at each point that an observation at one of them would explain.

        Parameters
        ----------
        index
            Index of that point.

        Returns
        -------
        numpy.ndarray
            Shape (points,).
        """
        squared = self.squares + self.squares[index] - 2 * (self.points @ self.points[index])
        covariance = matern(np.maximum(squared, 0)) - self.whitened @ self.whitened[index]
        shares = np.square(covariance) / (self.variance * (self.variance[index] + np.float32(self.noise)))
        return np.asarray(np.minimum(shares, 1.0), np.float64)


def _longer(array: NDArray[Any], count: int) -> NDArray[Any]:
    """Return an array with zeros appended along its first axis."""
    return np.concatenate([array, np.zeros((count, *array.shape[1:]), array.dtype)])


def _padded(array: NDArray[Any], shape: tuple[int, int]) -> NDArray[Any]:
    """Return an array with zeros appended to its rows and columns."""
    larger = np.zeros(shape, array.dtype)
    larger[: array.shape[0], : array.shape[1]] = array
    return larger


def _prior_between(
    left: NDArray[Any], of_left: NDArray[Any], right: NDArray[Any], of_right: NDArray[Any]
) -> NDArray[Any]:
    """Return the prior covariance of scaled points, given also the squared norm of each."""
    squared = left @ (-2 * right.T)
    squared += of_left[:, None]
    squared += of_right
    return matern(np.maximum(squared, 0, out=squared))


_TAIL = -20.0
"""Standardized improvement below which the first term of the asymptotic series is used. Its relative error is three
over the square of this; the closed form loses as many digits as that square has, and then underflows."""


def log_expected_improvement(mean: Floats, deviation: Floats, best: float) -> Floats:
    """Return the logarithm of the expected improvement of a normal value over ``best`` (Ament et al., 2023).

    Parameters
    ----------
    mean, deviation
        Means and standard deviations, shape (n,).
    best
        Lowest value so far.
    """
    standard = (best - mean) / deviation
    near = np.maximum(standard, _TAIL)
    logarithm = np.log(near * ndtr(near) + np.exp(-0.5 * near * near) / np.sqrt(2 * np.pi))
    tail = np.flatnonzero(standard <= _TAIL)
    far = standard[tail]
    logarithm[tail] = -0.5 * far * far - 0.5 * np.log(2 * np.pi) - 2 * np.log(-far)
    return np.asarray(np.log(deviation) + logarithm)


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
