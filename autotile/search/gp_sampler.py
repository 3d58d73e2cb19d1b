"""Bayesian optimisation over the rows of a search space; method and comparison: docs/search.md."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from autotile.search.embedding import CompiledPoints, Embedding
from autotile.search.gaussian_process import Floats, log_expected_improvement, one_blas_thread
from autotile.search.row_sampler import RankingSampler, Rows, rows_to_evaluate
from autotile.search.study import RELATIVE_ERROR
from autotile.search.surrogate import History, Prediction, Surrogate, result_of, speed_of_loss
from autotile.search.transfer import MisleadingSource, TransferPrior
from autotile.space.search_space import SearchSpace

_STARTUP = 6
"""Number of trials that end before a model is used."""

_PRIOR_ROWS = 512
"""Number of the best rows by the prior, which a model always evaluates."""

_SWITCH_VALUES = 2
"""Number of values of a switch, whose effect may be reversed in other studies; each value is tried early on."""

_SPREAD_DRAWS = 200
"""Number of rows drawn for each of the first proposals; the row farthest from those proposed before is taken."""

_REFIT_GROWTH = 1.1
"""Growth of the number of ended trials at which hyperparameters are fitted again."""

_SETTLED_TRIALS = 100
_SETTLED_REFIT_GROWTH = 1.25
"""The same after 100 trials: hyperparameters change little by then, and a fit takes as long as twenty proposals."""

_PATIENCE = 10
"""Number of trials without improvement after which some proposals are greedy."""

_GREEDY_EVERY = 3
"""Period of the greedy proposals: the row with the lowest mean, whatever its deviation."""


class FeasibleGPSampler(RankingSampler):
    """Proposes the row with the largest expected improvement under a Gaussian process.

    The first rows are spread over the space. After that, a process over the logarithms of the parameters, with fitted
    length scales, predicts every row of a small space; of a large one, the rows near the best ones and a uniform
    sample. The expected improvement is multiplied by the probability of success, predicted from a second target of the
    same process. Trials without a result reduce the deviation around them, which spreads concurrent proposals.

    It supports studies of any direction, and of several objectives, with random weights for each proposal.

    Parameters
    ----------
    space, seed, available
        As for `RowSampler`.
    prior
        Expected speeds from other studies. Some proposals follow it: the best rows by the prior at first, and then by a
        model of the difference between this space and the prior, fitted to all trials. The others are those of a search
        without a prior, and depend only on each other's results. A prior that misleads therefore costs no more than the
        proposals that followed it.

    Examples
    --------
    >>> import numpy as np, optuna
    >>> from autotile.space.search_space import SearchSpace
    >>> from autotile.kernel.spec import Parameter
    >>> parameters = (Parameter("BM", (16, 32, 64, 128)), Parameter("TM", (1, 2, 4, 8)))
    >>> codes = np.array([[i, j] for i in range(4) for j in range(4)], np.uint8)
    >>> space = SearchSpace(parameters, codes, combinations=16, rules=(), limits=(), seconds=0.0)
    >>> optuna.logging.set_verbosity(optuna.logging.WARNING)
    >>> study = optuna.create_study(sampler=FeasibleGPSampler(space, seed=1))
    >>> study.optimize(
    ...     lambda trial: (
    ...         abs(trial.suggest_categorical("BM", (16, 32, 64, 128)) - 64)
    ...         + abs(trial.suggest_categorical("TM", (1, 2, 4, 8)) - 4)
    ...     ),
    ...     n_trials=12,
    ... )
    >>> study.best_params
    {'BM': 64, 'TM': 4}
    """

    def __init__(
        self,
        space: SearchSpace,
        seed: int,
        available: ArrayLike | None = None,
        *,
        prior: TransferPrior | None = None,
    ) -> None:
        super().__init__(space, seed, available)
        self._prior = prior or None
        self._embedding = Embedding(space.parameters)
        self._history = History()
        self._unguided = History()
        """The trials of the proposals that did not follow the prior; all trials without one."""
        self._guided: set[int] = set()
        """Rows that were offered at a turn of the prior."""
        self._features: dict[int, Floats] = {}
        self._offered: dict[int, None] = {}
        """Rows that were proposed or nominated, in that order."""
        self._models: dict[tuple[bool, TransferPrior | None], Surrogate] = {}

    def nominate(self, study: Study, row: int | None = None) -> int:
        """Choose a free row to compile, or take note that ``row`` was chosen; return it."""
        with self._lock, one_blas_thread():
            self._observe(study)
            chosen = self._next(study, np.random.default_rng((self._seed, len(self._offered)))) if row is None else row
            self.candidates.take(chosen)
            self._offer(chosen)
        return chosen

    def describe(self, row: int, features: Floats) -> None:
        """Take note of the resources of a compiled row."""
        self._features[row] = features

    def select(self, study: Study, rows: Sequence[int]) -> int:
        """Choose the compiled row to measure, by the same criterion as for proposals, with resources as features."""
        with self._lock, one_blas_thread():
            self._observe(study)
            ended = len(self._history.results)
            guided = self._is_guided(ended)
            rows = [row for row in rows if (row in self._guided) is guided] or rows
            if self._starting(self._trials(guided)) or len(rows) == 1:
                return rows[0]
            model = self._model(study, guided=guided, compiled=True)
            model.set_rows(np.array(rows))
            rng = np.random.default_rng((self._seed, ended))
            return self._best(model.predict(self._trials(guided), _weights(study, rng)), study, turn=ended)

    def misleading_sources(self, study: Study) -> tuple[MisleadingSource, ...]:
        """Return the sources that the prior ignores, as the results of the study contradict them."""
        with self._lock:
            self._observe(study)
            return self._prior.misleading(*self._history.successes()) if self._prior is not None else ()

    def _choose(self, study: Study, number: int, rng: np.random.Generator) -> int:
        row = self._next(study, rng)
        self._adopt(study, number, row, rng)
        return row

    def _adopt(self, study: Study, number: int, row: int, rng: np.random.Generator) -> None:
        if row not in self._offered:
            if self._prior is not None and self.candidates.remaining and not self._is_guided(len(self._offered)):
                self._next(study, rng)  # to share the rows that the original choice has shared
            self._offer(row)
        self._history.begun[number] = row
        if row not in self._guided:
            self._unguided.begun[number] = row

    def _learn(self, trial: FrozenTrial) -> None:
        if trial.state is TrialState.FAIL:
            return
        for history in (self._history, self._unguided):
            if trial.number in history.begun:
                history.results[trial.number] = result_of(trial)
                history.errors[trial.number] = trial.user_attrs.get(RELATIVE_ERROR, 0.0)

    def _offer(self, row: int) -> None:
        """Take note of a row that was proposed or nominated; the turn, not its origin, decides whether it is guided."""
        if self._is_guided(len(self._offered)):
            self._guided.add(row)
        self._offered[row] = None

    def _is_guided(self, turn: int) -> bool:
        """Return whether the choice of a turn follows the prior."""
        return self._prior is not None and self._prior.leads(turn, *self._history.successes(), self._history.since_best)

    def _trials(self, guided: bool) -> History:
        return self._history if guided else self._unguided

    def _starting(self, history: History) -> bool:
        """Return whether there are too few results for a model."""
        ended = len(history.results)
        return ended < _STARTUP or history.first_success == ended

    def _next(self, study: Study, rng: np.random.Generator) -> int:
        """Return the row to propose."""
        turn = len(self._offered)
        if self._prior is None or self._is_guided(turn):
            return self._propose(study, rng, turn, guided=self._prior is not None)
        while True:  # as a search without a prior, which finds the results of the rows that it shares with the other
            turn = len(self._offered) - len(self._guided)
            row = self._propose(study, np.random.default_rng((self._seed, turn)), turn, guided=False)
            if row not in self._guided:
                return row
            self._share(row)

    def _share(self, row: int) -> None:
        """Add a guided row to those of the search without a prior, with its trial if it has begun or ended."""
        self._guided.remove(row)
        for number in [number for number, begun in self._history.begun.items() if begun == row]:
            self._unguided.begun[number] = row
            if number in self._history.results:
                self._unguided.results[number] = self._history.results[number]
                self._unguided.errors[number] = self._history.errors[number]

    def _propose(self, study: Study, rng: np.random.Generator, turn: int, *, guided: bool) -> int:
        """Return the row that the search with the prior proposes, or that without, which may be a guided row."""
        history = self._trials(guided)
        if self._starting(history):
            return self._first(rng) if guided else self._farthest(rng)
        prediction = self._model(study, guided=guided).predict(history, _weights(study, rng))
        free = self.candidates.free if guided else self._untaken
        prediction = prediction.masked(free[prediction.rows])
        self.expected_gain = None
        if not len(prediction.rows):
            return self.candidates.uniform(rng)
        return self._best(prediction, study, turn)

    @property
    def _untaken(self) -> NDArray[np.bool_]:
        """Whether each row is free for a search without a prior, shape (rows,)."""
        untaken = self.candidates.free.copy()
        untaken[list(self._guided)] = True
        return untaken

    def _first(self, rng: np.random.Generator) -> int:
        """Return one of the first rows that follow the prior: its best, with both values of each switch."""
        assert self._prior is not None
        order = self._prior.best
        free = order[self.candidates.free[order]]
        if not len(free):
            return self.candidates.uniform(rng)
        codes = self.candidates.space.codes
        untried = [
            index
            for index, parameter in enumerate(self.candidates.space.parameters)
            if len(parameter.values) == _SWITCH_VALUES
            and all(codes[row, index] == codes[order[0], index] for row in self._offered)
        ]
        flipped = [np.argmax(codes[free, index] != codes[order[0], index]) for index in untried]
        flip = len(self._guided) % 2 == 1
        return int(free[min(flipped)]) if flipped and flip else int(free[0])

    def _farthest(self, rng: np.random.Generator) -> int:
        """Return a row far from those proposed before, so that the first results show the effect of each parameter."""
        untaken = self._untaken
        drawn = np.flatnonzero(untaken)[[rng.integers(np.count_nonzero(untaken))]]
        offered = np.array([row for row in self._offered if row not in self._guided], np.int64)
        if not len(offered):
            return int(drawn[0])
        drawn = np.append(drawn, rng.integers(len(self.candidates.space), size=_SPREAD_DRAWS))
        drawn = drawn[untaken[drawn]]
        codes = self.candidates.space.codes
        distances = (
            self._embedding.of_each(codes[drawn])[:, None, :] - self._embedding.of_each(codes[offered])[None, :, :]
        )
        return int(drawn[np.argmax(np.square(distances).sum(axis=2).min(axis=1))])

    def _best(self, prediction: Prediction, study: Study, turn: int) -> int:
        """Return the row with the largest expected improvement; without progress, sometimes that of the lowest mean."""
        improvement = log_expected_improvement(prediction.mean, prediction.deviation, prediction.best)
        gain = improvement + np.log(prediction.success)
        speed = speed_of_loss(list(self._history.results.values()), study.directions)
        self.expected_gain = float(np.exp(gain.max())) * speed if speed is not None else None
        if prediction.since_best >= _PATIENCE and turn % _GREEDY_EVERY == 0:
            return int(prediction.rows[np.argmin(prediction.mean)])
        return int(prediction.rows[np.argmax(gain)])

    def _model(self, study: Study, *, guided: bool, compiled: bool = False) -> Surrogate:
        """Return the model with the hyperparameters of the last fit that was due.

        A model of ``compiled`` rows has their resources as features; its rows are set by the caller.
        """
        prior, history = self._prior if guided else None, self._trials(guided)
        due = max(_due(len(history.results)), history.first_success + 1)
        model = self._models.get((compiled, prior))
        if model is None or model.fitted != due:
            points, groups = self._points, self._embedding.groups
            if compiled:
                fitted = history.rows(history.first_ended(due))
                points = CompiledPoints(points, groups, self._features, fitted)
                groups = points.groups
            directions = study.directions
            model = Surrogate(points, groups, history, due, directions=directions, prior=prior)
            if not compiled:
                model.set_rows(self._rows_to_evaluate(model))
            self._models[compiled, prior] = model
        return model

    def _rows_to_evaluate(self, model: Surrogate) -> Rows:
        rows = rows_to_evaluate(self.candidates, model.best, np.random.default_rng((self._seed, model.fitted)))
        return rows if model.prior is None else np.union1d(rows, model.prior.best[:_PRIOR_ROWS])

    def _points(self, rows: Rows) -> Floats:
        return self._embedding.of(self.candidates.space.codes[rows])


def _weights(study: Study, rng: np.random.Generator) -> Floats:
    """Draw the weights of the objectives."""
    return rng.dirichlet(np.ones(len(study.directions)))


def _due(ended: int) -> int:
    """Return the largest number of trials up to ``ended`` at which hyperparameters are fitted."""
    due = _STARTUP
    growth = _REFIT_GROWTH
    while (after := max(due + 1, int(due * growth))) <= ended:
        due = after
        growth = _REFIT_GROWTH if due < _SETTLED_TRIALS else _SETTLED_REFIT_GROWTH
    return due
