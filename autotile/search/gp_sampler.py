"""Bayesian optimisation over the rows of a search space; method and comparison: docs/search.md."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from autotile.search.embedding import Embedding
from autotile.search.gaussian_process import Floats, log_expected_improvement, one_blas_thread
from autotile.search.history import History, result_of, speed_of_loss
from autotile.search.refits import STARTUP, Refits
from autotile.search.row_sampler import RankingSampler, Rows, rows_to_evaluate
from autotile.search.study import RELATIVE_ERROR
from autotile.search.surrogate import Prediction, Surrogate
from autotile.search.transfer import TransferPrior
from autotile.space.search_space import SearchSpace

_HEDGE_EVERY = 2
"""Period of the proposals that ignore the prior from other studies, which may be wrong for this space."""

_SPREAD_TURNS = range(12, 32)
"""Proposals among which those that ignore the prior are spread over the space, as the first ones without a prior are:
the results known by then lie where the prior is high."""

_PRIOR_ROWS = 512
"""Number of the best rows by the prior, which a model always evaluates."""

_SWITCH_VALUES = 2
"""Number of values of a switch, whose effect may be reversed in other studies; each value is tried early on."""

_SPREAD_DRAWS = 200
"""Number of rows drawn for each of the first proposals; the row farthest from those proposed before is taken."""

_MIN_UNEXPLAINED = 1e-4
"""Smallest share of a variance that the result of another row is assumed to leave."""

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
        Expected speeds from other studies. The search begins with the best rows by the prior, and then models the
        difference between this space and the prior.

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
        self._indices: dict[int, int] = {}
        """Index in the history of each trial of the study that has not ended, by its number."""
        self._measured: dict[int, int] = {}
        """The same of the rows that are measured and have no trial in the study yet."""
        self._told: set[int] = set()
        self._features: dict[int, Floats] = {}
        self._offered: dict[int, None] = {}
        """Rows that were proposed or nominated, in that order."""
        self._refits: dict[tuple[bool, TransferPrior | None], Refits] = {}
        self._models: dict[tuple[bool, TransferPrior | None], Surrogate] = {}
        """Model by whether it has resources as features, and by the prior that it uses."""
        self._ranking: _Ranking | None = None
        """Gains of the rows as of the last proposal."""
        self._ranked_state = (False, 0, 0)
        """What they depend on: whether there was no prior, and the trials that had begun and ended."""

    def nominate(self, study: Study, row: int | None = None) -> int:
        """Choose a free row to compile, or take note that ``row`` was chosen; return it."""
        with self._lock, one_blas_thread():
            self._observe(study)
            chosen = self._next(study, np.random.default_rng((self._seed, len(self._offered)))) if row is None else row
            self.candidates.take(chosen)
            self._offered[chosen] = None
        return chosen

    def describe(self, row: int, features: Floats) -> None:
        """Take note of the resources of a compiled row."""
        self._features[row] = features

    def begin(self, study: Study, row: int) -> None:
        """Take note that a nominated row is being measured."""
        with self._lock:
            self._observe(study)
            self._measured[row] = self._history.begin(row)

    def tell(self, study: Study, row: int, result: tuple[float, ...] | None, error: float) -> None:
        """Learn the values of a nominated row, None for a failure, and the relative standard error of the first."""
        with self._lock:
            self._observe(study)
            measured = self._measured.pop(row, None)
            self._history.end(self._history.begin(row) if measured is None else measured, result, error)
            self._told.add(row)

    def select(self, study: Study, rows: Sequence[int]) -> int:
        """Choose the compiled row to measure, by the same criterion as for proposals, with resources as features."""
        with self._lock, one_blas_thread():
            self._observe(study)
            ended = self._history.ended
            if self._starting or len(rows) == 1:
                return rows[0]
            model = self._model(study, ignore_prior=ended % _HEDGE_EVERY == 0, compiled=True)
            model.set_rows(np.array(rows))
            rng = np.random.default_rng((self._seed, ended))
            ranking = _Ranking(model, model.predict(self._history, _weights(study, rng)))
            return self._best(ranking, np.ones(len(rows), np.bool_), study, turn=ended)

    def _choose(self, study: Study, number: int, rng: np.random.Generator) -> int:
        row = self._next(study, rng)
        self._adopt(study, number, row, rng)
        return row

    def _adopt(self, study: Study, number: int, row: int, rng: np.random.Generator) -> None:
        if row in self._told:
            return
        measured = self._measured.pop(row, None)
        self._indices[number] = self._history.begin(row) if measured is None else measured
        self._offered[row] = None

    def _learn(self, trial: FrozenTrial) -> None:
        index = self._indices.pop(trial.number, None)
        if index is not None and trial.state is not TrialState.FAIL:
            self._history.end(index, result_of(trial), trial.user_attrs.get(RELATIVE_ERROR, 0.0))

    @property
    def _starting(self) -> bool:
        """Whether there are too few results for a model."""
        ended = self._history.ended
        return ended < STARTUP or self._history.first_success == ended

    def _next(self, study: Study, rng: np.random.Generator) -> int:
        """Return the row to propose."""
        if self._starting:
            return self._first(rng)
        turn = len(self._offered)
        ignore_prior = turn % _HEDGE_EVERY == 0
        if ignore_prior and self._prior is not None and turn in _SPREAD_TURNS:
            return self._farthest(rng)
        ranking = self._ranked(study, ignore_prior, rng)
        free = self.candidates.free[ranking.rows]
        self.expected_gain = None
        if not free.any():
            return self.candidates.uniform(rng)
        ranking.chosen = self._best(ranking, free, study, turn)
        return ranking.chosen

    def _ranked(self, study: Study, ignore_prior: bool, rng: np.random.Generator) -> _Ranking:
        """Return the gains of the rows; those of the last proposal, if no trial has begun or ended since."""
        history = self._history
        state = (ignore_prior or self._prior is None, history.begun, history.ended)
        if self._ranking is None or self._ranked_state != state or len(study.directions) > 1:
            model = self._model(study, ignore_prior=ignore_prior)
            self._ranking = _Ranking(model, model.predict(history, _weights(study, rng)))
            self._ranked_state = state
        elif self._ranking.chosen is not None:
            self._ranking.expect(self._ranking.chosen)
        return self._ranking

    def _first(self, rng: np.random.Generator) -> int:
        """Return one of the first rows: the best by the prior, with both values of each switch; else a distant one."""
        if self._prior is None:
            return self._farthest(rng)
        order = self._prior.best
        free = order[self.candidates.free[order]]
        if not len(free):
            return self._farthest(rng)
        codes = self.candidates.space.codes
        untried = [
            index
            for index, parameter in enumerate(self.candidates.space.parameters)
            if len(parameter.values) == _SWITCH_VALUES
            and all(codes[row, index] == codes[order[0], index] for row in self._offered)
        ]
        flipped = [np.argmax(codes[free, index] != codes[order[0], index]) for index in untried]
        flip = len(self._offered) % 2 == 1
        return int(free[min(flipped)]) if flipped and flip else int(free[0])

    def _farthest(self, rng: np.random.Generator) -> int:
        """Return a row far from those proposed before, so that the first results show the effect of each parameter."""
        drawn = np.array([self.candidates.uniform(rng)])
        offered = np.array(list(self._offered), np.int64)
        if not len(offered):
            return int(drawn[0])
        drawn = np.append(drawn, rng.integers(len(self.candidates.space), size=_SPREAD_DRAWS))
        drawn = drawn[self.candidates.free[drawn]]
        codes = self.candidates.space.codes
        distances = (
            self._embedding.of_each(codes[drawn])[:, None, :] - self._embedding.of_each(codes[offered])[None, :, :]
        )
        return int(drawn[np.argmax(np.square(distances).sum(axis=2).min(axis=1))])

    def _best(self, ranking: _Ranking, free: NDArray[np.bool_], study: Study, turn: int) -> int:
        """Return the row with the largest expected improvement; without progress, sometimes that of the lowest mean."""
        gain = np.where(free, ranking.gain, -np.inf)
        speed = speed_of_loss(self._history.values(self._history.ended), study.directions)
        self.expected_gain = float(np.exp(gain.max())) * speed if speed is not None else None
        if ranking.since_best >= _PATIENCE and turn % _GREEDY_EVERY == 0:
            return int(ranking.rows[np.argmin(np.where(free, ranking.mean, np.inf))])
        return int(ranking.rows[np.argmax(gain)])

    def _model(self, study: Study, *, ignore_prior: bool, compiled: bool = False) -> Surrogate:
        """Return the model with the newest hyperparameters that may be used.

        A model of ``compiled`` rows has their resources as features; its rows are set by the caller.
        """
        prior = None if ignore_prior else self._prior
        if (compiled, prior) not in self._refits:
            self._refits[compiled, prior] = Refits(
                self._points,
                self._embedding.groups,
                self._history,
                directions=study.directions,
                prior=prior,
                features=self._features if compiled else None,
            )
        fit = self._refits[compiled, prior].usable()
        model = self._models.get((compiled, prior))
        if model is None or model.fit is not fit:
            model = Surrogate(fit, self._history, directions=study.directions, prior=prior)
            if not compiled:
                model.set_rows(self._rows_to_evaluate(model))
            self._models[compiled, prior] = model
        return model

    def _rows_to_evaluate(self, model: Surrogate) -> Rows:
        rng = np.random.default_rng((self._seed, model.fit.trials))
        tried = self._history.rows(self._history.first_ended(model.fit.trials))
        rows = rows_to_evaluate(self.candidates, model.best, tried, rng)
        return rows if model.prior is None else np.union1d(rows, model.prior.best[:_PRIOR_ROWS])

    def _points(self, rows: Rows) -> Floats:
        return self._embedding.of(self.candidates.space.codes[rows])


def _weights(study: Study, rng: np.random.Generator) -> Floats:
    """Draw the weights of the objectives."""
    return rng.dirichlet(np.ones(len(study.directions)))


class _Ranking:
    """Rows with their predicted merit.

    Attributes
    ----------
    rows
        The rows, shape (n,).
    gain
        Logarithm of the expected improvement times the probability of success, shape (n,).
    mean
        Predicted loss, shape (n,).
    since_best
        Number of trials that ended since the best one.
    chosen
        Row that was proposed last; None for none.
    """

    def __init__(self, model: Surrogate, prediction: Prediction) -> None:
        self.rows = prediction.rows
        self.mean = prediction.mean
        self.since_best = prediction.since_best
        self._model = model
        self._prediction = prediction
        self._deviation = prediction.deviation
        self.gain = self._gain()
        self.chosen: int | None = None

    def expect(self, row: int) -> None:
        """Take note that the result of a row will be known: rows whose result it would tell gain less by theirs."""
        index = int(np.flatnonzero(self.rows == row)[0])
        self._deviation = self._deviation * np.sqrt(np.maximum(1 - self._model.explained_by(index), _MIN_UNEXPLAINED))
        self.gain = self._gain()

    def _gain(self) -> Floats:
        improvement = log_expected_improvement(self.mean, self._deviation, self._prediction.best)
        return np.asarray(improvement + np.log(self._prediction.success))
