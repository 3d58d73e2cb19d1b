"""Gaussian process regression over configurations: their coordinates, the process, and its fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from threading import Lock
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from autotile.core.model import Trial, Value
from autotile.kernel.spec import Parameter
from autotile.settings import BLAS_TIMEOUT, variable_set

Floats = NDArray[np.float64]
Singles = NDArray[np.float32]
Rows = NDArray[np.int64]
PointsOf = Callable[[Rows], Floats]
"""Returns the coordinates of rows, shape (rows, coordinates)."""

_blas_lock = Lock()
_blas_controller = cache(ThreadpoolController)
_blas_limits: list[ExitStack] = []
"""A context for each entry of `one_blas_thread`; the first one limits the threads."""


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Let BLAS use one thread, in all threads of the process; entering it again within itself costs nothing.

    On two busy cores, a proposal over 14,712 rows took 190 ms with OpenBLAS's default number of threads, which wait for
    each other spinning, and 4 ms with one.
    """
    with _blas_lock:
        _blas_limits.append(ExitStack())
        if len(_blas_limits) == 1:
            _blas_limits[0].enter_context(_blas_controller().limit(limits=1, user_api="blas"))
    try:
        yield
    finally:
        with _blas_lock:
            _blas_limits.pop().close()


@cache
def load_scipy() -> tuple[ModuleType, ModuleType]:
    """Import SciPy's LAPACK and special functions, which take as long as a compilation; the first fit needs them."""
    with variable_set(*BLAS_TIMEOUT):
        import scipy.special
        from scipy.linalg import lapack
    with _blas_lock:
        _blas_controller.cache_clear()  # SciPy has a BLAS of its own
        if _blas_limits:
            _blas_limits[0].enter_context(_blas_controller().limit(limits=1, user_api="blas"))
    return lapack, scipy.special


def positions(values: Sequence[Value]) -> Rows | None:
    """Return the position of each value in ascending order; None unless all values are numbers."""
    if any(isinstance(value, bool | str) for value in values):
        return None
    return np.argsort(np.argsort(np.array(values))).astype(np.int64)


def features_of(compiled: Trial, sm_count: int) -> Floats | None:
    """Return coordinates of a candidate's resources, each about 0 to 1, shape (7,); None if it did not compile."""
    geometry, resources, occupancy = compiled.geometry, compiled.resources, compiled.occupancy
    if geometry is None or resources is None or occupancy is None:
        return None
    smem_bytes = resources.static_smem_bytes + geometry.dynamic_smem_bytes
    waves = geometry.blocks / (sm_count * max(1, occupancy.blocks_per_sm))
    return np.array(
        [  # logarithms, scaled to the range that GPUs allow
            np.log2(max(resources.registers, 1) / 16) / 4,
            np.log2(1 + resources.spill_bytes / 16) / 8,
            np.log2(1 + smem_bytes / 1024) / 8,
            np.log2(geometry.threads / 32) / 5,
            np.log2(max(1, occupancy.blocks_per_sm)) / 5,
            occupancy.occupancy,
            waves / np.ceil(waves),  # filled share of the last wave of blocks
        ]
    )


def compiled_points(
    points: PointsOf, groups: Rows, features: Mapping[int, Floats], fitted: Rows
) -> tuple[PointsOf, Rows]:
    """Return the coordinates of compiled rows, those of their parameters followed by their resources, and the groups.

    Features that are constant among the ``fitted`` rows are left out; each other is a group of its own. A row without
    features, which did not compile, has the mean of the others. ``points`` and ``groups`` are those of the parameters.
    """
    known = np.array([features[row] for row in fitted.tolist() if row in features])
    varying = np.flatnonzero(np.ptp(known, axis=0) > 0) if len(known) else np.zeros(0, np.int64)
    if not len(varying):
        return points, groups
    mean = known.mean(axis=0)

    def compiled(rows: Rows) -> Floats:
        used = [features.get(row, mean)[varying] for row in rows.tolist()]
        return np.concatenate([points(rows), np.array(used).reshape(len(rows), len(varying))], axis=1)

    return compiled, np.append(groups, groups.max(initial=-1) + 1 + np.arange(len(varying)))


