"""A Gaussian process over the rows of a space, updated with a history of trials."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from scipy.special import ndtri

from autotile.search.gaussian_process import GaussianProcess, fit, informative
from autotile.search.transfer import Expectation

Floats = NDArray[np.float64]

_FAILED_QUANTILE = 0.8
"""Where a failure stands among the successes: bad, yet not so bad that its neighbours are given up; whether they fail
is another model's business."""

_SUM_SHARE = 0.05
"""Share of the sum beside the maximum in the augmented Chebyshev scalarisation (Knowles, ParEGO, 2006)."""


def result_of(trial: FrozenTrial) -> tuple[float, ...] | None:
    """Values that a trial reached; None where it failed."""
    reached = trial.state is TrialState.COMPLETE and all(excess <= 0 for excess in trial.constraints.values())
    return tuple(trial.values) if reached and np.isfinite(trial.values).all() else None


def losses(
    results: Sequence[tuple[float, ...] | None], directions: Sequence[StudyDirection], weights: Floats
) -> Floats:
    """One number a trial, the less the better, with mean 0 and deviation 1 over the trials that did not fail.

    Parameters
    ----------
    results
        Values of each trial, None where it failed; at least one is there.
    directions
        Of the study.
    weights
        What each objective counts, shape (objectives,); of no effect where there is one.

    Returns
    -------
    numpy.ndarray
        Shape (trials,).
    """
    reached = np.array([result for result in results if result is not None])
    columns = [_scaled(column, direction) for column, direction in zip(reached.T, directions, strict=True)]
    loss = columns[0]
    if len(columns) > 1:
        weighted = weights[:, None] * np.stack(columns)
        loss = standardized(weighted.max(axis=0) + _SUM_SHARE * weighted.sum(axis=0))
    found = np.full(len(results), np.quantile(loss, _FAILED_QUANTILE))
    found[[result is not None for result in results]] = loss
    return found


def speed_of_loss(results: Sequence[tuple[float, ...] | None], directions: Sequence[StudyDirection]) -> float | None:
    """How much faster, relative to the fastest so far, what has one less of `losses` is.

    Parameters
    ----------
    results, directions
        As for `losses`.

    Returns
    -------
    float or None
        None where a loss is no speed: there are several objectives, or values that are not positive.
    """
    reached = np.array([result for result in results if result is not None])
    if reached.shape[1] > 1 or reached.min() <= 0:
        return None
    return float(_speeds(reached[:, 0], directions[0]).std())


def noise_of(
    results: Sequence[tuple[float, ...] | None], errors: Sequence[float], directions: Sequence[StudyDirection]
) -> Floats:
    """Variance that the error of its measurement gives each of `losses`, shape (trials,).

    Parameters
    ----------
    results, directions
        As for `losses`.
    errors
        Standard error of each value over the value; 0 where it is not known.
    """
    deviation = speed_of_loss(results, directions)
    if not deviation:
        return np.zeros(len(results))
    speeds = np.zeros(len(results))
    ran = np.array([result is not None for result in results])
    speeds[ran] = _speeds(np.array([result[0] for result in results if result is not None]), directions[0])
    return np.asarray(np.square(speeds * np.asarray(errors) / deviation))


def _scaled(values: Floats, direction: StudyDirection) -> Floats:
    """One objective, the less the better.

    Times become speeds relative to the fastest, which spreads the fast trials and crowds the slow ones: how slow
    these are does not matter to the search. Values of any sign become normal scores of their ranks.
    """
    if values.min() > 0:
        return standardized(-_speeds(values, direction))
    ascending = values if direction is StudyDirection.MINIMIZE else -values
    ranks = np.searchsorted(np.sort(ascending), ascending, side="left")
    return standardized(np.asarray(ndtri((ranks + 0.5) / len(values))))


def _speeds(values: Floats, direction: StudyDirection) -> Floats:
    """Positive values relative to the best of them, which is 1."""
    return np.asarray(values / values.max() if direction is StudyDirection.MAXIMIZE else values.min() / values)


def standardized(values: Floats) -> Floats:
    """Shifted and scaled to mean 0 and deviation 1."""
    away = values - values.mean()
    return np.asarray(away / max(float(away.std()), 1e-6))


Result = tuple[float, ...] | None
"""Values of a trial; None where it failed."""


class History:
    """Trials by number, with their rows and, once they ended, their results.

    Attributes
    ----------
    begun
        Row of each trial's number, in the order of their beginning.
    results
        Result of each trial's number, in the order of their end.
    errors
        Standard error of the first value over the value, of trials of which it is known.
    """

    def __init__(self) -> None:
        self.begun: dict[int, int] = {}
        self.results: dict[int, Result] = {}
        self.errors: dict[int, float] = {}

    @property
    def first_success(self) -> int:
        """Trials that ended before the first that did not fail; all where there is none."""
        outcomes = enumerate(self.results.values())
        return next((index for index, result in outcomes if result is not None), len(self.results))

    def first_ended(self, count: int) -> list[int]:
        """Numbers of the trials that ended first."""
        return list(self.results)[:count]

    def rows(self, numbers: list[int]) -> NDArray[np.int64]:
        """Row of each trial."""
        return np.array([self.begun[number] for number in numbers], np.int64)

    def results_of(self, numbers: list[int]) -> list[Result]:
        """Result of each trial; all have ended."""
        return [self.results[number] for number in numbers]


