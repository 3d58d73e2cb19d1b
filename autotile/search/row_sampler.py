"""Samplers over the rows of a space, which propose each configuration at most once; the baseline sampler."""

from __future__ import annotations

from functools import partial
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autotile.core.model import Trial
from autotile.errors import InputError
from autotile.search.gaussian_process import Rows, one_blas_thread, positions
from autotile.space.enumeration import rank
from autotile.space.search_space import SearchSpace

if TYPE_CHECKING:
    from autotile.search.transfer import MisleadingSource

_DISTANCE_TOLERANCE = 1e-5
"""Rounding error of a distance, a sum of float32 fractions between 0 and 1."""


class Candidates:
    """Rows of a space that are free: available, and not taken yet.

    ``free`` is a mask over the rows, shape (rows,), and ``remaining`` the number of free ones. Raise `ValueError` if
    ``available`` has another shape.
    """

    def __init__(self, space: SearchSpace, available: ArrayLike | None = None) -> None:
        self.space = space
        self.free: NDArray[np.bool_] = np.ones(len(space), np.bool_)
        if available is not None:
            self.free &= np.asarray(available, np.bool_)
        self.remaining = int(np.count_nonzero(self.free))
        self._sizes = [len(parameter.values) for parameter in space.parameters]
        self._distances: list[NDArray[np.float32]] = []
        """Distance between any two values of each parameter, 0 to 1, shape (values, values)."""
        for parameter, size in zip(space.parameters, self._sizes, strict=True):
            ordinals = positions(parameter.values)
            if ordinals is None:
                self._distances.append(1 - np.eye(size, dtype=np.float32))
            else:
                steps: Rows = np.abs(ordinals[:, None] - ordinals[None, :])
                self._distances.append((steps / max(1, size - 1)).astype(np.float32))

    def take(self, row: int) -> None:
        """Mark a row as taken."""
        self.remaining -= int(self.free[row])
        self.free[row] = False

    def release(self, row: int) -> None:
        """Mark a row as free again."""
        self.remaining += int(not self.free[row])
        self.free[row] = True

    def rows_of(self, codes: Rows) -> Rows:
        """Return the row of each combination of codes, shape (n, parameters); -1 if it is invalid."""
        wanted, ranks = rank(list(codes.T), self._sizes, len(codes)), self.space.ranks
        rows = np.searchsorted(ranks, wanted)
        rows[rows == len(ranks)] = 0
        return np.where(ranks[rows] == wanted, rows, -1)

    def free_rows_of(self, codes: Rows) -> Rows:
        """Return the row of each combination of codes, shape (n, parameters); -1 if it is invalid or taken."""
        rows = self.rows_of(codes)
        return np.where((rows >= 0) & self.free[rows], rows, -1)

    def uniform(self, rng: np.random.Generator) -> int:
        """Draw a free row uniformly."""
        return int(np.flatnonzero(self.free)[rng.integers(self.remaining)])

    def nearest(self, codes: Rows, rng: np.random.Generator) -> int:
        """Return the free row nearest to a combination of codes, shape (parameters,); ties are broken at random.

        A parameter of numbers adds the number of steps between the two values in ascending order, over the largest
        possible number, so that a doubling is one step in a list of powers of two; any other parameter adds 1 if it
        differs.
        """
        distance = np.where(self.free, np.float32(0), np.float32(np.inf))
        for index, code in enumerate(codes):
            distance += self._distances[index][code][self.space.codes[:, index]]
        return int(rng.choice(np.flatnonzero(distance <= distance.min() + _DISTANCE_TOLERANCE)))


_MAX_EVALUATED_ROWS = 4096
"""Size of the largest space of which a model evaluates every row."""

_MIN_EVALUATED_ROWS = 1024
_MAX_PAIRS = 400_000
"""Maximum number of pairs of an evaluated row and a trial, which a proposal's time is proportional to."""

_MUTANTS = 4096
"""Random changes of the best rows of a larger space; those that are valid rows are evaluated."""

_MAX_CHANGES = 3
"""Maximum number of parameters that a random change alters."""

_BEST_WITH_NEIGHBOURS = 3
"""Best rows of which all rows that differ in one parameter are evaluated."""