_CHOICE_COORDINATE = np.sqrt(0.5)
"""Coordinate of a choice, with which two different choices are at distance 1."""


class Embedding:
    """Coordinates of configurations, in groups that share a length scale.

    A parameter of numbers is one coordinate between 0 and 1: the logarithm if all are positive, so that a doubling is
    the same step everywhere, else the position in ascending order. If such numbers are integers and not all powers of
    two, a second coordinate is the number of factors of two: warps, banks and vector loads make 48 unlike 47. Strings,
    booleans and numbers that merely enumerate choices (0, 1, 2) have one coordinate per choice, all of one group.

    The last group holds the products of any two tile sizes, on one scale: threads of a block, elements of a tile, work
    of a thread. It needs few coordinates: the squared differences of all sums of two of p logarithms add up to p - 2
    times those of each logarithm plus that of the sum of all.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        tables = [(index, table) for index, each in enumerate(parameters) for table in _tables(each.values)]
        sizes = [
            (index, logs) for index, each in enumerate(parameters) if (logs := _logarithms(each.values)) is not None
        ]
        self._tables = tables
        self._sizes: list[tuple[int, Floats]] = []
        """Logarithms of the sizes, divided by the mean range of a sum of two; none if there are fewer than two."""
        if len(sizes) > 1:
            mean_range = 2 * float(np.mean([np.ptp(column) for _, column in sizes]))
            self._sizes = [(index, column / mean_range) for index, column in sizes]
        groups = [group for group, (_, table) in enumerate(tables) for _ in range(table.shape[1])]
        groups += [len(tables)] * (len(self._sizes) + 1 if self._sizes else 0)  # the products
        self.groups: Rows = np.array(groups, np.int64)

    def of(self, codes: NDArray[np.integer]) -> Floats:
        """Return the coordinates, shape (n, coordinates), of configurations by their codes, shape (n, parameters)."""
        own = self.of_each(codes)
        if not self._sizes:
            return own
        columns = np.stack([column[codes[:, index]] for index, column in self._sizes], axis=1)
        total = columns.sum(axis=1, keepdims=True)
        return np.concatenate([own, np.sqrt(len(self._sizes) - 2) * columns, total], axis=1)

    def of_each(self, codes: NDArray[np.integer]) -> Floats:
        """Return the coordinates that belong to one parameter each."""
        columns = [table[codes[:, index]] for index, table in self._tables]
        return np.concatenate(columns, axis=1) if columns else np.zeros((len(codes), 0))


def _tables(values: Sequence[Value]) -> list[Floats]:
    """Return the coordinates of each value, one table per group, of shape (values, coordinates of the group)."""
    count = len(values)
    if count < 2:
        return []
    if count == 2:
        return [np.array([[0.0], [1.0]])]
    ordinals = positions(values)
    if ordinals is None or sorted(map(float, values)) == list(range(count)):
        return [_CHOICE_COORDINATE * np.eye(count)]
    logarithms = _logarithms(values)
    if logarithms is None:
        return [ordinals[:, None] / (count - 1)]
    tables = [_unit(logarithms)]
    twos = np.array([(v & -v).bit_length() - 1 if isinstance(v, int) else 0 for v in values], np.float64)
    if twos.any() and not np.array_equal(twos, logarithms):
        tables.append(_unit(twos))
    return tables


def _logarithms(values: Sequence[Value]) -> Floats | None:
    """Return the logarithm of each value if these are sizes: at least three positive numbers."""
    if len(values) < 3 or positions(values) is None:
        return None
    numbers = np.array(values, np.float64)
    return np.log2(numbers) if numbers.min() > 0 else None


def _unit(column: Floats) -> Floats:
    """Return a column scaled to 0 to 1, shape (n, 1); all 0 if it is constant."""
    shifted = column - column.min()
    return np.asarray(shifted / (shifted.max() or 1.0))[:, None]


Hyperparameters = tuple[Floats, float, Floats | None]
"""Of a kernel that is 1 at distance 0: the reciprocal length scale of each coordinate, the variance of the noise, and
if they are fitted the estimated posterior covariance of the logarithms of the length scale of each group and of the
noise, with which a later fit begins."""


def matern(squared: NDArray[Any]) -> NDArray[Any]:
    """Return the Matern-5/2 kernel of squared distances (Rasmussen and Williams, 2006, equation 4.17)."""
    reach = np.sqrt(5 * squared)
    return np.asarray((1 + reach * (1 + reach / 3)) * np.exp(-reach))


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

    ``points`` are the coordinates of the points of predictions, and ``observed`` those of the first observations, whose
    known variances are ``noise``, added to the common one.
    """

    def __init__(
        self, parameters: Hyperparameters, points: Floats, observed: Floats, noise: Floats | float = 0.0
    ) -> None:
        self._scale, self._noise, _ = parameters
        self._count = 0
        self._observed: Floats = np.zeros((0, len(self._scale)))
        self._observed_squares: Floats = np.zeros(0)
        self._factor: Floats = np.zeros((0, 0))
        self._inverse: Floats = np.zeros((0, 0))
        self._points: Singles = np.zeros((0, len(self._scale)), np.float32)
        self._squares: Singles = np.zeros(0, np.float32)
        self._explained: Singles = np.zeros(0, np.float32)
        self._whitened: Singles = np.zeros((0, 0), np.float32)
        self.observe(observed, noise)
        self.replace_points(np.zeros(0, np.int64), points)

    def replace_points(self, indices: Rows, points: Floats) -> None:
        """Replace the points of predictions with the given indices, and append the others, shape (n, coordinates)."""
        count, appended = self._count, len(points) - len(indices)
        if appended:
            indices = np.append(indices, len(self._points) + np.arange(appended))
            size = len(self._points) + appended
            self._points, self._squares = _padded(self._points, size), _padded(self._squares, size)
            self._explained, self._whitened = _padded(self._explained, size), _padded(self._whitened, size)
        scaled = (points * self._scale).astype(np.float32)
        squares = np.square(scaled).sum(axis=1)
        across = self._prior_with(scaled, squares)
        whitened = across @ self._inverse[:count, :count].astype(np.float32).T
        self._points[indices] = scaled
        self._squares[indices] = squares
        self._explained[indices] = np.square(whitened).sum(axis=1)
        self._whitened[indices, :count] = whitened

    def observe(self, points: Floats, noise: Floats | float = 0.0) -> None:
        """Add observations at points, shape (n, coordinates); several at once take little longer than one."""
        count, end = self._count, self._count + len(points)
        if end > len(self._factor):
            larger = end + _SPARE
            self._observed, self._observed_squares = (
                _padded(each, larger) for each in (self._observed, self._observed_squares)
            )
            self._factor, self._inverse = (_padded(each, larger, larger) for each in (self._factor, self._inverse))
            self._whitened = _padded(self._whitened, len(self._whitened), larger)
        scaled = points * self._scale
        squares = np.square(scaled).sum(axis=1)
        inverse = self._inverse[:count, :count]
        rows = self._prior_with(scaled, squares) @ inverse.T
        covariance = _prior_between(scaled, squares, scaled, squares) - rows @ rows.T
        covariance.flat[:: len(points) + 1] = np.maximum(np.diag(covariance) + self._noise + noise, _MIN_VARIANCE)
        factor = np.linalg.cholesky(covariance)
        lapack, _ = load_scipy()
        unwhitened = np.tril(lapack.dtrtri(factor, lower=1)[0])
        self._factor[count:end, :count] = rows
        self._factor[count:end, count:end] = factor
        self._inverse[count:end, :count] = -unwhitened @ (rows @ inverse)
        self._inverse[count:end, count:end] = unwhitened
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
        """Return the means of targets, shape (targets, points), and the standard deviation of the first at each point.

        The targets have shape (targets, observations); ``known`` tells of which observations they are known.
        """
        # solve L x = targets, with x = 0 for unknown targets, which are as expected
        solved = np.zeros_like(targets)
        first = int(np.argmin(known)) if not known.all() else len(known)  # unknown targets are mostly the newest
        inverse = self._inverse[:first, :first]
        for each, target in zip(solved, targets, strict=True):  # faster than one product of matrices
            each[:first] = inverse @ target[:first]
        for index in first + np.flatnonzero(known[first:]):
            expected = solved[:, :index] @ self._factor[index, :index]
            solved[:, index] = (targets[:, index] - expected) / self._factor[index, index]
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

    def among(self, indices: Rows) -> Callable[[int], Floats]:
        """Return a function for some of the points, by their indices, that is valid until the next observation.

        It returns the share of the variance at each of these points, shape (points,), that an observation at one of
        them, by its index among them, would explain.
        """
        points, squares = self._points[indices], self._squares[indices]
        whitened = self._whitened[indices, : self._count]
        variance = np.maximum(1 - self._explained[indices], np.float32(_MIN_VARIANCE))
        noise = np.float32(self._noise)

        def explained_by(index: int) -> Floats:
            squared = squares + squares[index] - 2 * (points @ points[index])
            covariance = matern(np.maximum(squared, 0)) - whitened @ whitened[index]
            shares = np.square(covariance) / (variance * (variance[index] + noise))
            return np.asarray(np.minimum(shares, 1.0), np.float64)

        return explained_by


