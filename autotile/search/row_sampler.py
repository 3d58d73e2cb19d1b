"""Samplers over the rows of a space: whole configurations, none proposed twice."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from autotile.core.model import Value
from autotile.errors import InputError
from autotile.search.gaussian_process import one_blas_thread
from autotile.search.study import distributions_of
from autotile.space.enumeration import rank
from autotile.space.search_space import SearchSpace

_SAME_DISTANCE = 1e-5
"""Distances closer than this are equal but for rounding: they are sums of float32 fractions between 0 and 1."""


class Candidates:
    """Rows of a space that are available and were not taken yet.

    Parameters
    ----------
    space
        The rows.
    available
        Rows that may be proposed at all, bool, shape (rows,); None for all.

    Raises
    ------
    ValueError
        ``available`` is not one entry a row.
    """

    def __init__(self, space: SearchSpace, available: ArrayLike | None = None) -> None:
        self.space = space
        self.free: NDArray[np.bool_] = np.ones(len(space), np.bool_)
        if available is not None:
            self.free &= np.asarray(available, np.bool_)
        self.left = int(np.count_nonzero(self.free))
        """Rows that can still be proposed."""
        self._sizes = [len(parameter.values) for parameter in space.parameters]
        self._ranks = rank(list(space.codes.T), self._sizes, len(space))
        self._distances = [_distances(parameter.values) for parameter in space.parameters]

    def take(self, row: int) -> None:
        """Never offer a row again."""
        self.left -= int(self.free[row])
        self.free[row] = False

    def give_back(self, row: int) -> None:
        """Offer a row again that was taken."""
        self.left += int(not self.free[row])
        self.free[row] = True

    def rows_of(self, codes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Row of each combination of codes, shape (n, parameters); -1 where it is invalid."""
        wanted = rank(list(codes.T), self._sizes, len(codes))
        rows = np.searchsorted(self._ranks, wanted)
        rows[rows == len(self._ranks)] = 0
        return np.where(self._ranks[rows] == wanted, rows, -1)

    def free_rows_of(self, codes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Row of each combination of codes, shape (n, parameters); -1 where it is invalid or taken."""
        rows = self.rows_of(codes)
        return np.where((rows >= 0) & self.free[rows], rows, -1)

    def first(self) -> int:
        """The first free row."""
        return int(np.argmax(self.free))

    def uniform(self, rng: np.random.Generator) -> int:
        """Any free row, each as likely."""
        return int(np.flatnonzero(self.free)[rng.integers(self.left)])

    def nearest(self, codes: NDArray[np.int64], rng: np.random.Generator) -> int:
        """The free row nearest to a combination of codes, shape (parameters,); one of them at random where they tie.

        A parameter of numbers adds the steps between the two values over the most there can be, in the order of the
        numbers, so that a doubling is one step in a list of powers of two; any other parameter adds 1 if it differs.
        """
        distance = np.where(self.free, np.float32(0), np.float32(np.inf))
        for index, code in enumerate(codes):
            distance += self._distances[index][code][self.space.codes[:, index]]
        return int(rng.choice(np.flatnonzero(distance <= distance.min() + _SAME_DISTANCE)))


def positions(values: Sequence[Value]) -> NDArray[np.int64] | None:
    """Place of each value in ascending order; None where the values are not numbers."""
    if any(isinstance(value, bool | str) for value in values):
        return None
    return np.argsort(np.argsort(np.array(values))).astype(np.int64)


def _distances(values: Sequence[Value]) -> NDArray[np.float32]:
    """Distance between any two values of a parameter, 0 to 1."""
    places = positions(values)
    if places is None:
        return 1 - np.eye(len(values), dtype=np.float32)
    steps: NDArray[np.int64] = np.abs(places[:, None] - places[None, :])
    return (steps / max(1, len(values) - 1)).astype(np.float32)


Rows = NDArray[np.int64]

WHOLE = 8192
"""Up to so many rows all are looked at."""

_UNIFORM = 4096
"""Rows from anywhere, so that no region is out of reach."""

_MUTANTS = 8192
"""Changes of the best that are tried; those that are rows are looked at."""

_MOST_CHANGES = 3
"""Parameters that a change alters at most."""

_NEIGHBOURED = 3
"""Best rows of which every row that differs in one parameter is looked at."""


def rows_to_look_at(candidates: Candidates, best: Rows, rng: np.random.Generator) -> Rows:
    """Every row of a small space; of a large one those near the best and some from anywhere, in ascending order.

    Parameters
    ----------
    candidates
        The space.
    best
        Best rows, the best first; at least one.
    rng
        Draws the rows.
    """
    count = len(candidates.space)
    if count <= WHOLE:
        return np.arange(count)
    codes = candidates.space.codes[best].astype(np.int64)
    sizes = np.array([len(parameter.values) for parameter in candidates.space.parameters])
    near = candidates.rows_of(np.concatenate([_neighbours(codes[:_NEIGHBOURED], sizes), _mutants(codes, sizes, rng)]))
    return np.unique(np.concatenate([near[near >= 0], rng.integers(count, size=_UNIFORM)]))


def _neighbours(codes: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Every combination that differs from one of these in at most one parameter."""
    found = []
    for index, size in enumerate(sizes):
        changed = np.repeat(codes, size, axis=0)
        changed[:, index] = np.tile(np.arange(size), len(codes))
        found.append(changed)
    return np.concatenate(found)


def _mutants(codes: NDArray[np.int64], sizes: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Combinations that differ from these in a few parameters, each drawn alike."""
    changed = codes[np.arange(_MUTANTS) % len(codes)]
    changes = rng.integers(1, _MOST_CHANGES + 1, size=_MUTANTS)
    for step in range(_MOST_CHANGES):
        mutants = np.flatnonzero(changes > step)
        index = rng.integers(len(sizes), size=len(mutants))
        changed[mutants, index] = rng.integers(sizes[index])
    return changed


class RowSampler(BaseSampler):
    """An Optuna sampler that proposes rows of a search space, each at most once.

    What it proposes depends on the seed and on the study's trials and on nothing else: a study that is built again
    from its finished trials goes on as it would have gone on. One instance serves one study. The study's loop ends
    when no row is left.

    Parameters
    ----------
    space
        The configurations; the study's parameters are suggested with `distributions_of` its parameters.
    seed
        Makes the proposals repeatable; not negative.
    available
        Rows that may be proposed at all, bool, shape (rows,); None for all.

    Raises
    ------
    InputError
        The seed is negative.
    """

    expected_gain: float | None = None
    """By how much of itself the best speed was expected to rise with the trial that was proposed last, 0.01 for 1 %;
    None where no model was asked."""

    def __init__(self, space: SearchSpace, seed: int, available: ArrayLike | None = None) -> None:
        if seed < 0:
            raise InputError(f"the seed is {seed}, expected 0 or more")
        self.candidates = Candidates(space, available)
        self._distributions = distributions_of(space.parameters)
        self._seed = seed
        self._lock = Lock()
        self._begun = 0
        self._seen = 0
        self._open: dict[int, int | None] = {}
        """Rows of the trials that had not ended when last seen; None while a trial's parameters are not all set."""

    @abstractmethod
    def _choose(self, study: Study, number: int, rng: np.random.Generator) -> int:
        """Choose a free row for the trial of that number."""

    def _adopt(self, study: Study, number: int, row: int, rng: np.random.Generator) -> None:
        """Learn that a trial began with a row that was chosen elsewhere."""

    def _learn(self, trial: FrozenTrial) -> None:
        """Learn how a trial of this space ended."""

    def left(self, study: Study) -> int:
        """Rows that can still be proposed in a study."""
        with self._lock:
            self._observe(study)
            return self.candidates.left

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Every parameter of the space: a configuration is chosen as a whole."""
        return dict(self._distributions)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Choose a row.

        Raises
        ------
        InputError
            Every row was proposed.
        """
        with self._lock, one_blas_thread():
            self._observe(study, trial.number)
            if not self.candidates.left:
                raise InputError("every configuration of the space was tried; there is nothing left to propose")
            row = self._choose(study, trial.number, self._next_rng())
            self._begin(trial.number, row)
        return self.candidates.space.config(row)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Refuse a parameter that the space does not have.

        Raises
        ------
        InputError
            Always.
        """
        known = ", ".join(self._distributions)
        raise InputError(f"{param_name!r} is not a parameter of the space that is searched; it has {known}")

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        """End the study's loop when no row is left."""
        if not self.left(study):
            with suppress(RuntimeError):  # raised where trials are asked and told, outside any loop
                study.stop()

    def _observe(self, study: Study, current: int | None = None) -> None:
        """Take note of the trials that began or ended since the last look."""
        trials = study.get_trials(deepcopy=False)
        for number in [*self._open, *range(self._seen, len(trials))]:
            if number != current:
                self._look_at(study, trials[number])
        self._seen = len(trials)

    def _look_at(self, study: Study, trial: FrozenTrial) -> None:
        row = self._open.pop(trial.number, None)
        if row is None:
            row = self.candidates.space.row_of(trial.params)
            if row is not None:
                self._adopt(study, trial.number, row, self._next_rng())
                self._begin(trial.number, row)
        if not trial.state.is_finished():
            self._open[trial.number] = row
        elif row is not None:
            self._open.pop(trial.number, None)
            self._learn(trial)

    def _begin(self, number: int, row: int) -> None:
        self.candidates.take(row)
        self._open[number] = row
        self._begun += 1

    def _next_rng(self) -> np.random.Generator:
        return np.random.default_rng((self._seed, self._begun))


class RankingSampler(RowSampler):
    """A sampler that says which of many candidates that were compiled to measure.

    What is nominated is not proposed again and begins no trial. It may be measured later or never: the study learns of
    it when it holds a trial with that row.
    """

    @abstractmethod
    def nominate(self, study: Study, row: int | None = None) -> int:
        """Choose a free row to compile, or take note that this one was chosen."""

    @abstractmethod
    def describe(self, row: int, features: NDArray[np.float64]) -> None:
        """Learn what a row uses now that it is compiled, see `autotile.search.embedding.features_of`."""

    @abstractmethod
    def prefer(self, study: Study, rows: Sequence[int]) -> int:
        """Which of the rows, at least one, to measure; the oldest nomination is the first."""


class UniformSampler(RowSampler):
    """Any row that is left, each as likely: nothing is drawn that would have to be rejected."""

    def _choose(self, study: Study, number: int, rng: np.random.Generator) -> int:
        return self.candidates.uniform(rng)


class InOrderSampler(RowSampler):
    """Every row, from the first to the last."""

    def _choose(self, study: Study, number: int, rng: np.random.Generator) -> int:
        return self.candidates.first()
