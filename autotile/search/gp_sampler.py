"""Bayesian optimisation over the rows of a search space; method and comparison: docs/search.md."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autotile.search.gaussian_process import (
    Embedding,
    Floats,
    GaussianProcess,
    Hyperparameters,
    PointsOf,
    Rows,
    compiled_points,
    fit,
    informative,
    load_scipy,
    log_expected_improvement,
    one_blas_thread,
)
from autotile.search.row_sampler import Result, RowSampler, rows_to_evaluate
from autotile.search.transfer import (
    Estimate,
    ExpectedSpeeds,
    MisleadingSource,
    Source,
    estimated_speeds,
    transferred_speeds,
)
from autotile.space.search_space import SearchSpace

_FAILED_QUANTILE = 0.8
"""Quantile of the losses of successful trials that is the loss of a failed one: bad, but not so bad that its neighbours
are avoided; the probability of success is predicted separately."""

_SUM_SHARE = 0.05
"""Weight of the sum in the augmented Chebyshev scalarisation (Knowles, ParEGO, 2006)."""

Scores = tuple[Floats, NDArray[np.bool_], int, float | None]
"""The loss of each trial that ended and whether it failed, shape (trials,); the index of the best; `speed_of_loss`."""


class History:
    """Rows and results of trials, by their index in the order in which they began.

    ``rows`` is the row of each. In the order in which they ended, ``order`` is the index of each, and ``values`` are
    its values, shape (trials, objectives), NaN for failures; ``first_success`` is the number of those before the first
    success, all if there is none. The arrays have spare memory behind the last trial.
    """

    def __init__(self) -> None:
        self.begun = 0
        self.ended = 0
        self.first_success = 0
        self.rows: Rows = np.zeros(64, np.int64)
        self.order: Rows = np.zeros(64, np.int64)
        self.values: Floats = np.zeros((64, 1))
        self._errors: Floats = np.zeros(64)
        self._scores: tuple[int, Scores] | None = None
        """The trials of one objective, after the number of trials that they are of."""

    def begin(self, row: int) -> int:
        """Add a trial that begins; return its index."""
        if self.begun == len(self.rows):
            self.rows, self.order, self.values, self._errors = (
                np.concatenate([each, np.zeros_like(each)])
                for each in (self.rows, self.order, self.values, self._errors)
            )
        self.rows[self.begun] = row
        self.begun += 1
        return self.begun - 1

    def end(self, index: int, result: Result, error: float = 0.0) -> None:
        """Add the result of a trial, and the relative standard error of its first value, 0 if it is not known."""
        if result is None and self.first_success == self.ended:
            self.first_success += 1
        if result is not None and len(result) != self.values.shape[1]:  # only failures so far
            self.values = np.full((len(self.values), len(result)), np.nan)
        self.order[self.ended] = index
        self.values[self.ended] = np.nan if result is None else result
        self._errors[self.ended] = error
        self.ended += 1

    def scores(self, weights: Floats) -> Scores:
        """Return the scores of the trials that ended, at least one of which succeeded; see `losses`."""
        if self._scores is not None and self._scores[0] == self.ended and self.values.shape[1] == 1:
            return self._scores[1]
        values = self.values[: self.ended]
        failed = np.isnan(values[:, 0])
        reached = losses(values, weights)
        best = int(np.argmin(np.where(failed, np.inf, reached)))
        self._scores = self.ended, (reached, failed, best, speed_of_loss(values))
        return self._scores[1]

    @property
    def since_best(self) -> int:
        """Number of trials that ended since the one with the lowest first value; 0 if there is none."""
        first = self.values[: self.ended, 0]
        return self.ended - 1 - int(np.argmin(np.where(np.isnan(first), np.inf, first))) if self.ended else 0

    def successes(self) -> tuple[Rows, Floats]:
        """Return the rows of the successful trials, in the order in which they ended, and their first values."""
        first = self.values[: self.ended, 0]
        ran = ~np.isnan(first)
        return self.rows[self.order[: self.ended][ran]], first[ran]

    def noise(self, count: int) -> Floats:
        """Return the variance of each of `losses` due to the measurement error, of the first trials that ended."""
        values = self.values[:count]
        deviation = speed_of_loss(values)
        noise = np.zeros(count)
        if deviation:
            ran = ~np.isnan(values[:, 0])
            noise[ran] = np.square(_speeds(values[ran, 0]) * self._errors[:count][ran] / deviation)
        return noise


def losses(values: Floats, weights: Floats) -> Floats:
    """Return the loss of each trial, with mean 0 and deviation 1 over the successful trials, at least one.

    Times become speeds relative to the fastest, which spreads the fast trials and compresses the slow ones, whose
    differences do not matter to the search. Values of any sign become normal scores of their ranks.

    ``values`` have shape (trials, objectives), NaN for failures. The weights of the objectives are ignored if there is
    one objective.
    """
    ran = ~np.isnan(values[:, 0])
    columns = []
    for column in values[ran].T:
        if column.min() > 0:
            columns.append(standardized(-_speeds(column)))
            continue
        ranks = np.searchsorted(np.sort(column), column, side="left")
        _, special = load_scipy()
        columns.append(standardized(np.asarray(special.ndtri((ranks + 0.5) / len(column)))))
    loss = columns[0]
    if len(columns) > 1:
        weighted = weights[:, None] * np.stack(columns)
        loss = standardized(weighted.max(axis=0) + _SUM_SHARE * weighted.sum(axis=0))
    if ran.all():
        return loss
    all_losses = np.full(len(values), np.quantile(loss, _FAILED_QUANTILE))
    all_losses[ran] = loss
    return all_losses


def speed_of_loss(values: Floats) -> float | None:
    """Return the speed, relative to the fastest trial, that corresponds to one unit of `losses`.

    None if losses are not speeds: with several objectives, or values that are not positive.
    """
    first = values[:, 0]
    measured = first[~np.isnan(first)]
    if values.shape[1] > 1 or measured.min() <= 0:
        return None
    return _deviation(_speeds(measured))


def _speeds(values: Floats) -> Floats:
    """Return positive values relative to the best one, which becomes 1."""
    return np.asarray(values.min() / values)


def standardized(values: Floats) -> Floats:
    """Return values shifted and scaled to mean 0 and deviation 1."""
    return np.asarray((values - values.mean()) / max(_deviation(values), 1e-6))


def _deviation(values: Floats) -> float:
    """Return the standard deviation; `numpy.std` takes some times as long for the few values of a search."""
    centered = values - values.mean()
    return math.sqrt(float(centered @ centered) / len(values))


_MAX_FITTED = 128
"""Maximum number of trials that hyperparameters are fitted to."""

_FIRST_STEPS = 30
_LATER_STEPS = 8
"""Maximum numbers of optimiser steps of the first fit and of later ones, which begin at the previous one."""

_BEST = 10
"""Number of the best trials near which rows are evaluated."""

_MIN_SUCCESS = 0.02
"""Lower limit of the predicted probability of success, as the prediction may be wrong."""

STARTUP = 6
"""Number of trials that end before a model is used."""

_GROWTH = 1.1
"""Growth of the number of ended trials at which hyperparameters are fitted again."""

_SETTLED_TRIALS = 100
_SETTLED_GROWTH = 1.25
"""The same after 100 trials: hyperparameters change little by then."""


@cache
def due_fit(ended: int) -> int:
    """Return the largest number of trials up to ``ended`` at which hyperparameters are fitted."""
    due = STARTUP
    growth = _GROWTH
    while (after := max(due + 2, int(due * growth))) <= ended:
        due = after
        growth = _GROWTH if due < _SETTLED_TRIALS else _SETTLED_GROWTH
    return due


@dataclass(eq=False)
class Surrogate:
    """A Gaussian process over the rows of a space, updated with a history of trials and fitted again as trials end.

    Its predictions depend only on the history, not on the times of the calls: a fit depends on the trials that had
    ended by then and begins at the previous fit; the trials of the process are ordered by their end among those of the
    fit, then by their beginning.

    ``points`` returns the coordinates of rows by their parameters, of which those of a group share a length scale. The
    mean of the process is that of ``prior``. ``features`` are resources by row, which are further coordinates, see
    `compiled_points`. Of the trials of a fit, ``max_first`` informative ones are used.
    """

    points: PointsOf
    groups: Rows
    history: History
    prior: ExpectedSpeeds | None = None
    features: Mapping[int, Floats] | None = None
    max_first: int = field(kw_only=True)
    fitted: int = field(default=0, init=False)
    """Number of trials of the newest fit, counted by their end; 0 before the first."""

    def update(self) -> bool:
        """Fit again if that is due, and begin a process with the trials of that fit, without rows; return whether so.

        At least one trial must have succeeded.
        """
        history = self.history
        first = max(STARTUP, history.first_success + 1)
        due = max(due_fit(history.ended), first)
        if due == self.fitted:
            return False
        for count in range(max(first, self.fitted + 1), due + 1):  # fits up to the due one, each from the one before
            if max(due_fit(count), first) != count:
                continue
            ended, values = history.order[:count], history.values[:count]
            observed = history.rows[ended]
            self._points, groups = self.points, self.groups
            if self.features is not None:
                self._points, groups = compiled_points(self._points, groups, self.features, observed)
            loss = losses(values, np.ones(values.shape[1]))
            ascending = np.argsort(loss, kind="stable")
            residual = loss - self._prior_losses(observed, values, loss)
            chosen = informative(ascending, _MAX_FITTED)
            self.parameters: Hyperparameters = fit(
                self._points(observed[chosen]),
                standardized(residual[chosen]),
                groups,
                history.noise(count)[chosen],
                start=self.parameters if self.fitted else None,
                max_steps=_LATER_STEPS if self.fitted else _FIRST_STEPS,
            )
            self.fitted = count
        self.best: Rows = history.rows[ended[ascending[:_BEST]]]
        """Rows of the best trials of the newest fit, the best first."""
        chosen = informative(ascending, self.max_first)
        self._indices: Rows = ended[chosen]
        """Trials of the process, by their index in the history."""
        self._included = set(ended.tolist())
        self._seen = 0
        self._rows: Rows = np.zeros(0, np.int64)
        self._slots: dict[int, int] = {}
        """Point of the process of each row."""
        self._order: Rows = np.zeros(0, np.int64)
        """The same in the order of the rows."""
        self._free: list[int] = []
        """Points of the process of rows that are not evaluated any more."""
        points, noise = self._points(history.rows[self._indices]), history.noise(self.fitted)[chosen]
        self._process = GaussianProcess(self.parameters, self._points(self._rows), points, noise)
        return True

    def set_rows(self, rows: Rows) -> None:
        """Set the rows that `predict` evaluates; those that it evaluates already cost nothing."""
        wanted = rows.tolist()
        removed = self._slots.keys() - wanted
        self._free += [self._slots.pop(row) for row in removed]
        added = [row for row in wanted if row not in self._slots]
        free, self._free = self._free[: len(added)], self._free[len(added) :]
        appended = len(self._slots) + len(free) + len(self._free)
        self._process.replace_points(np.array(free, np.int64), self._points(np.array(added, np.int64)))
        slots = [*free, *range(appended, appended + len(added) - len(free))]
        self._slots.update(zip(added, slots, strict=True))
        self._rows = rows
        self._order = np.array([self._slots[row] for row in wanted], np.int64)

    def predict(self, weights: Floats, free: NDArray[np.bool_] | None = None) -> RowRanking:
        """Predict the rows that were set, with the trials since; ``weights`` are those of the objectives.

        Of many rows, those are kept that are the best of the ``free`` ones, a mask over the rows of the space, None for
        all. The results of chosen rows only lower the gains of others, so that the rows that are not among the best at
        first do not become so before a trial begins or ends, or too late to matter.
        """
        history = self.history
        added = [index for index in range(self._seen, history.begun) if index not in self._included]
        self._seen = history.begun
        if added:
            self._process.observe(self._points(history.rows[added]))
            self._indices = np.append(self._indices, added)
        ended = history.order[: history.ended]
        loss_of_ended, failed, best, speed = history.scores(weights)
        share = float(np.count_nonzero(failed)) / len(ended)
        by_index = np.zeros((3, history.begun))
        by_index[:, ended] = loss_of_ended, failed - share, np.ones(len(ended))
        loss, failures, known = by_index[:, self._indices]
        targets = np.stack([loss, failures]) if share else loss[None]
        rows = np.concatenate([history.rows[self._indices], self._rows])
        prior = self._prior_losses(rows, history.values[: history.ended], loss_of_ended)
        targets[0] -= prior[: len(self._indices)]
        mean, deviation = self._process.predict(targets, known > 0)
        mean, deviation = mean[:, self._order], deviation[self._order]
        mean[0] += prior[len(self._indices) :]
        success = 1 - share - mean[1] if share else np.ones(len(self._rows))
        log_success = np.log(np.clip(success, _MIN_SUCCESS, 1.0))
        least = float(loss_of_ended[best])
        gain = log_expected_improvement(mean[0], deviation, least) + log_success
        kept = np.arange(len(gain))
        if len(gain) > _RANKED_ROWS:
            is_free = np.ones(len(gain), np.bool_) if free is None else free[self._rows]
            is_best = np.zeros(len(gain), np.bool_)
            for merit in (np.where(is_free, gain, -np.inf), np.where(is_free, -mean[0], -np.inf)):
                is_best[np.argpartition(-merit, _RANKED_ROWS // 2)[: _RANKED_ROWS // 2]] = True
            kept = np.flatnonzero(is_best)
        return RowRanking(
            rows=self._rows[kept],
            mean=mean[0, kept],
            deviation=deviation[kept],
            log_success=log_success[kept],
            gain=gain[kept],
            best=least,
            since_best=len(ended) - 1 - best,
            speed=speed,
            explained_by=cache(lambda: self._process.among(self._order[kept])),
        )

    def _prior_losses(self, rows: Rows, values: Floats, loss: Floats) -> Floats:
        """Return the prior's losses of rows, given values and losses of the first trials that ended; zeros without it."""
        if self.prior is None:
            return np.zeros(len(rows))
        ran = ~np.isnan(values[:, 0])
        tried = self.history.rows[self.history.order[: len(values)]]
        return self.prior.losses(rows, tried[ran], values[ran, 0], loss[ran])


