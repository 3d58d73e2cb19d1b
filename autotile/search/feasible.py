"""Any Optuna sampler, over the rows of a search space only."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike
from optuna.samplers import BaseGASampler, BaseSampler, CmaEsSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from autotile.ground.space import SearchSpace
from autotile.search.mirror import Mirror
from autotile.search.quiet import quiet_optuna
from autotile.search.row_sampler import RowSampler

_KEEPS_STATE_IN_TRIALS = (BaseGASampler, CmaEsSampler)
"""Samplers that mark the trials they draw for with a generation, and learn from no others: they draw once for every
trial, whether the draw counts or not."""


class FeasibleSampler(RowSampler):
    """Wraps an Optuna sampler so that it proposes only rows of a search space, each at most once.

    The wrapped sampler draws until a draw is a row that was not tried; after ``draws`` of them the row nearest to
    the last one is taken. It is made anew for each proposal, from the seed and the number of trials, and sees a
    private study with the rows that were really tried, so that it learns from what happened and not from what it
    drew.

    Parameters
    ----------
    space
        The configurations.
    inner
        Makes the wrapped sampler; called as ``inner(seed=...)``. A sampler's class will do.
    seed
        Makes the proposals repeatable.
    available
        Rows that may be proposed at all, bool, shape (rows,); None for all.
    startup
        So many trials are to end, one of them well, before the wrapped sampler's draws count; rows are drawn
        uniformly until then. A sampler that knows nothing draws uniformly from all combinations, and the rows nearest
        to those are not uniform.
    draws
        Draws before the nearest row is taken; each costs a millisecond or more.
    ordered
        Show the wrapped sampler integers in the order of each parameter's values instead of choices.

    Examples
    --------
    >>> import numpy as np, optuna
    >>> from autotile.ground.space import SearchSpace
    >>> from autotile.ground.spec import Parameter
    >>> parameters = (Parameter("BM", (32, 64, 128)), Parameter("TM", (4, 8)))
    >>> codes = np.array([[0, 0], [1, 0], [1, 1], [2, 1]], np.uint8)  # four of the six combinations are valid
    >>> space = SearchSpace(parameters, codes, combinations=6, rules=(), limits=(), seconds=0.0)
    >>> sampler = FeasibleSampler(space, optuna.samplers.NSGAIISampler, seed=1)
    >>> optuna.logging.set_verbosity(optuna.logging.WARNING)
    >>> study = optuna.create_study(sampler=sampler)
    >>> study.optimize(
    ...     lambda trial: trial.suggest_categorical("BM", (32, 64, 128)) * trial.suggest_categorical("TM", (4, 8))
    ... )
    >>> len(study.trials), study.best_params
    (4, {'BM': 32, 'TM': 4})
    """

    def __init__(
        self,
        space: SearchSpace,
        inner: Callable[..., BaseSampler],
        seed: int,
        *,
        available: ArrayLike | None = None,
        startup: int = 10,
        draws: int = 8,
        ordered: bool = False,
    ) -> None:
        super().__init__(space, seed, available)
        self._inner = inner
        self._startup = startup
        self._draws = draws
        self._ordered = ordered
        self._mirror: Mirror | None = None
        self._ended = 0
        self._ended_well = 0

    def _choose(self, study: Study, number: int, rng: np.random.Generator) -> int:
        mirror = self._open_mirror(study, number, rng)
        row = self._draw(mirror, number, rng)
        mirror.place(number, self.candidates.space.codes[row])
        return row

    def _adopt(self, study: Study, number: int, row: int, rng: np.random.Generator) -> None:
        self._open_mirror(study, number, rng).place(number, self.candidates.space.codes[row])

    def _learn(self, trial: FrozenTrial) -> None:
        assert self._mirror is not None
        self._mirror.end(trial)
        if trial.state is not TrialState.FAIL:
            self._ended += 1
            self._ended_well += all(violation <= 0 for violation in trial.constraints.values())

    def _open_mirror(self, study: Study, number: int, rng: np.random.Generator) -> Mirror:
        if self._mirror is None:
            self._mirror = Mirror(self.candidates.space.parameters, study.directions, self._ordered)
        with quiet_optuna():
            inner = self._inner(seed=int(rng.integers(2**31)))
        self._mirror.begin(number, inner)
        if isinstance(inner, _KEEPS_STATE_IN_TRIALS):
            self._mirror.draw(number)
        return self._mirror

    def _draw(self, mirror: Mirror, number: int, rng: np.random.Generator) -> int:
        if self._ended < self._startup or not self._ended_well:
            return self.candidates.uniform(rng)
        for _ in range(self._draws):
            codes = mirror.draw(number)
            row = int(self.candidates.free_rows_of(codes[None])[0])
            if row >= 0:
                return row
        return self.candidates.nearest(codes, rng)
