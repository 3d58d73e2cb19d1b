"""What all samplers over the rows of a space share: whole configurations, none of them twice."""

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

from autotile.ground.errors import InputError
from autotile.ground.space import SearchSpace
from autotile.search.blas import one_blas_thread
from autotile.search.candidates import Candidates
from autotile.search.study import distributions_of


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
        """Learn what a row uses now that it is compiled, see `autotile.search.compiled.features_of`."""

    @abstractmethod
    def prefer(self, study: Study, rows: Sequence[int]) -> int:
        """Which of the rows, at least one, to measure; the oldest nomination is the first."""