_RANKED_ROWS = 256
"""Number of rows, the best by their gain and by their mean, that the proposals between two results choose among."""

_MIN_UNEXPLAINED = 1e-4
"""Smallest share of a variance that the result of another row is assumed to leave."""


@dataclass(slots=True, eq=False)
class RowRanking:
    """Rows with their predicted losses, among which several are chosen without a result in between.

    All arrays have shape (rows,). ``deviation`` is the standard deviation of the loss; ``gain`` the logarithm of the
    expected improvement times the probability of success; ``best`` the lowest loss so far, ``since_best`` trials ago;
    ``speed`` the speed, relative to the fastest trial, of one unit of the loss, None if losses are not speeds;
    ``explained_by`` returns `GaussianProcess.among` for the rows, as it is when first asked for. ``count`` rows were
    chosen, the last of them ``chosen``.
    """

    rows: Rows
    mean: Floats
    deviation: Floats
    log_success: Floats
    gain: Floats
    best: float
    since_best: int
    speed: float | None
    explained_by: Callable[[], Callable[[int], Floats]]
    count: int = 0
    chosen: int | None = None

    def expect(self) -> None:
        """Take note that the result of the chosen row will be known: rows that it would tell of gain less by theirs."""
        if self.chosen is None:
            return
        index = int(np.flatnonzero(self.rows == self.chosen)[0])
        unexplained = np.maximum(1 - self.explained_by()(index), _MIN_UNEXPLAINED)
        self.deviation = self.deviation * np.sqrt(unexplained)
        self.gain = log_expected_improvement(self.mean, self.deviation, self.best) + self.log_success


