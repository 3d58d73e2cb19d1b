"""Optuna's samplers, restricted to the rows of a search space."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import optuna
from numpy.typing import ArrayLike, NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseGASampler, BaseSampler, CmaEsSampler, RandomSampler, TPESampler
from optuna.samplers._tpe.parzen_estimator import _ParzenEstimator
from optuna.storages import InMemoryStorage
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from autotile.search.gaussian_process import positions
from autotile.search.row_sampler import Candidates, RowSampler, quiet_optuna
from autotile.space.search_space import SearchSpace


class _Choices(CategoricalDistribution):
    """Choices that are compared by identity first.

    Optuna compares the distributions of all trials with each other, choice by choice, which would cost more than the
    sampling itself.
    """

    def __eq__(self, other: object) -> bool:
        return self is other or super().__eq__(other)

    __hash__ = CategoricalDistribution.__hash__


_KEEPS_STATE_IN_TRIALS = (BaseGASampler, CmaEsSampler)
"""Samplers that mark the trials they draw for with a generation, and learn from no others: they must draw once for
every trial, even if the draw is discarded."""


class FeasibleSampler(RowSampler):
    """Wraps an Optuna sampler so that it proposes only rows of a search space, each at most once.

    The wrapped sampler draws until a draw is a free row; after ``draws`` draws, the free row nearest to the last one is
    proposed. Each proposal has a new wrapped sampler, seeded by the seed and the number of trials. It sees a private
    study with the rows that were tried, so that it learns from these and not from its draws, with an integer for each
    value, since some samplers cannot handle choices (CMA-ES) or ignore their order. These integers are choices, or
    ``ordered`` as each parameter's values are.

    ``inner`` is the constructor of the wrapped sampler, None for TPE over the free rows. It is used when ``startup``
    trials have ended, at least one of them successfully. Until then, rows are drawn uniformly: without trials the
    wrapped sampler would draw uniformly from all combinations, and the rows nearest to these are not uniform. A draw
    takes a millisecond or more.
    """

    def __init__(
        self,
        space: SearchSpace,
        seed: int,
        available: ArrayLike | None = None,
        *,
        inner: Callable[..., BaseSampler] | None = None,
        startup: int = 10,
        draws: int = 8,
        ordered: bool = False,
    ) -> None:
        super().__init__(space, seed, available)
        self._inner, self._startup, self._draws = inner or partial(_tpe_over_rows, self.candidates), startup, draws
        self._storage = InMemoryStorage()
        self._private: Study | None = None
        """The private study."""
        self._proxies: dict[int, Trial] = {}
        """The open trials of the private study, by the number of the trial that each stands for."""
        self._axes: list[tuple[int, str, NDArray[np.int64], BaseDistribution]] = []
        """Index, name, integer of each code and distribution of each parameter with at least two values."""
        for index, parameter in enumerate(space.parameters):
            last = len(parameter.values) - 1
            if last > 0:
                ordinals = positions(parameter.values) if ordered else None
                distribution = IntDistribution(0, last) if ordered else _Choices(range(last + 1))
                of_code = np.arange(last + 1) if ordinals is None else ordinals
                self._axes.append((index, parameter.name, of_code, distribution))
        self._ended = 0
        self._succeeded = 0

    def _choose(self, study: Study, number: int, rng: np.random.Generator) -> int:
        proxy = self._open_proxy(study, number, rng)
        if self._ended < self._startup or not self._succeeded:
            row = self.candidates.uniform(rng)
        else:
            for _ in range(self._draws):
                codes = self._draw(proxy)
                row = int(self.candidates.free_rows_of(codes[None])[0])
                if row >= 0:
                    break
            else:
                row = self.candidates.nearest(codes, rng)
        self._set_row(proxy, row)
        return row

    def _adopt(self, study: Study, number: int, row: int, rng: np.random.Generator) -> None:
        self._set_row(self._open_proxy(study, number, rng), row)

    def _learn(self, trial: FrozenTrial, row: int) -> None:
        proxy = self._proxies.pop(trial.number)
        for name, violation in trial.constraints.items():
            proxy.set_constraint(name, violation)
        with quiet_optuna():
            proxy.study.tell(proxy, trial.values if trial.state is TrialState.COMPLETE else None, trial.state)
        if trial.state is not TrialState.FAIL:
            self._ended += 1
            self._succeeded += all(violation <= 0 for violation in trial.constraints.values())

    def _open_proxy(self, study: Study, number: int, rng: np.random.Generator) -> Trial:
        """Open the proxy of a trial, for which a new wrapped sampler draws."""
        private = self._private
        with quiet_optuna():
            if private is None:
                private = self._private = optuna.create_study(
                    storage=self._storage, directions=study.directions, sampler=RandomSampler()
                )
            private.sampler = self._inner(seed=int(rng.integers(2**31)))
        proxy = self._proxies[number] = private.ask()
        if isinstance(private.sampler, _KEEPS_STATE_IN_TRIALS):
            self._draw(proxy)
        return proxy

    def _draw(self, proxy: Trial) -> NDArray[np.int64]:
        """Draw codes for an open proxy, shape (parameters,)."""
        study, trial = proxy.study, self._storage.get_trial(proxy._trial_id)
        inner = study.sampler
        drawn = inner.sample_relative(study, trial, inner.infer_relative_search_space(study, trial))
        codes = np.zeros(len(self.candidates.space.parameters), np.int64)
        for index, name, ordinals, distribution in self._axes:
            if name not in drawn:
                drawn[name] = inner.sample_independent(study, trial, name, distribution)
            codes[index] = np.flatnonzero(ordinals == int(drawn[name]))[0]
        return codes

    def _set_row(self, proxy: Trial, row: int) -> None:
        codes = self.candidates.space.codes[row]
        for index, name, ordinals, distribution in self._axes:
            self._storage.set_trial_param(proxy._trial_id, name, float(ordinals[codes[index]]), distribution)


_BATCH = 1024
"""Number of points drawn at once, enough to contain rows if one combination in a hundred is valid."""


class RowEstimator(_ParzenEstimator):
    """Parzen estimator over a space, whose samples are free rows if any are drawn."""

    def __init__(self, *given: Any, candidates: Candidates, **named: Any) -> None:
        super().__init__(*given, **named)
        self._candidates = candidates

    def sample(self, rng: np.random.RandomState, size: int) -> dict[str, NDArray[np.float64]]:
        """Draw points, of values by parameter, shape (size,) each."""
        parameters = self._candidates.space.parameters
        index = {each.name: position for position, each in enumerate(parameters) if len(each.values) > 1}
        points = super().sample(rng, _BATCH)
        codes = np.zeros((_BATCH, len(parameters)), np.int64)
        for name, values in points.items():
            codes[:, index[name]] = values
        free = np.flatnonzero(self._candidates.free_rows_of(codes) >= 0)
        kept = free[:size] if free.size else np.arange(size)
        return {name: values[kept] for name, values in points.items()}


def _tpe_over_rows(candidates: Candidates, seed: int) -> TPESampler:
    """Return the multivariate tree-structured Parzen estimator over the rows of a space.

    TPE draws points near the good trials and proposes the point with the largest ratio of the densities of good and bad
    trials. Here the points are free rows, so that no draw is wasted on invalid or tried configurations. Trials without
    a result count as bad ones, which spreads concurrent proposals.
    """
    sampler = TPESampler(n_startup_trials=1, multivariate=True, constant_liar=True, seed=seed)
    estimator: Any = partial(RowEstimator, candidates=candidates)
    sampler._parzen_estimator_cls = estimator  # Optuna's hook for another one
    return sampler
