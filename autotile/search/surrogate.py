"""A Gaussian process over the rows of a space, updated with a history of trials."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from scipy.special import ndtri

from autotile.search.gaussian_process import Floats, GaussianProcess, fit, informative
from autotile.search.row_sampler import Rows
from autotile.search.transfer import TransferPrior

_FAILED_QUANTILE = 0.8
"""Quantile of the losses of successful trials that is the loss of a failed one: bad, but not so bad that its neighbours
are avoided; the probability of success is predicted separately."""

_SUM_SHARE = 0.05
"""Weight of the sum in the augmented Chebyshev scalarisation (Knowles, ParEGO, 2006)."""


Result = tuple[float, ...] | None
"""Values of a trial; None for a failure."""


def result_of(trial: FrozenTrial) -> Result:
    """Return the values of a finished trial; None if it failed."""
    reached = trial.state is TrialState.COMPLETE and all(excess <= 0 for excess in trial.constraints.values())
    return tuple(trial.values) if reached and np.isfinite(trial.values).all() else None


def losses(results: Sequence[Result], directions: Sequence[StudyDirection], weights: Floats) -> Floats:
    """Return the loss of each trial, with mean 0 and deviation 1 over the successful trials.

    Parameters
    ----------
    results
        Results of the trials; at least one succeeded.
    directions
        Directions of the study.
    weights
        Weights of the objectives, shape (objectives,); ignored if there is one objective.

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
    all_losses = np.full(len(results), np.quantile(loss, _FAILED_QUANTILE))
    all_losses[[result is not None for result in results]] = loss
    return all_losses


def speed_of_loss(results: Sequence[Result], directions: Sequence[StudyDirection]) -> float | None:
    """Return the speed, relative to the fastest trial, that corresponds to one unit of `losses`.

    Parameters
    ----------
    results, directions
        As for `losses`.

    Returns
    -------
    float or None
        None if losses are not speeds: with several objectives, or values that are not positive.
    """
    reached = np.array([result for result in results if result is not None])
    if reached.shape[1] > 1 or reached.min() <= 0:
        return None
    return float(_speeds(reached[:, 0], directions[0]).std())


def noise_of(results: Sequence[Result], errors: Sequence[float], directions: Sequence[StudyDirection]) -> Floats:
    """Return the variance of each of `losses` due to the measurement error, shape (trials,).

    Parameters
    ----------
    results, directions
        As for `losses`.
    errors
        Relative standard error of each value; 0 if it is not known.
    """
    deviation = speed_of_loss(results, directions)
    if not deviation:
        return np.zeros(len(results))
    speeds = np.zeros(len(results))
    ran = np.array([result is not None for result in results])
    speeds[ran] = _speeds(np.array([result[0] for result in results if result is not None]), directions[0])
    return np.asarray(np.square(speeds * np.asarray(errors) / deviation))


def _scaled(values: Floats, direction: StudyDirection) -> Floats:
    """Return the standardized loss of one objective.

    Times become speeds relative to the fastest, which spreads the fast trials and compresses the slow ones, whose
    differences do not matter to the search. Values of any sign become normal scores of their ranks.
    """
    if values.min() > 0:
        return standardized(-_speeds(values, direction))
    ascending = values if direction is StudyDirection.MINIMIZE else -values
    ranks = np.searchsorted(np.sort(ascending), ascending, side="left")
    return standardized(np.asarray(ndtri((ranks + 0.5) / len(values))))


def _speeds(values: Floats, direction: StudyDirection) -> Floats:
    """Return positive values relative to the best one, which becomes 1."""
    return np.asarray(values / values.max() if direction is StudyDirection.MAXIMIZE else values.min() / values)


def standardized(values: Floats) -> Floats:
    """Return values shifted and scaled to mean 0 and deviation 1."""
    centered = values - values.mean()
    return np.asarray(centered / max(float(centered.std()), 1e-6))


class History:
    """Rows and results of trials by number.

    Attributes
    ----------
    begun
        Row of each trial, in the order in which they began.
    results
        Result of each finished trial, in the order in which they ended.
    errors
        Relative standard error of the first value, of the trials that have one.
    """

    def __init__(self) -> None:
        self.begun: dict[int, int] = {}
        self.results: dict[int, Result] = {}
        self.errors: dict[int, float] = {}

    @property
    def first_success(self) -> int:
        """Number of trials that ended before the first success; all if there is none."""
        outcomes = enumerate(self.results.values())
        return next((index for index, result in outcomes if result is not None), len(self.results))

    @property
    def since_best(self) -> int:
        """Number of trials that ended since the one with the lowest first value; 0 if there is none."""
        values = [result[0] if result is not None else np.inf for result in self.results.values()]
        return len(values) - 1 - int(np.argmin(values)) if values else 0

    def successes(self) -> tuple[Rows, Floats]:
        """Return the rows of the successful trials, in the order in which they ended, and their first values."""
        reached = {number: result[0] for number, result in self.results.items() if result is not None}
        return self.rows(list(reached)), np.array(list(reached.values()), np.float64)

    def first_ended(self, count: int) -> list[int]:
        """Return the numbers of the first trials that ended."""
        return list(self.results)[:count]

    def rows(self, numbers: list[int]) -> Rows:
        """Return the rows of trials."""
        return np.array([self.begun[number] for number in numbers], np.int64)

    def results_of(self, numbers: list[int]) -> list[Result]:
        """Return the results of finished trials."""
        return [self.results[number] for number in numbers]