def rows_to_evaluate(candidates: Candidates, best: Rows, tried: Rows, rng: np.random.Generator) -> Rows:
    """Return the rows that a model evaluates, ascending: all of a small space, of a large one a sample.

    ``best`` holds the best rows, at least one, the best first, near which half of the sample are; those of ``tried``
    need not be evaluated.
    """
    count = len(candidates.space)
    limit = min(max(_MAX_PAIRS // max(1, len(tried)), _MIN_EVALUATED_ROWS), _MAX_EVALUATED_ROWS)
    if count <= limit:
        return np.arange(count)
    codes = candidates.space.codes[best].astype(np.int64)
    sizes = np.array([len(parameter.values) for parameter in candidates.space.parameters])
    neighbours = []  # all combinations that differ from one of the best few in at most one parameter
    for index, size in enumerate(sizes):
        changed = np.repeat(codes[:_BEST_WITH_NEIGHBOURS], size, axis=0)
        changed[:, index] = np.tile(np.arange(size), len(changed) // size)
        neighbours.append(changed)
    mutants = codes[np.arange(_MUTANTS) % len(codes)]  # random combinations that differ in up to three
    changes = rng.integers(1, _MAX_CHANGES + 1, size=_MUTANTS)
    for step in range(_MAX_CHANGES):
        changing = np.flatnonzero(changes > step)
        index_of_each = rng.integers(len(sizes), size=len(changing))
        mutants[changing, index_of_each] = rng.integers(sizes[index_of_each])
    evaluated = np.zeros(count, np.bool_)  # a mask takes a tenth of the time of a sorted set of rows
    for each in (np.concatenate(neighbours), mutants):
        rows, untried = candidates.rows_of(each), np.zeros(count, np.bool_)
        untried[rows[rows >= 0]] = True
        untried[tried] = False
        evaluated[rng.permutation(np.flatnonzero(untried))[: limit // 4]] = True
    evaluated[rng.integers(count, size=limit // 2)] = True
    return np.flatnonzero(evaluated)


Result = tuple[float, ...] | None
"""Values of a trial, which are minimised; None for a failure."""


_COVERAGE = 0.95
_MIN_SAMPLES_OF_COVERAGE = 6
"""Coverage of an interval of a median with at least six samples, see `autotile.core.statistics.median_interval`."""


def relative_error(trial: Trial) -> float:
    """Return the standard error of a median over the median, from the width of its interval; 0 without a measurement.

    With fewer than six samples, the interval spans all of them and covers the median with a probability of
    ``1 - 2 ** (1 - n)`` instead of 95 %.
    """
    measurement = trial.measurement
    if measurement is None:
        return 0.0
    samples = len(measurement.samples_us)
    coverage = 1 - 2.0 ** (1 - samples) if 1 < samples < _MIN_SAMPLES_OF_COVERAGE else _COVERAGE
    deviations = NormalDist().inv_cdf((1 + coverage) / 2)
    return (measurement.high_us - measurement.low_us) / (2 * deviations * measurement.time_us)


class RowSampler:
    """Proposes rows of a search space, each at most once.

    Rows are drawn uniformly from the free ones, or ``in_order`` from the first to the last; a subclass chooses them.

    Proposals depend only on the seed, the rows of the trials and what was told of them, and the order of all this: a
    sampler that is made anew, and given the same, continues as the first one would have. ``available`` is a mask over
    the rows, shape (rows,); None for all. Raise `InputError` if the seed is negative.
    """

    expected_gain: float | None = None
    """Relative gain of the best speed that was expected of the last proposal, 0.01 for 1 %; None without a model."""

    def __init__(
        self,
        space: SearchSpace,
        seed: int,
        available: ArrayLike | None = None,
        objectives: int = 1,
        *,
        in_order: bool = False,
    ) -> None:
        if seed < 0:
            raise InputError(f"the seed is {seed}, expected 0 or more")
        self.candidates = Candidates(space, available)
        self._seed, self._objectives, self._in_order = seed, objectives, in_order
        self._begun = 0

    def propose(self, row: int | None = None) -> int:
        """Choose one of the free rows for a trial that begins, or take note that ``row`` was chosen; return it."""
        rng = np.random.default_rng((self._seed, self._begun))
        with one_blas_thread():
            if row is None:
                row = self._choose(rng)
            else:
                self._adopt(row, rng)
        self.candidates.take(row)
        self._begun += 1
        return row

    def _choose(self, rng: np.random.Generator) -> int:
        """Choose a free row for the trial that begins."""
        return int(np.argmax(self.candidates.free)) if self._in_order else self.candidates.uniform(rng)

    def _adopt(self, row: int, rng: np.random.Generator) -> None:
        """Take note of a trial that begins with a row that was chosen elsewhere."""

    def tell(self, row: int, result: Result, error: float = 0.0) -> None:
        """Learn the result of a trial, and the relative standard error of its first value, 0 if it is not known."""

    def withdraw(self, row: int) -> None:
        """Take note that the result of a trial cannot be known."""
        self.tell(row, None)

    def close(self) -> None:
        """Release the resources of the sampler, which is not used again."""

    def misleading_sources(self) -> tuple[MisleadingSource, ...]:
        """Return the other studies that it ignores, as the results of this study contradict them."""
        return ()


in_order = partial(RowSampler, in_order=True)
