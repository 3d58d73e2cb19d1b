"""Rows and results of trials, and their losses: what a model is fitted to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from scipy.special import ndtri

from autotile.search.embedding import Rows
from autotile.search.gaussian_process import Floats

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


@dataclass(frozen=True, slots=True)
class Scores:
    """The results of all trials that ended, as a model needs them.

    Attributes
    ----------
    losses
        See `losses`, shape (trials,).
    failed
        Whether each failed, shape (trials,).
    best
        Index of the best one.
    speed
        See `speed_of_loss`.
    """

    losses: Floats
    failed: NDArray[np.bool_]
    best: int
    speed: float | None


class History:
    """Rows and results of trials, by their index in the order in which they began.

    Attributes
    ----------
    begun, ended
        Number of trials that began, and that ended.
    first_success
        Number of trials that ended before the first success; all if there is none.
    """

    def __init__(self) -> None:
        self.begun = 0
        self.ended = 0
        self.first_success = 0
        self._rows: Rows = np.zeros(64, np.int64)
        self._order: NDArray[np.int64] = np.zeros(64, np.int64)
        self._values: Floats = np.zeros((64, 1))
        self._errors: Floats = np.zeros(64)
        self._scores: tuple[int, Scores] | None = None
        """The trials of one objective, after the number of trials that they are of."""

    def begin(self, row: int) -> int:
        """Add a trial that begins; return its index."""
        if self.begun == len(self._rows):
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
            self._order = np.concatenate([self._order, np.zeros_like(self._order)])
            self._values = np.concatenate([self._values, np.zeros_like(self._values)])
            self._errors = np.concatenate([self._errors, np.zeros_like(self._errors)])
        self._rows[self.begun] = row
        self.begun += 1
        return self.begun - 1

    def end(self, index: int, result: Result, error: float = 0.0) -> None:
        """Add the result of a trial, and the relative standard error of its first value, 0 if it is not known."""
        if result is None and self.first_success == self.ended:
            self.first_success += 1
        if result is not None and len(result) != self._values.shape[1]:  # only failures so far
            self._values = np.full((len(self._values), len(result)), np.nan)
        self._order[self.ended] = index
        self._values[self.ended] = np.nan if result is None else result
        self._errors[self.ended] = error
        self.ended += 1

    def rows(self, indices: NDArray[np.int64]) -> Rows:
        """Return the rows of trials."""
        return self._rows[indices]

    def first_ended(self, count: int) -> NDArray[np.int64]:
        """Return the indices of the first trials that ended, in that order."""
        return self._order[: min(count, self.ended)]

    def values(self, count: int) -> Floats:
        """Return the values of the first trials that ended, shape (count, objectives); NaN for failures."""
        return self._values[: min(count, self.ended)]

    def scores(self, directions: Sequence[StudyDirection], weights: Floats) -> Scores:
        """Return the scores of the trials that ended, at least one of which succeeded; see `losses`."""
        if self._scores is not None and self._scores[0] == self.ended and len(directions) == 1:
            return self._scores[1]
        values = self.values(self.ended)
        failed = np.isnan(values[:, 0])
        reached = losses(values, directions, weights)
        best = int(np.argmin(np.where(failed, np.inf, reached)))
        scores = Scores(reached, failed, best, speed_of_loss(values, directions))
        self._scores = self.ended, scores
        return scores

    @property
    def since_best(self) -> int:
        """Number of trials that ended since the one with the lowest first value; 0 if there is none."""
        first = self._values[: self.ended, 0]
        return self.ended - 1 - int(np.argmin(np.where(np.isnan(first), np.inf, first))) if self.ended else 0

    def successes(self) -> tuple[Rows, Floats]:
        """Return the rows of the successful trials, in the order in which they ended, and their first values."""
        first = self._values[: self.ended, 0]
        ran = ~np.isnan(first)
        return self._rows[self._order[: self.ended][ran]], first[ran]

    def noise(self, count: int, directions: Sequence[StudyDirection]) -> Floats:
        """Return the variance of each of `losses` due to the measurement error, of the first trials that ended."""
        values = self.values(count)
        deviation = speed_of_loss(values, directions)
        noise = np.zeros(len(values))
        if deviation:
            ran = ~np.isnan(values[:, 0])
            speeds = _speeds(values[ran, 0], directions[0])
            noise[ran] = np.square(speeds * self._errors[: len(values)][ran] / deviation)
        return noise


def losses(values: Floats, directions: Sequence[StudyDirection], weights: Floats) -> Floats:
    """Return the loss of each trial, with mean 0 and deviation 1 over the successful trials.

    Parameters
    ----------
    values
        Values of the trials, shape (trials, objectives); NaN for failures. At least one trial succeeded.
    directions
        Directions of the study.
    weights
        Weights of the objectives, shape (objectives,); ignored if there is one objective.

    Returns
    -------
    numpy.ndarray
        Shape (trials,).
    """
    ran = ~np.isnan(values[:, 0])
    columns = [_scaled(column, direction) for column, direction in zip(values[ran].T, directions, strict=True)]
    loss = columns[0]
    if len(columns) > 1:
        weighted = weights[:, None] * np.stack(columns)
        loss = standardized(weighted.max(axis=0) + _SUM_SHARE * weighted.sum(axis=0))
    if ran.all():
        return loss
    all_losses = np.full(len(values), np.quantile(loss, _FAILED_QUANTILE))
    all_losses[ran] = loss
    return all_losses


def speed_of_loss(values: Floats, directions: Sequence[StudyDirection]) -> float | None:
    """Return the speed, relative to the fastest trial, that corresponds to one unit of `losses`.

    Parameters
    ----------
    values, directions
        As for `losses`.

    Returns
    -------
    float or None
        None if losses are not speeds: with several objectives, or values that are not positive.
    """
    first = values[:, 0]
    measured = first[~np.isnan(first)]
    if values.shape[1] > 1 or measured.min() <= 0:
        return None
    return _deviation(_speeds(measured, directions[0]))


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
    return np.asarray((values - values.mean()) / max(_deviation(values), 1e-6))


def _deviation(values: Floats) -> float:
    """Return the standard deviation; `numpy.std` takes some times as long for the few values of a search."""
    centered = values - values.mean()
    return math.sqrt(float(centered @ centered) / len(values))
