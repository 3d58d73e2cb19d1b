"""Bayesian optimisation over the rows of a search space; method and comparison: docs/search.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import ArrayLike, NDArray
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from autotile.search.embedding import Embedding, Rows
from autotile.search.gaussian_process import Floats, Posterior, log_expected_improvement, one_blas_thread
from autotile.search.history import History, Result, result_of
from autotile.search.row_sampler import RankingSampler, rows_to_evaluate
from autotile.search.study import RELATIVE_ERROR
from autotile.search.surrogate import STARTUP, Prediction, Refits, Surrogate
from autotile.search.transfer import EstimatedSpeeds, ExpectedSpeeds, MisleadingSource, TransferPrior
from autotile.space.search_space import SearchSpace

_RANKED_ROWS = 256
"""Number of rows, the best by their gain and by their mean, that the proposals between two results choose among."""

_MIN_UNEXPLAINED = 1e-4
"""Smallest share of a variance that the result of another row is assumed to leave."""


class Ranking:
    """The best of the rows that a model predicts, with their predicted merit.

    The results of chosen rows only lower the gains of others, so that the rows that are not among the best at first do
    not become so before a trial begins or ends, or too late to matter.

    Parameters
    ----------
    model, prediction
        The model, and its prediction.
    free
        Whether each row may be chosen, shape (rows,).

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
    speed
        See `Prediction`.
    chosen
        Row that was proposed last; None for none.
    """

    def __init__(self, model: Surrogate, prediction: Prediction, free: NDArray[np.bool_]) -> None:
        self.speed = prediction.speed
        self.since_best = prediction.since_best
        self.chosen: int | None = None
        self._model = model
        self._posterior: Posterior | None = None
        self._best = prediction.best
        success = np.log(prediction.success)
        gain = log_expected_improvement(prediction.mean, prediction.deviation, prediction.best) + success
        kept = _best_of(np.where(free, gain, -np.inf), np.where(free, -prediction.mean, -np.inf))
        self._kept = kept
        self.rows = prediction.rows[kept]
        self.mean = prediction.mean[kept]
        self.gain = gain[kept]
        self._deviation = prediction.deviation[kept]
        self._success = success[kept]

    def expect(self, row: int) -> None:
        """Take note that the result of a row will be known: rows whose result it would tell gain less by theirs."""
        index = int(np.flatnonzero(self.rows == row)[0])
        if self._posterior is None:
            self._posterior = self._model.among(self._kept)
        unexplained = np.maximum(1 - self._posterior.explained_by(index), _MIN_UNEXPLAINED)
        self._deviation = self._deviation * np.sqrt(unexplained)
        self.gain = log_expected_improvement(self.mean, self._deviation, self._best) + self._success


@dataclass(slots=True)
class Selection:
    """Rows that are chosen among the same compiled ones, without a result in between: as many as GPUs are free.

    The model is updated once for all of them. What has compiled since is left for the next result.
    """

    ended: int
    """Number of trials that had ended."""
    ranking: Ranking
    count: int = 0
    """Number of rows that were chosen."""

    def holds(self, rows: Sequence[int]) -> bool:
        """Return whether one of these rows is among the ranked ones."""
        return bool(np.isin(self.ranking.rows, rows).any())


def _best_of(*merits: Floats) -> NDArray[np.int64]:
    """Return the indices, ascending, of the highest of each merit."""
    if len(merits[0]) <= _RANKED_ROWS:
        return np.arange(len(merits[0]))
    return np.unique([np.argpartition(-merit, _RANKED_ROWS // 2)[: _RANKED_ROWS // 2] for merit in merits])


_PRIOR_ROWS = 512
"""Number of the best rows by the prior, which a model always evaluates."""

_SWITCH_VALUES = 2
"""Number of values of a switch, whose effect may be reversed in other studies; each value is tried early on."""

_ESTIMATED_TRIALS = 12
"""Number of trials after which an estimate is not used: by then the results say more than it does."""

_SPREAD_DRAWS = 200
"""Number of rows drawn for each of the first proposals; the row farthest from those proposed before is taken."""

_MAX_EMBEDDED_ROWS = 1 << 16
"""Number of rows of the largest space of which the coordinates are kept, some 10 MB."""

_MAX_TRIALS = 256
_MAX_COMPILED = 128
"""Maximum numbers of the trials before the last fit that the model of all rows and that of compiled rows use."""

_PATIENCE = 10
"""Number of trials without improvement after which some proposals are greedy."""

_GREEDY_EVERY = 3
"""Period of the greedy proposals: the row with the lowest mean, whatever its deviation."""


Draws = Callable[[], np.random.Generator]
"""Makes the generator of random numbers of one choice."""


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
    estimate
        Speeds by estimated times, used unless there is a prior: half of the first rows are the best by them, and
        they are the mean of the model, with a fitted slope, until twelve trials have ended.

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
        estimate: EstimatedSpeeds | None = None,
    ) -> None:
        super().__init__(space, seed, available)
        self._prior = prior or None
        self._estimate = estimate if self._prior is None else None
        self._embedding = Embedding(space.parameters)
        self._embedded: Floats | None = None
        """Coordinates of all rows of a small space, since looking them up is faster."""
        self._history = History()
        self._indices: dict[int, int] = {}
        """Index in the history of each trial of the study that has not ended, by its number."""
        self._measured: dict[int, int] = {}
        """The same of the rows that are measured and have no trial in the study yet."""
        self._told: set[int] = set()
        self._unguided = _Unguided() if self._prior is not None else None
        """The part of the history that proposals beside the prior depend on; None without a prior, where it is all."""
        self._guided: set[int] = set()
        """Rows that were offered at a turn of the prior."""
        self._features: dict[int, Floats] = {}
        self._offered: dict[int, None] = {}
        """Rows that were proposed or nominated, in that order."""
        self._refits: dict[tuple[bool, ExpectedSpeeds | None], Refits] = {}
        self._models: dict[tuple[bool, ExpectedSpeeds | None], Surrogate] = {}
        """Model by whether it has resources as features, and by the prior that it uses."""
        self._selections: dict[bool, Selection] = {}
        """The newest selection among compiled rows, by whether it follows the prior."""
        self._rankings: dict[bool, tuple[tuple[int, int], Ranking]] = {}
        """Gains of the rows as of the last proposal, by whether it followed the prior, after the numbers of trials that
        they depend on: those that had begun and ended."""

    def nominate(self, study: Study, row: int | None = None) -> int:
        """Choose a free row to compile, or take note that ``row`` was chosen; return it."""
        with self._lock, one_blas_thread():
            chosen = self._next(study, self._draws(len(self._offered))) if row is None else row
            self.candidates.take(chosen)
            self._offer(chosen)
        return chosen

    def describe(self, row: int, features: Floats) -> None:
        """Take note of the resources of a compiled row."""
        self._features[row] = features

    def begin(self, study: Study, row: int) -> None:
        """Take note that a nominated row is being measured."""
        with self._lock:
            self._measured[row] = self._record_begin(row)

    def tell(self, study: Study, row: int, result: tuple[float, ...] | None, error: float) -> None:
        """Learn the values of a nominated row, None for a failure, and the relative standard error of the first."""
        with self._lock:
            measured = self._measured.pop(row, None)
            self._record_end(self._record_begin(row) if measured is None else measured, row, result, error)
            self._told.add(row)

    def select(self, study: Study, rows: Sequence[int]) -> int:
        """Choose the compiled row to measure, by the same criterion as for proposals, with resources as features."""
        with self._lock, one_blas_thread():
            ended = self._history.ended
            guided = self._is_guided(ended)
            rows = [row for row in rows if (row in self._guided) is guided] or rows
            history = self._trials(guided)
            if _is_starting(history) or len(rows) == 1:
                return rows[0]
            selection = self._selections.get(guided)
            if selection is None or selection.ended != ended or len(study.directions) > 1 or not selection.holds(rows):
                model = self._model(study, guided=guided, compiled=True)
                model.set_rows(np.array(rows))
                prediction = model.predict(history, _weights(study, self._draws(ended)))
                ranking = Ranking(model, prediction, np.ones(len(rows), np.bool_))
                selection = self._selections[guided] = Selection(ended, ranking)
            return self._best_of_compiled(selection, rows)

    def _best_of_compiled(self, selection: Selection, rows: Sequence[int]) -> int:
        """Choose another row of a selection."""
        ranking = selection.ranking
        free = np.ones(len(ranking.rows), np.bool_)
        if ranking.chosen is not None:
            ranking.expect(ranking.chosen)
            free = np.isin(ranking.rows, rows)
        ranking.chosen = self._best(ranking, free, selection.ended + selection.count)
        selection.count += 1
        return ranking.chosen

    def misleading_sources(self, study: Study) -> tuple[MisleadingSource, ...]:
        """Return the sources that the prior ignores, as the results of the study contradict them."""
        with self._lock:
            self._observe(study)
            return self._prior.misleading(*self._history.successes()) if self._prior is not None else ()

    def _choose(self, study: Study, number: int, rng: np.random.Generator) -> int:
        row = self._next(study, lambda: rng)
        self._offer(row)
        self._adopt(study, number, row, rng)
        return row

    def _adopt(self, study: Study, number: int, row: int, rng: np.random.Generator) -> None:
        if row in self._told:
            return
        if row not in self._offered:
            if self._prior is not None and self.candidates.remaining and not self._is_guided(len(self._offered)):
                self._next(study, lambda: rng)  # to share the rows that the original choice has shared
            self._offer(row)
        measured = self._measured.pop(row, None)
        self._indices[number] = self._record_begin(row) if measured is None else measured

    def _learn(self, trial: FrozenTrial) -> None:
        index = self._indices.pop(trial.number, None)
        if index is not None and trial.state is not TrialState.FAIL:
            row = int(self._history.rows(np.array([index]))[0])
            self._record_end(index, row, result_of(trial), trial.user_attrs.get(RELATIVE_ERROR, 0.0))

    def _record_begin(self, row: int) -> int:
        """Record that the trial of a row begins; return its index in the history."""
        if self._unguided is not None:
            self._unguided.begin(row, is_shared=row not in self._guided)
        return self._history.begin(row)

    def _record_end(self, index: int, row: int, result: Result, error: float) -> None:
        """Record the result of a trial."""
        if self._unguided is not None:
            self._unguided.end(row, result, error)
        self._history.end(index, result, error)

    def _offer(self, row: int) -> None:
        """Take note of a row that was proposed or nominated; the turn, not its origin, decides whether it is guided."""
        if self._is_guided(len(self._offered)):
            self._guided.add(row)
        self._offered[row] = None

    def _is_guided(self, turn: int) -> bool:
        """Return whether the choice of a turn follows the prior."""
        return self._prior is not None and self._prior.leads(turn, *self._history.successes(), self._history.since_best)

    def _trials(self, guided: bool) -> History:
        """Return the trials that a choice depends on."""
        return self._history if guided or self._unguided is None else self._unguided.history

    def _next(self, study: Study, rng: Draws) -> int:
        """Return the row to propose."""
        turn = len(self._offered)
        if self._unguided is None or self._is_guided(turn):
            return self._propose(study, rng, turn, guided=self._prior is not None)
        while True:  # as a search without a prior, which finds the results of the rows that it shares with the other
            turn = len(self._offered) - len(self._guided)
            row = self._propose(study, self._draws(turn), turn, guided=False)
            if row not in self._guided:
                return row
            self._guided.remove(row)
            self._unguided.share(row)

    def _propose(self, study: Study, rng: Draws, turn: int, *, guided: bool) -> int:
        """Return the row that the search with the prior proposes, or that without, which may be a guided row."""
        if _is_starting(self._trials(guided)):
            if guided:
                return self._first(rng())
            estimated = self._estimated(turn)
            return estimated if estimated is not None else self._farthest(rng())
        ranking = self._ranked(study, guided, rng)
        free = self._free(guided)[ranking.rows]
        self.expected_gain = None
        if not free.any():
            return self.candidates.uniform(rng())
        ranking.chosen = self._best(ranking, free, turn)
        return ranking.chosen

    def _ranked(self, study: Study, guided: bool, rng: Draws) -> Ranking:
        """Return the gains of the rows; those of the last proposal, if no trial has begun or ended since."""
        history = self._trials(guided)
        state = (history.begun, history.ended)
        known, ranking = self._rankings.get(guided, (None, None))
        if ranking is None or known != state or len(study.directions) > 1:
            model = self._model(study, guided=guided)
            prediction = model.predict(history, _weights(study, rng))
            ranking = Ranking(model, prediction, self._free(guided)[prediction.rows])
            self._rankings[guided] = state, ranking
        elif ranking.chosen is not None:
            ranking.expect(ranking.chosen)
        return ranking

    def _draws(self, turn: int) -> Draws:
        """Return the generator of a turn; few turns need it, and to make one takes as long as to rank 500 rows."""
        return partial(np.random.default_rng, (self._seed, turn))

    def _free(self, guided: bool) -> NDArray[np.bool_]:
        """Return whether each row is free for the search with the prior, or that without, shape (rows,)."""
        if guided or not self._guided:
            return self.candidates.free
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
        flip = len(self._offered) % 2 == 1
        return int(free[min(flipped)]) if flipped and flip else int(free[0])

    def _estimated(self, turn: int) -> int | None:
        """Return the best free row by the estimate, unless more than half of the rows before it are such."""
        if self._estimate is None:
            return None
        best = self._estimate.best
        free = self.candidates.free[best]
        if 2 * sum(row in self._offered for row in best[:turn].tolist()) > turn or not free.any():
            return None
        return int(best[np.argmax(free)])

    def _farthest(self, rng: np.random.Generator) -> int:
        """Return a row far from those proposed before, so that the first results show the effect of each parameter."""
        untaken = self._free(guided=False)
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

    def _best(self, ranking: Ranking, free: NDArray[np.bool_], turn: int) -> int:
        """Return the row with the largest expected improvement; without progress, sometimes that of the lowest mean."""
        gain = np.where(free, ranking.gain, -np.inf)
        best = int(np.argmax(gain))
        speed = ranking.speed
        self.expected_gain = float(np.exp(gain[best])) * speed if speed is not None else None
        if ranking.since_best >= _PATIENCE and turn % _GREEDY_EVERY == 0:
            return int(ranking.rows[np.argmin(np.where(free, ranking.mean, np.inf))])
        return int(ranking.rows[best])

    def _model(self, study: Study, *, guided: bool, compiled: bool = False) -> Surrogate:
        """Return the model with the newest hyperparameters.

        A model of ``compiled`` rows has their resources as features; its rows are set by the caller.
        """
        history = self._trials(guided)
        prior: ExpectedSpeeds | None = self._prior if guided else None
        if self._estimate is not None and history.ended < _ESTIMATED_TRIALS:
            prior = self._estimate
        if (compiled, prior) not in self._refits:
            self._refits[compiled, prior] = Refits(
                self._points,
                self._embedding.groups,
                history,
                directions=study.directions,
                prior=prior,
                features=self._features if compiled else None,
            )
        fit = self._refits[compiled, prior].newest()
        model = self._models.get((compiled, prior))
        if model is None or model.fit is not fit:
            max_first = _MAX_COMPILED if compiled else _MAX_TRIALS
            model = Surrogate(fit, history, directions=study.directions, prior=prior, max_first=max_first)
            if not compiled:
                model.set_rows(self._rows_to_evaluate(model, history))
            self._models[compiled, prior] = model
        return model

    def _rows_to_evaluate(self, model: Surrogate, history: History) -> Rows:
        rng = np.random.default_rng((self._seed, model.fit.trials))
        tried = history.rows(history.first_ended(model.fit.trials))
        rows = rows_to_evaluate(self.candidates, model.best, tried, rng)
        return rows if model.prior is None else np.union1d(rows, model.prior.best[:_PRIOR_ROWS])

    def _points(self, rows: Rows) -> Floats:
        codes = self.candidates.space.codes
        if len(codes) > _MAX_EMBEDDED_ROWS:
            return self._embedding.of(codes[rows])
        if self._embedded is None:
            self._embedded = self._embedding.of(codes)
        return self._embedded[rows]


def _is_starting(history: History) -> bool:
    """Return whether there are too few results for a model."""
    return history.ended < STARTUP or history.first_success == history.ended


class _Unguided:
    """The trials of the proposals beside a prior, and of the rows that they share with those that followed it.

    Attributes
    ----------
    history
        These trials.
    """

    def __init__(self) -> None:
        self.history = History()
        self._indices: dict[int, int] = {}
        """Index in the history, by row."""
        self._others: set[int] = set()
        """Rows of the other trials, which began and are not shared."""
        self._results: dict[int, tuple[Result, float]] = {}
        """Results of these, with the relative standard error."""

    def begin(self, row: int, *, is_shared: bool) -> None:
        """Take note of a trial that begins."""
        if is_shared:
            self._indices[row] = self.history.begin(row)
        else:
            self._others.add(row)

    def end(self, row: int, result: Result, error: float) -> None:
        """Take note of the result of a trial."""
        if row in self._indices:
            self.history.end(self._indices[row], result, error)
        else:
            self._results[row] = result, error

    def share(self, row: int) -> None:
        """Add a row that both searches propose, with its trial if that has begun or ended."""
        if row not in self._others:
            return
        self._others.remove(row)
        self.begin(row, is_shared=True)
        if row in self._results:
            self.end(row, *self._results.pop(row))


def _weights(study: Study, rng: Draws) -> Floats:
    """Draw the weights of the objectives."""
    objectives = len(study.directions)
    return rng().dirichlet(np.ones(objectives)) if objectives > 1 else np.ones(1)