def _padded(array: NDArray[Any], *shape: int) -> NDArray[Any]:
    larger = np.zeros((*shape, *array.shape[len(shape) :]), array.dtype)
    larger[tuple(slice(size) for size in array.shape)] = array
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
    """Return the logarithm of the expected improvement of normal values over the lowest so far (Ament et al., 2023)."""
    standard = (best - mean) / deviation
    near = np.maximum(standard, _TAIL)
    _, special = load_scipy()
    logarithm = np.log(near * special.ndtr(near) + np.exp(-0.5 * near * near) / np.sqrt(2 * np.pi))
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
_TOLERANCE = 1e-3
"""Decrease of the negative log posterior density below which an optimiser step is not worth its time."""

_SUFFICIENT_DECREASE = 1e-4
_STEPS = tuple(0.5**halvings for halvings in range(10))
_MIN_CURVATURE = 1e-9


def fit(
    points: Floats,
    targets: Floats,
    groups: Rows,
    noise: Floats | float = 0.0,
    *,
    start: Hyperparameters | None = None,
    max_steps: int = 30,
) -> Hyperparameters:
    """Fit the maximum a posteriori hyperparameters, with log-normal priors and the amplitude integrated out.

    The optimiser is BFGS in a box (Nocedal and Wright, 2006, algorithm 6.1). There are few variables, and the density
    takes 0.1 ms; SciPy's optimiser takes as long again for each step, and its import longer than all fits of a session.

    The targets have mean 0 and deviation 1, and known variances ``noise``, added to the fitted one. The optimiser
    starts from ``start``, of the first coordinates, else from the medians of the priors, which keep it near the
    optimum.
    """
    density, center, spread = density_of(points, targets, groups, noise)
    low, high = np.array([_LENGTH_BOUNDS] * (len(center) - 1) + [np.log(_NOISE_BOUNDS)]).T
    first = center.copy()
    inverse: Floats = np.diag(np.square(spread))  # estimate of the inverse Hessian
    if start is not None:
        scale, variance, covariance = start
        shared = groups[: len(scale)]
        first[shared] = -np.log(scale[: len(shared)])
        first[-1] = np.log(variance)
        if covariance is not None and covariance.shape == inverse.shape:
            inverse = covariance
    point = np.clip(first, low, high)
    value, gradient = density(point)
    for _ in range(max_steps):
        held = np.where(gradient > 0, point <= low, point >= high)
        direction = np.where(held, 0.0, -inverse @ np.where(held, 0.0, gradient))
        direction /= max(1.0, float(np.abs(direction / spread).max()))
        slope = float(gradient @ direction)
        if slope > -_TOLERANCE:
            break
        for step in _STEPS:
            tried = np.clip(point + step * direction, low, high)
            reached, steepness = density(tried)
            if reached <= value + _SUFFICIENT_DECREASE * step * slope:
                break
        else:
            break  # no step is an improvement
        moved, change = tried - point, steepness - gradient
        curvature = float(moved @ change)
        if curvature > _MIN_CURVATURE:
            scaled = inverse @ change
            shrunk = np.outer(scaled, moved) / curvature
            grown = (1 + float(change @ scaled) / curvature) * np.outer(moved, moved) / curvature
            inverse = inverse + grown - shrunk - shrunk.T
        point, value, gradient = tried, reached, steepness
    return np.exp(-point[:-1])[groups], float(np.exp(point[-1])) + _MIN_NOISE, inverse