_MAX_FITTED = 256
"""Maximum number of trials that hyperparameters are fitted to."""

_BEST = 10
"""Number of the best trials near which rows are evaluated."""

_MIN_SUCCESS = 0.02
"""Lower limit of the predicted probability of success, as the prediction may be wrong."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted losses of rows.

    Attributes
    ----------
    rows
        The rows, shape (n,).
    mean, deviation
        Mean and standard deviation of the loss, shape (n,).
    success
        Probability of success, shape (n,).
    best
        Lowest loss so far.
    since_best
        Number of trials that ended since then.
    """

    rows: Rows
    mean: Floats
    deviation: Floats
    success: Floats
    best: float
    since_best: int

    def masked(self, mask: NDArray[np.bool_]) -> Prediction:
        """Return the prediction for some of the rows; ``mask`` has shape (n,)."""
        return replace(
            self,
            rows=self.rows[mask],
            mean=self.mean[mask],
            deviation=self.deviation[mask],
            success=self.success[mask],
        )


class Surrogate:
    """A Gaussian process with hyperparameters fitted to the first trials, to which later trials are added.

    Its predictions depend only on the history, not on the times of the calls: the trials are ordered by their end among
    the fitted ones, then by their beginning.

    Parameters
    ----------
    points
        Return the coordinates of rows, shape (rows, coordinates).
    groups
        Group of each coordinate; coordinates of a group share a length scale.
    history
        The trials; at least ``fitted`` of them have ended.
    fitted
        Number of trials that hyperparameters are fitted to, counted by their end; at least one of them succeeded.
    directions
        Directions of the study.
    prior
        Expected speeds from other studies; ignored if there are several objectives.

    Attributes
    ----------
    fitted, prior
        As given.
    best
        Rows of the best of the fitted trials, the best first.
    """

    def __init__(
        self,
        points: Callable[[Rows], Floats],
        groups: NDArray[np.int64],
        history: History,
        fitted: int,
        *,
        directions: Sequence[StudyDirection],
        prior: TransferPrior | None = None,
    ) -> None:
        self.fitted = fitted
        self.prior = prior if len(directions) == 1 else None
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
        chosen = informative(ascending, _MAX_FITTED)
        residual = loss - self._prior_losses(observed, history, results, loss)
        parameters = fit(coordinates[chosen], standardized(residual[chosen]), groups, noise[chosen])
        self._rows: Rows = np.zeros(0, np.int64)
        self._process = GaussianProcess(parameters, points(self._rows), coordinates, noise)

    def set_rows(self, rows: Rows) -> None:
        """Set the rows that `predict` evaluates."""
        self._rows = rows
        self._process.set_points(self._points(rows))

    def predict(self, history: History, weights: Floats) -> Prediction:
        """Predict the rows that were set.

        Parameters
        ----------
        history
            The history of the constructor, with the trials since.
        weights
            Weights of the objectives, shape (objectives,).
        """
        self._add_trials(history)
        results = list(history.results.values())
        ended, numbers = np.array(list(history.results)), np.array(self._numbers)
        reached = losses(results, self._directions, weights)
        failed = np.array([result is None for result in results])
        share = float(failed.mean())
        by_number = np.zeros((3, 1 + int(max(ended.max(), numbers.max()))))
        by_number[:, ended] = np.stack([reached, failed - share, np.ones(len(ended))])
        loss, failures, known = by_number[:, numbers]
        rows = np.concatenate([history.rows(self._numbers), self._rows])
        prior = self._prior_losses(rows, history, results, reached)
        targets = np.stack([loss - prior[: len(numbers)], failures])
        mean, deviation = self._process.predict(targets if share else targets[:1], known > 0)
        mean[0] += prior[len(numbers) :]
        success = 1 - share - mean[1] if share else np.ones(len(self._rows))
        best = int(np.argmin(np.where(failed, np.inf, reached)))
        return Prediction(
            rows=self._rows,
            mean=mean[0],
            deviation=deviation,
            success=np.clip(success, _MIN_SUCCESS, 1.0),
            best=float(reached[best]),
            since_best=len(ended) - 1 - best,
        )

    def _prior_losses(self, rows: Rows, history: History, results: Sequence[Result], loss: Floats) -> Floats:
        """Return the losses of rows that the prior predicts, shape (rows,).

        ``results`` and ``loss`` are those of the first trials of the history that ended.
        """
        if self.prior is None:
            return np.zeros(len(rows))
        ran = np.array([result is not None for result in results])
        times = np.array([result[0] for result in results if result is not None])
        tried = history.rows(history.first_ended(len(results)))
        return self.prior.losses(rows, tried[ran], times, loss[ran])

    def _add_trials(self, history: History) -> None:
        """Add the trials that began since the last call."""
        numbers = list(history.begun)
        added = [number for number in numbers[self._seen :] if number not in self._included]
        for number, point in zip(added, self._points(history.rows(added)), strict=True):
            self._process.observe(point)
            self._numbers.append(number)
        self._seen = len(numbers)
