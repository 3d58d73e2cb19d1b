"""Samplers over the rows of a space, which propose each configuration at most once; the baseline sampler."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Lock, RLock
from typing import TYPE_CHECKING, Any

import numpy as np
import optuna
from numpy.typing import ArrayLike, NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from autotile.errors import InputError
from autotile.kernel.spec import Parameter
from autotile.search.gaussian_process import Rows, one_blas_thread, positions
from autotile.space.enumeration import rank
from autotile.space.search_space import SearchSpace

if TYPE_CHECKING:
    from autotile.search.transfer import MisleadingSource


_quiet_lock = RLock()
os.register_at_fork(before=_quiet_lock.acquire, after_in_parent=_quiet_lock.release, after_in_child=_quiet_lock.release)


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Suppress Optuna's log messages below errors, and two warnings; one thread at a time, as both are of the process.

    They say that a feature is experimental, and that CMA-ES ignores constraints; it learns of failures by their values.
    """
    with _quiet_lock, warnings.catch_warnings():
        before = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.simplefilter("ignore", ExperimentalWarning)
        warnings.filterwarnings("ignore", "Constraints have been set", UserWarning)
        try:
            yield
        finally:
            optuna.logging.set_verbosity(before)


def distributions_of(parameters: Iterable[Parameter]) -> dict[str, CategoricalDistribution]:
    """Return the values of each parameter as choices, which Optuna's plots show."""
    return {parameter.name: CategoricalDistribution(parameter.values) for parameter in parameters}


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


class RowSampler(BaseSampler):
    """An Optuna sampler that proposes rows of a search space, each at most once.

    Rows are drawn uniformly from the free ones, or ``in_order`` from the first to the last; a subclass chooses them.

    Proposals depend only on the seed and the study's trials: a study that is rebuilt from its finished trials continues
    as the original would have. One instance serves one study, which suggests the parameters with `distributions_of`,
    and whose loop ends when no row is left. ``available`` is a mask over the rows, shape (rows,); None for all. Raise
    `InputError` if the seed is negative.
    """

    expected_gain: float | None = None
    """Relative gain of the best speed that was expected of the last proposal, 0.01 for 1 %; None without a model."""

    def __init__(
        self, space: SearchSpace, seed: int, available: ArrayLike | None = None, *, in_order: bool = False
    ) -> None:
        if seed < 0:
            raise InputError(f"the seed is {seed}, expected 0 or more")
        self.candidates = Candidates(space, available)
        self._distributions = distributions_of(space.parameters)
        self._seed, self._in_order = seed, in_order
        self._lock = Lock()
        self._objectives = 1
        """Number of objectives of the study."""
        self._begun = 0
        self._seen = 0
        self._open: dict[int, int | None] = {}
        """Rows of the trials that were running when last seen; None while not all parameters of a trial are set."""

    def _choose(self, study: Study, number: int, rng: np.random.Generator) -> int:
        """Choose a free row for the trial of that number."""
        return int(np.argmax(self.candidates.free)) if self._in_order else self.candidates.uniform(rng)

    def _adopt(self, study: Study, number: int, row: int, rng: np.random.Generator) -> None:
        """Take note of a trial whose row was chosen elsewhere."""

    def _learn(self, trial: FrozenTrial, row: int) -> None:
        """Learn from a finished trial, of a row of this space."""

    def close(self) -> None:
        """Release the resources of the sampler, which is not used again."""

    def misleading_sources(self, study: Study) -> tuple[MisleadingSource, ...]:
        """Return the other studies that it ignores, as the results of this study contradict them."""
        return ()

    def remaining(self, study: Study) -> int:
        """Return the number of rows that can still be proposed in a study."""
        with self._lock:
            self._observe(study)
            return self.candidates.remaining

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return all parameters of the space: a configuration is chosen as a whole."""
        return dict(self._distributions)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Choose a row; `InputError` if none is left."""
        with self._lock, one_blas_thread():
            self._observe(study, trial.number)
            if not self.candidates.remaining:
                raise InputError("every configuration of the space was tried; there is nothing left to propose")
            row = self._choose(study, trial.number, np.random.default_rng((self._seed, self._begun)))
            self._begin(trial.number, row)
        return self.candidates.space.config(row)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Raise `InputError`, as the space does not have the parameter."""
        known = ", ".join(self._distributions)
        raise InputError(f"{param_name!r} is not a parameter of the space, which has {known}")

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        """Learn from the trials that ended before, in their order; end the study's loop when no row is left."""
        if not self.remaining(study):
            with suppress(RuntimeError):  # raised outside `optimize`, where trials are asked and told
                study.stop()

    def _observe(self, study: Study, current: int | None = None) -> None:
        """Take note of the trials that began or ended since the last call."""
        self._objectives = len(study.directions)
        trials = study.get_trials(deepcopy=False)
        known = [n for n, row in self._open.items() if row is None or trials[n].state is not TrialState.RUNNING]
        for number in [*known, *range(self._seen, len(trials))]:
            if number == current:
                continue
            trial, row = trials[number], self._open.pop(number, None)
            if row is None:
                row = self.candidates.space.row_of(trial.params)
                if row is not None:
                    self._adopt(study, number, row, np.random.default_rng((self._seed, self._begun)))
                    self._begin(number, row)
            if not trial.state.is_finished():
                self._open[number] = row
            elif row is not None:
                self._open.pop(number, None)
                self._learn(trial, row)
        self._seen = len(trials)

    def _begin(self, number: int, row: int) -> None:
        self.candidates.take(row)
        self._open[number] = row
        self._begun += 1