Density = Callable[[Floats], tuple[float, Floats]]


def density_of(
    points: Floats, targets: Floats, groups: Rows, known_noise: Floats | float = 0.0
) -> tuple[Density, Floats, Floats]:
    """Return the negative log posterior density of log length scales and log noise, and center and spread of its prior.

    The density is a function that returns its value and its gradient. Of the symmetric matrices, only the pairs below
    the diagonal are computed.
    """
    count, group_count = len(targets), int(groups.max()) + 1
    known_noise = known_noise + _MIN_NOISE
    first, second = np.tril_indices(count, -1)
    # index of each pair in a matrix whose columns are contiguous, as LAPACK expects them
    pairs = first + count * second
    squares: Floats = np.zeros((group_count, len(first)))
    for group, column in zip(groups, points.T, strict=True):
        squares[group] += np.square(column[first] - column[second])
    length = np.log(_LENGTH) + 0.25 * np.log(group_count)
    lapack, _ = load_scipy()
    center: Floats = np.append(np.full(group_count, length), np.log(_NOISE))
    spread: Floats = np.append(np.full(group_count, _LENGTH_SPREAD), _NOISE_SPREAD)

    def density(logarithms: Floats) -> tuple[float, Floats]:
        weights, noise = np.exp(-2 * logarithms[:-1]), float(np.exp(logarithms[-1]))
        reach = np.sqrt(5 * weights @ squares)
        decay = np.exp(-reach)
        covariance: Floats = np.zeros(count**2)
        covariance[pairs] = (1 + reach * (1 + reach / 3)) * decay
        covariance[:: count + 1] = 1 + noise + known_noise
        factor, fault = lapack.dpotrf(covariance.reshape(count, count).T, lower=1, clean=0, overwrite_a=1)
        if fault:
            raise np.linalg.LinAlgError("the covariance is not positive definite")
        determinant = np.log(np.diag(factor)).sum()
        solved, _ = lapack.dpotrs(factor, targets, lower=1)
        inverse, _ = lapack.dpotri(factor, lower=1, overwrite_c=1)
        freedom = count + _PRIOR_TRIALS
        amplitude = (float(targets @ solved) + _PRIOR_TRIALS) / freedom
        slope = inverse.T.ravel()[pairs] - np.outer(solved / amplitude, solved).ravel()[pairs]
        # d kernel / d log length = 5/3 (1 + reach) decay * weight * square; a pair counts twice, the slope half
        by_length = (5 / 3) * weights * (squares @ (slope * (1 + reach) * decay))
        by_noise = 0.5 * noise * (np.trace(inverse) - float(solved @ solved) / amplitude)
        deviations = (logarithms - center) / spread
        value = 0.5 * freedom * np.log(amplitude) + determinant + 0.5 * (deviations @ deviations)
        return float(value), np.append(by_length, by_noise) + deviations / spread

    return density, center, spread


def informative(ascending: Rows, max_count: int) -> Rows:
    """Select at most ``max_count`` trials to fit to: half of them the best, the others evenly spaced.

    The cost of a fit grows with the cube of their number. ``ascending`` holds their indices, the best first.
    """
    if len(ascending) <= max_count:
        return np.sort(ascending)
    half = max_count // 2
    others = np.linspace(half, len(ascending) - 1, half).astype(np.int64)
    return np.sort(np.concatenate([ascending[:half], ascending[others]]))