_PRIOR_ROWS = 512
"""Number of the best rows by the prior, which a model always evaluates."""

_ESTIMATED_TRIALS = 12
"""Number of trials after which an estimate is not used: by then the results say more than it does."""

_LIKELY_SHARE, _MIN_LIKELY_ROWS = 0.03, 8
"""Share of the rows that are likely the best by what is expected, and their number in a small space. First rows are
spread over them: the very best ones are much alike, so that an expectation that is wrong about one is about all."""
_BEST_EVERY = 3
"""Period of the likely rows that are the best of those left, not the farthest from others."""

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


class FeasibleGPSampler(RowSampler):
    """Proposes the row with the largest expected improvement under a Gaussian process; docs/search.md has the method.

    All objectives are minimised, several with random weights for each proposal.

    It can also rank compiled candidates. A nominated row is not proposed again and begins no trial. It may be measured
    later, then it begins and is told, or never.

    Some proposals follow the prior, speeds expected from ``sources``, and learn from all trials. The others are those
    of a search without a prior, and depend only on each other's results, so that a prior that misleads costs no more
    than the proposals that followed it. The ``estimate`` is used unless there is a prior.
    """

    def __init__(
        self,
        space: SearchSpace,
        seed: int,
        available: ArrayLike | None = None,
        objectives: int = 1,
        *,
        sources: Sequence[Source] = (),
        estimate: Estimate | None = None,
    ) -> None:
        super().__init__(space, seed, available, objectives)
        self._prior = transferred_speeds(space, sources) if sources else None
        self._estimate = estimated_speeds(space, estimate) if estimate is not None and self._prior is None else None
        self._embedding = Embedding(space.parameters)
        self._embedded: Floats | None = None
        """Coordinates of all rows of a small space, since looking them up is faster."""
        self._history = History()
        self._measured: dict[int, int] = {}
        """Index in the history of each row that is being measured."""
        self._selected: set[int] = set()
        """Nominated rows whose trials began: further trials with them tell nothing."""
        self._unguided = self._history if self._prior is None else History()
        """The part of the history that proposals beside the prior depend on; all of it without a prior."""
        self._shared: dict[int, int] = {}
        """Index in that part by row, with a prior."""
        self._results: dict[int, tuple[Result, float] | None] = {}
        """Rows whose trials began, with result and relative standard error once these have ended."""
        self._guided: set[int] = set()
        """Rows that were offered at a turn of the prior."""
        self._features: dict[int, Floats] = {}
        self._offered: dict[int, None] = {}
        """Rows that were proposed or nominated, in that order."""
        self._models: dict[tuple[bool, ExpectedSpeeds | None], Surrogate] = {}
        """Model by whether it has resources as features, and by the prior that it uses."""
        self._rankings: dict[tuple[bool, bool], tuple[tuple[int, ...], RowRanking]] = {}
        """The newest ranking by whether it is of compiled rows, and whether it follows the prior; after what it depends
        on: the numbers of trials that had begun and ended, of compiled rows only the latter."""

    def nominate(self, row: int | None = None) -> int:
        """Choose a free row to compile, or take note that ``row`` was chosen; return it."""
        with one_blas_thread():
            chosen = self._next(self._draws(len(self._offered))) if row is None else row
        self.candidates.take(chosen)
        self._offer(chosen)
        return chosen

    def describe(self, row: int, features: Floats) -> None:
        """Take note of the resources of a compiled row, see `autotile.search.gaussian_process.features_of`."""
        self._features[row] = features

    def begin(self, row: int) -> None:
        """Take note that a nominated row is being measured."""
        self._selected.add(row)
        if row not in self._measured:
            self._record_begin(row)

    def tell(self, row: int, result: Result, error: float = 0.0) -> None:
        """Learn the values of a row that is being measured, None for a failure, and the error of the first."""
        if row not in self._measured:
            return
        self._results[row] = result, error
        if row in self._shared:
            self._unguided.end(self._shared[row], result, error)
        self._history.end(self._measured.pop(row), result, error)

    def withdraw(self, row: int) -> None:
        """Take note that the result of a row cannot be known."""
        self._measured.pop(row, None)

    def select(self, rows: Sequence[int]) -> int:
        """Choose the row to measure among compiled ones, the oldest nomination first, by resources as further features.

        Several are chosen without a result in between, as many as GPUs are free. The model is updated once for all of
        them; what has compiled since is left for the next result.
        """
        with one_blas_thread():
            ended = self._history.ended
            guided = self._is_guided(ended)
            rows = [row for row in rows if (row in self._guided) is guided] or rows
            if _is_starting(self._history if guided else self._unguided) or len(rows) == 1:
                return rows[0]
            known, ranking = self._rankings.get((True, guided), ((), None))
            is_old = known != (ended,) or self._objectives > 1
            among = set(rows)  # np.isin takes six times as long for so few
            if ranking is None or is_old or among.isdisjoint(ranking.rows.tolist()):
                model = self._model(guided=guided, compiled=True)
                model.set_rows(np.array(rows))
                ranking = model.predict(_weights(self._objectives, self._draws(ended)))
                self._rankings[True, guided] = (ended,), ranking
            ranking.expect()
            is_compiled = np.array([row in among for row in ranking.rows.tolist()])
            ranking.chosen = self._best(ranking, is_compiled, ended + ranking.count)
            ranking.count += 1
            return ranking.chosen

    def misleading_sources(self) -> tuple[MisleadingSource, ...]:
        """Return the sources that the prior ignores, as the results contradict them."""
        return self._prior.misleading(*self._history.successes()) if self._prior is not None else ()

    def _choose(self, rng: np.random.Generator) -> int:
        row = self._next(lambda: rng)
        self._offer(row)
        self._record_begin(row)
        return row

    def _adopt(self, row: int, rng: np.random.Generator) -> None:
        if row in self._selected:
            return
        if row not in self._offered:
            if self._prior is not None and self.candidates.remaining and not self._is_guided(len(self._offered)):
                self._next(lambda: rng)  # to share the rows that the original choice has shared
            self._offer(row)
        if row not in self._measured:
            self._record_begin(row)

    def _record_begin(self, row: int) -> None:
        self._results[row] = None
        if self._prior is not None and row not in self._guided:
            self._shared[row] = self._unguided.begin(row)
        self._measured[row] = self._history.begin(row)

    def _offer(self, row: int) -> None:
        """Take note of a row that was proposed or nominated; the turn, not its origin, decides whether it is guided."""
        if self._is_guided(len(self._offered)):
            self._guided.add(row)
        self._offered[row] = None

    def _is_guided(self, turn: int) -> bool:
        return self._prior is not None and self._prior.leads(turn, *self._history.successes(), self._history.since_best)

    def _next(self, rng: Draws) -> int:
        turn = len(self._offered)
        if self._prior is None or self._is_guided(turn):
            return self._propose(rng, turn, guided=self._prior is not None)
        while True:  # as a search without a prior, which finds the results of the rows that it shares with the other
            turn = len(self._offered) - len(self._guided)
            row = self._propose(self._draws(turn), turn, guided=False)
            if row not in self._guided:
                return row
            self._guided.remove(row)
            if row in self._results:  # its trial, if that has begun or ended
                self._shared[row] = self._unguided.begin(row)
                if (ended := self._results[row]) is not None:
                    self._unguided.end(self._shared[row], *ended)

    def _propose(self, rng: Draws, turn: int, *, guided: bool) -> int:
        """Return the row that the search with the prior proposes, or that without, which may be a guided row."""
        history = self._history if guided else self._unguided
        if _is_starting(history):
            expected = self._prior if guided else self._estimate
            if expected is not None:  # half of the rows are likely ones, with the prior all of them
                best, free = expected.best, self.candidates.free[expected.best]
                if free[0]:
                    return int(best[0])
                count = max(_MIN_LIKELY_ROWS, int(_LIKELY_SHARE * len(best)))
                taken = len(self._offered.keys() & set(best[: max(count, turn)].tolist()))
                if free.any() and (guided or 2 * taken <= turn):
                    likely = best[:count][free[:count]]
                    if not len(likely) or taken % _BEST_EVERY == 0:
                        return int(best[np.argmax(free)])
                    drawn = rng().permutation(len(likely))[:_SPREAD_DRAWS]
                    return self._farthest(likely[drawn], list(self._offered))
            untaken, draws = self._free(guided), rng()
            drawn = np.flatnonzero(untaken)[[draws.integers(np.count_nonzero(untaken))]]
            drawn = np.append(drawn, draws.integers(len(self.candidates.space), size=_SPREAD_DRAWS))
            return self._farthest(drawn[untaken[drawn]], [row for row in self._offered if row not in self._guided])
        state = (history.begun, history.ended)
        known, ranking = self._rankings.get((False, guided), ((), None))
        if ranking is None or known != state or self._objectives > 1:
            ranking = self._model(guided=guided).predict(_weights(self._objectives, rng), self._free(guided))
            self._rankings[False, guided] = state, ranking
        ranking.expect()
        free = self._free(guided)[ranking.rows]
        self.expected_gain = None
        if not free.any():
            return self.candidates.uniform(rng())
        ranking.chosen = self._best(ranking, free, turn)
        return ranking.chosen

    def _draws(self, turn: int) -> Draws:
        """Return the generator of a turn; few turns need it, and to make one takes as long as to rank 500 rows."""
        return partial(np.random.default_rng, (self._seed, turn))

    def _free(self, guided: bool) -> NDArray[np.bool_]:
        """Return True if each row is free for the search with the prior, or that without, shape (rows,)."""
        if guided or not self._guided:
            return self.candidates.free
        untaken = self.candidates.free.copy()
        untaken[list(self._guided)] = True
        return untaken

    def _farthest(self, rows: Rows, others: Sequence[int]) -> int:
        """Return the row farthest from others, the first if there are none, so that results show each parameter."""
        if not others:
            return int(rows[0])
        codes = self.candidates.space.codes
        of_each = self._embedding.of_each
        distances = of_each(codes[rows])[:, None, :] - of_each(codes[np.array(others)])[None, :, :]
        return int(rows[np.argmax(np.square(distances).sum(axis=2).min(axis=1))])

    def _best(self, ranking: RowRanking, free: NDArray[np.bool_], turn: int) -> int:
        """Return the row with the largest expected improvement; without progress, sometimes that of the lowest mean."""
        gain = np.where(free, ranking.gain, -np.inf)
        best = int(np.argmax(gain))
        speed = ranking.speed
        self.expected_gain = float(np.exp(gain[best])) * speed if speed is not None else None
        if ranking.since_best >= _PATIENCE and turn % _GREEDY_EVERY == 0:
            return int(ranking.rows[np.argmin(np.where(free, ranking.mean, np.inf))])
        return int(ranking.rows[best])

    def _model(self, *, guided: bool, compiled: bool = False) -> Surrogate:
        """Return the model with the newest hyperparameters; of a model of ``compiled`` rows, the caller sets these."""
        history = self._history if guided else self._unguided
        prior = self._prior if guided else None
        if self._estimate is not None and history.ended < _ESTIMATED_TRIALS:
            prior = self._estimate
        if (model := self._models.get((compiled, prior))) is None:
            model = self._models[compiled, prior] = Surrogate(
                self._points,
                self._embedding.groups,
                history,
                prior=prior if self._objectives == 1 else None,
                features=self._features if compiled else None,
                max_first=_MAX_COMPILED if compiled else _MAX_TRIALS,
            )
        if model.update() and not compiled:
            tried = history.rows[history.order[: model.fitted]]
            rng = np.random.default_rng((self._seed, model.fitted))
            rows = rows_to_evaluate(self.candidates, model.best, tried, rng)
            model.set_rows(rows if model.prior is None else np.union1d(rows, model.prior.best[:_PRIOR_ROWS]))
        return model

    def _points(self, rows: Rows) -> Floats:
        codes = self.candidates.space.codes
        if len(codes) > _MAX_EMBEDDED_ROWS:
            return self._embedding.of(codes[rows])
        if self._embedded is None:
            self._embedded = self._embedding.of(codes)
        return self._embedded[rows]


def _is_starting(history: History) -> bool:
    return history.ended < STARTUP or history.first_success == history.ended


def _weights(objectives: int, rng: Draws) -> Floats:
    return rng().dirichlet(np.ones(objectives)) if objectives > 1 else np.ones(1)
