"""Kernel Tuner's strategies as samplers: what a strategy wants timed is what is proposed."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from optuna.study import Study
from optuna.trial import FrozenTrial

from autotile.ground.errors import InputError
from autotile.ground.space import SearchSpace
from autotile.search.kernel_tuner_run import ShownSpace, StrategyRun
from autotile.search.kernel_tuner_turns import Turns
from autotile.search.row_sampler import RowSampler

_MOST_FRUITLESS = 3
"""Runs one after another that want nothing but what earlier runs wanted, after which the strategy has had its say."""


class KernelTunerSampler(RowSampler):
    """Proposes what a strategy of Kernel Tuner wants timed, over the rows of a search space only.

    The strategy runs in a thread and waits there for each time, or for those of a generation. What is known is answered
    at once, whoever proposed it. Times are told in milliseconds, a failure as an invalid configuration.

    A run that ends before the search does, as a local search does in its optimum, is followed by one with another seed:
    so does whoever has trials left. When runs find nothing new, rows are drawn uniformly.

    Where another row is asked for while the strategy waits for all that it wants, it is the one nearest to the last of
    these. What is proposed follows from the seed and the trials that ended: in a resumed session the strategy begins
    anew, and gets by what is known to where it was.

    Parameters
    ----------
    space
        The configurations.
    strategy
        Its name in Kernel Tuner.
    seed
        Makes the proposals repeatable; not negative.
    available
        Rows that may be proposed at all, bool, shape (rows,); None for all.
    trials
        Trials that are granted, by which some strategies make their schedule; None where they are not counted.

    Raises
    ------
    InputError
        The seed is negative.
    """

    def __init__(
        self,
        space: SearchSpace,
        strategy: str,
        seed: int,
        available: ArrayLike | None = None,
        trials: int | None = None,
    ) -> None:
        super().__init__(space, seed, available)
        rows: list[int] = np.flatnonzero(self.candidates.free).tolist()
        self._strategy = strategy
        self._shown = ShownSpace(space, rows)
        self._evaluations = min(trials or len(rows), len(rows))
        self._times_ms: dict[int, float | None] = {}
        """Of each row that was tried; None where it failed."""
        self._turns: Turns[list[int]] | None = None
        self._wanted: list[int] = []
        """Rows that the strategy waits for; all are known where it does not."""
        self._runs = 0
        self._fruitless = 0
        self._asked: set[int] = set()
        """Rows that the runs that ended wanted."""

    def _choose(self, study: Study, number: int, rng: np.random.Generator) -> int:
        while self._fruitless < _MOST_FRUITLESS and all(row in self._times_ms for row in self._wanted):
            self._go_on()
        for row in self._wanted:
            if self.candidates.free[row]:
                return row
        if self._wanted:
            return self.candidates.nearest(self.candidates.space.codes[self._wanted[-1]], rng)
        return self.candidates.uniform(rng)

    def _learn(self, trial: FrozenTrial) -> None:
        row = self.candidates.space.row_of(trial.params)
        assert row is not None
        time_us = trial.value
        worked = all(violation <= 0 for violation in trial.constraints.values())
        self._times_ms[row] = 1e-3 * time_us if worked and time_us is not None else None

    def _go_on(self) -> None:
        """Let the strategy run until it wants something that is not known, or ends."""
        if self._turns is None:
            seed = int(np.random.SeedSequence((self._seed, self._runs)).generate_state(1)[0])
            self._run = StrategyRun(self._strategy, self._shown, self._times_ms, self._evaluations, seed)
            self._turns = Turns(self._run, seed)
        self._wanted = self._turns.next() or []
        if not self._wanted:
            self._end_run(self._turns.failure)
            self._turns = None

    def _end_run(self, failure: str) -> None:
        if failure and not self._asked and not self._run.asked:
            raise InputError(
                f"Kernel Tuner's strategy {self._strategy} cannot search these {len(self._shown.rows)} configurations "
                f"({failure}); choose another sampler"
            )
        self._runs += 1
        self._fruitless = 0 if self._run.asked - self._asked else self._fruitless + 1
        self._asked |= self._run.asked
