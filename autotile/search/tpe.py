"""Optuna's TPE with candidates that are rows of the space to begin with."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from optuna.samplers import TPESampler
from optuna.samplers._tpe.parzen_estimator import _ParzenEstimator

from autotile.ground.space import SearchSpace
from autotile.search.candidates import Candidates
from autotile.search.feasible import FeasibleSampler

_BATCH = 1024
"""Points drawn at once; where one combination in a hundred is valid, some rows are among them."""

_DRAWS = 2
"""Batches drawn before the row nearest to a point is taken instead."""


class FeasibleTPESampler(FeasibleSampler):
    """The multivariate tree-structured Parzen estimator over the rows of a space.

    TPE draws points where good trials lie and proposes the one that is likeliest to be good rather than bad. Here
    the points that are compared are free rows, so that neither the comparison nor the draw is wasted on others.
    Proposals that have no result yet count as bad ones, which keeps those made at the same time apart.

    Parameters
    ----------
    space, seed, available
        As for `FeasibleSampler`.
    """

    def __init__(self, space: SearchSpace, seed: int, available: ArrayLike | None = None) -> None:
        super().__init__(space, self._tpe, seed, available=available, draws=_DRAWS)
        self._estimator = _estimator_over(self.candidates)

    def _tpe(self, seed: int) -> TPESampler:
        sampler = TPESampler(n_startup_trials=1, multivariate=True, constant_liar=True, seed=seed)
        sampler._parzen_estimator_cls = self._estimator  # where Optuna lets its estimator be replaced
        return sampler


def _estimator_over(candidates: Candidates) -> type[_ParzenEstimator]:
    """A Parzen estimator whose samples are free rows, where it finds any."""
    index = {
        parameter.name: position
        for position, parameter in enumerate(candidates.space.parameters)
        if len(parameter.values) > 1
    }

    class RowEstimator(_ParzenEstimator):
        def sample(self, rng: np.random.RandomState, size: int) -> dict[str, NDArray[np.float64]]:
            if self._search_space.keys() != index.keys():
                return super().sample(rng, size)
            points = super().sample(rng, _BATCH)
            codes = np.zeros((_BATCH, len(candidates.space.parameters)), np.int64)
            for name, values in points.items():
                codes[:, index[name]] = values
            free = np.flatnonzero(candidates.free_rows_of(codes) >= 0)
            kept = free[:size] if free.size else np.arange(size)
            return {name: values[kept] for name, values in points.items()}

    return RowEstimator