Rows = NDArray[np.int64]

_FITTED = 256
"""Most trials that hyperparameters are fitted to."""

_BEST = 10
"""Best trials whose surroundings are looked at."""

_LEAST_CHANCE = 0.02
"""Chance to work that every row is left with: a model of failures errs, too."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is expected of rows.

    Attributes
    ----------
    rows
        The rows, shape (n,).
    mean, deviation
        Of the loss that each will have, shape (n,).
    chance
        That it does not fail, shape (n,).
    best
        Least loss so far.
    since_best
        Trials that ended since it was found.
    """

    rows: Rows
    mean: Floats
    deviation: Floats
    chance: Floats
    best: float
    since_best: int

    def of_those(self, wanted: NDArray[np.bool_]) -> Outlook:
        """The same of some of the rows; ``wanted`` has shape (n,)."""
        return replace(
            self,
            rows=self.rows[wanted],
            mean=self.mean[wanted],
            deviation=self.deviation[wanted],
            chance=self.chance[wanted],
        )


class Surrogate:
    """The model after the first so many trials to end, to which later ones are added as they come.

    What it expects depends on the history alone and not on when it was asked: trials stand in the order in which the
    first of them ended, then in that in which the others began.

    Parameters
    ----------
    points
        Coordinates of rows, shape (rows, coordinates).
    groups
        Group of each coordinate; a group shares a length scale.
    history
        At least ``fitted`` of its trials have ended.
    fitted
        Trials that hyperparameters are fitted to; one of them or more did not fail.
    directions
        Of the study.
    expectation
        What other studies let one expect; of use with one objective.

    Attributes
    ----------
    fitted, expectation
        As given.
    best
        Rows of the best of those trials, the best first.
    """

    def __init__(
        self,
        points: Callable[[Rows], Floats],
        groups: NDArray[np.int64],
        history: History,
        fitted: int,
        *,
        directions: Sequence[StudyDirection],
        expectation: Expectation | None = None,
    ) -> None:
        self.fitted = fitted
        self.expectation = expectation if len(directions) == 1 else None
        self._points = points
        self._directions = directions
        self._numbers = history.first_ended(fitted)
        self._included = set(self._numbers)
        self._seen = 0
        results = history.results_of(self._numbers)
        loss = losses(results, directions, np.ones(len(directions)))
        noise = noise_of(results, [history.errors.get(number, 0.0) for number in self._numbers], directions)
        observed = history.rows(self._numbers)
        coordinates = points(observed)
        ascending = np.argsort(loss, kind="stable")
        self.best: Rows = observed[ascending[:_BEST]]
        chosen = informative(ascending, _FITTED)
        surprise = loss - self._expected(observed, history, results, loss)
        parameters = fit(coordinates[chosen], standardized(surprise[chosen]), groups, noise[chosen])
        self._rows: Rows = np.zeros(0, np.int64)
        self._process = GaussianProcess(parameters, points(self._rows), coordinates, noise)

    def look_at(self, rows: Rows) -> None:
        """Say what is expected of these rows from now on."""
        self._rows = rows
        self._process.look_at(self._points(rows))

    def outlook(self, history: History, weights: Floats) -> Outlook:
        """Say what is expected of the rows that are looked at.

        Parameters
        ----------
        history
            The same as before, grown.
        weights
            What each objective counts, shape (objectives,).
        """
        self._follow(history)
        results = list(history.results.values())
        ended, numbers = np.array(list(history.results)), np.array(self._numbers)
        reached = losses(results, self._directions, weights)
        failed = np.array([result is None for result in results])
        share = float(failed.mean())
        by_number = np.zeros((3, 1 + int(max(ended.max(), numbers.max()))))
        by_number[:, ended] = np.stack([reached, failed - share, np.ones(len(ended))])
        loss, failures, known = by_number[:, numbers]
        rows = np.concatenate([history.rows(self._numbers), self._rows])
        expected = self._expected(rows, history, results, reached)
        targets = np.stack([loss - expected[: len(numbers)], failures])
        mean, deviation = self._process.predict(targets if share else targets[:1], known > 0)
        mean[0] += expected[len(numbers) :]
        chance = 1 - share - mean[1] if share else np.ones(len(self._rows))
        best = int(np.argmin(np.where(failed, np.inf, reached)))
        return Outlook(
            rows=self._rows,
            mean=mean[0],
            deviation=deviation,
            chance=np.clip(chance, _LEAST_CHANCE, 1.0),
            best=float(reached[best]),
            since_best=len(ended) - 1 - best,
        )

    def _expected(self, rows: Rows, history: History, results: Sequence[Result], loss: Floats) -> Floats:
        """Loss that rows are expected to have before anything is learnt here, shape (rows,).

        ``results`` and ``loss`` are of the first trials of the history that ended.
        """
        if self.expectation is None:
            return np.zeros(len(rows))
        ran = np.array([result is not None for result in results])
        times = np.array([result[0] for result in results if result is not None])
        tried = history.rows(history.first_ended(len(results)))
        return self.expectation.losses(rows, tried[ran], times, loss[ran])

    def _follow(self, history: History) -> None:
        """Add the trials that began since the last look."""
        numbers = list(history.begun)
        added = [number for number in numbers[self._seen :] if number not in self._included]
        for number, point in zip(added, self._points(history.rows(added)), strict=True):
            self._process.observe(point)
            self._numbers.append(number)
        self._seen = len(numbers)
