"""A Gaussian process over the rows of a space, updated with a history of trials and fitted again as trials end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from optuna.study import StudyDirection

from autotile.search.embedding import CompiledPoints, Rows
from autotile.search.gaussian_process import Floats, GaussianProcess, Hyperparameters, Posterior, fit, informative
from autotile.search.history import History, losses, standardized
from autotile.search.transfer import ExpectedSpeeds

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
    speed
        Speed relative to the fastest trial of one unit of the loss; None if losses are not speeds.
    """

    rows: Rows
    mean: Floats
    deviation: Floats
    success: Floats
    best: float
    since_best: int
    speed: float | None


class Fit(NamedTuple):
    """Hyperparameters, and the coordinates that they belong to."""

    trials: int
    """Number of trials, counted by their end, that were known; at least one of them succeeded."""
    points: Callable[[Rows], Floats]
    """Return the coordinates of rows, shape (rows, coordinates)."""
    parameters: Hyperparameters


class Surrogate:
    """A Gaussian process over the first trials, to which later trials are added.

    Its predictions depend only on the history, not on the times of the calls: the trials are ordered by their end among
    the first ones, then by their beginning.

    Parameters
    ----------
    fit
        Hyperparameters. Of the trials that they were fitted to, the informative ones are used.
    history
        The trials.
    directions
        Directions of the study.
    prior
        Expected speeds, the mean of the process; ignored if there are several objectives.
    max_first
        Maximum number of the trials of the fit that are used.

    Attributes
    ----------
    fit, prior
        As given.
    best
        Rows of the best of the trials of the fit, the best first.
    """

    def __init__(
        self,
        fit: Fit,
        history: History,
        *,
        directions: Sequence[StudyDirection],
        prior: ExpectedSpeeds | None = None,
        max_first: int,
    ) -> None:
        self.fit = fit
        self.prior = prior if len(directions) == 1 else None
        self._points = fit.points
        self._directions = directions
        ended = history.first_ended(fit.trials)
        ascending = np.argsort(losses(history.values(fit.trials), directions, np.ones(len(directions))), kind="stable")
        self.best: Rows = history.rows(ended[ascending[:_BEST]])
        chosen = informative(ascending, max_first)
        self._indices: NDArray[np.int64] = ended[chosen]
        """Trials of the process, by their index in the history."""
        self._included = set(ended.tolist())
        self._seen = 0
        self._rows: Rows = np.zeros(0, np.int64)
        self._order: NDArray[np.int64] = np.zeros(0, np.int64)
        """Point of the process of each row."""
        self._slots: dict[int, int] = {}
        """The same by row."""
        self._free: list[int] = []
        """Points of the process of rows that are not evaluated any more."""
        observed = fit.points(history.rows(self._indices))
        noise = history.noise(fit.trials, directions)[chosen]
        self._process = GaussianProcess(fit.parameters, fit.points(self._rows), observed, noise)

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

    def among(self, indices: NDArray[np.int64]) -> Posterior:
        """Return the posterior at some of the rows, by their indices, until the next call of `predict`."""
        return self._process.among(self._order[indices])

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
        ended, scores = history.first_ended(history.ended), history.scores(self._directions, weights)
        share = float(np.count_nonzero(scores.failed)) / len(ended)
        by_index = np.zeros((3, history.begun))
        by_index[0, ended] = scores.losses
        by_index[1, ended] = scores.failed - share
        by_index[2, ended] = 1
        loss, failures, known = by_index[:, self._indices]
        targets = np.stack([loss, failures]) if share else loss[None]
        prior = np.zeros(0)
        if self.prior is not None:
            rows = np.concatenate([history.rows(self._indices), self._rows])
            prior = _prior_losses(self.prior, rows, history, history.values(history.ended), scores.losses)
            targets[0] -= prior[: len(self._indices)]
        mean, deviation = self._process.predict(targets, known > 0)
        mean, deviation = mean[:, self._order], deviation[self._order]
        if self.prior is not None:
            mean[0] += prior[len(self._indices) :]
        success = 1 - share - mean[1] if share else np.ones(len(self._rows))
        return Prediction(
            rows=self._rows,
            mean=mean[0],
            deviation=deviation,
            success=np.clip(success, _MIN_SUCCESS, 1.0),
            best=float(scores.losses[scores.best]),
            since_best=len(ended) - 1 - scores.best,
            speed=scores.speed,
        )

    def _add_trials(self, history: History) -> None:
        """Add the trials that began since the last call."""
        added = [index for index in range(self._seen, history.begun) if index not in self._included]
        self._seen = history.begun
        if not added:
            return
        self._process.observe(self._points(history.rows(np.array(added))))
        self._indices = np.append(self._indices, added)


def fitted_parameters(
    points: Callable[[Rows], Floats],
    groups: NDArray[np.int64],
    history: History,
    count: int,
    *,
    directions: Sequence[StudyDirection],
    prior: ExpectedSpeeds | None,
    start: Hyperparameters | None,
) -> Hyperparameters:
    """Fit hyperparameters to the first trials that ended.

    Parameters
    ----------
    points
        Return the coordinates of rows, shape (rows, coordinates).
    history, directions, prior
        As for `Surrogate`.
    groups
        Group of each coordinate; coordinates of a group share a length scale.
    count
        Number of trials, counted by their end; at least one of them succeeded.
    start
        Hyperparameters of the previous fit, from which a few steps suffice; None for the first one.
    """
    values = history.values(count)
    loss = losses(values, directions, np.ones(len(directions)))
    observed = history.rows(history.first_ended(count))
    residual = loss
    if prior is not None and len(directions) == 1:
        residual = loss - _prior_losses(prior, observed, history, values, loss)
    chosen = informative(np.argsort(loss, kind="stable"), _MAX_FITTED)
    noise = history.noise(count, directions)[chosen]
    targets = standardized(residual[chosen])
    steps = _FIRST_STEPS if start is None else _LATER_STEPS
    return fit(points(observed[chosen]), targets, groups, noise, start=start, max_steps=steps)


def _prior_losses(prior: ExpectedSpeeds, rows: Rows, history: History, values: Floats, loss: Floats) -> Floats:
    """Return the losses of rows that a prior predicts, shape (rows,).

    ``values`` and ``loss`` are those of the first trials of the history that ended.
    """
    ran = ~np.isnan(values[:, 0])
    tried = history.rows(history.first_ended(len(values)))
    return prior.losses(rows, tried[ran], values[ran, 0], loss[ran])


class Refits:
    """The fits of one model. Each begins at the previous one, so that a few steps suffice.

    A fit depends on the trials that had ended by then, not on the time of the call.

    Parameters
    ----------
    points
        Return the coordinates of rows by their parameters, shape (rows, coordinates).
    groups
        Group of each of these, see `autotile.search.embedding.Embedding`.
    history
        The trials.
    directions
        Directions of the study.
    prior
        Expected speeds.
    features
        Resources by row, which are further coordinates, see `autotile.search.embedding.CompiledPoints`; None for none.
    """

    def __init__(
        self,
        points: Callable[[Rows], Floats],
        groups: NDArray[np.int64],
        history: History,
        *,
        directions: Sequence[StudyDirection],
        prior: ExpectedSpeeds | None = None,
        features: Mapping[int, Floats] | None = None,
    ) -> None:
        self._points = points
        self._groups = groups
        self._history = history
        self._directions = directions
        self._prior = prior
        self._features = features
        self._fits: dict[int, Fit] = {}

    def newest(self) -> Fit:
        """Return the fit that is due by now; a trial must have succeeded."""
        return self._fit(max(due_fit(self._history.ended), self._first))

    @property
    def _first(self) -> int:
        """Number of trials of the first fit, of which at least one succeeded."""
        return max(STARTUP, self._history.first_success + 1)

    def _fit(self, due: int) -> Fit:
        """Return the fit of a number of trials, after those before it, at which it begins."""
        previous: Fit | None = None
        for count in range(self._first, due + 1) if due not in self._fits else ():
            if max(due_fit(count), self._first) == count:
                previous = self._fits[count] = self._fits.get(count) or self._fitted(count, previous)
        return self._fits[due]

    def _fitted(self, count: int, previous: Fit | None) -> Fit:
        points, groups = self._coordinates(count)
        start = previous.parameters if previous is not None else None
        return Fit(
            count,
            points,
            fitted_parameters(
                points, groups, self._history, count, directions=self._directions, prior=self._prior, start=start
            ),
        )

    def _coordinates(self, count: int) -> tuple[Callable[[Rows], Floats], NDArray[np.int64]]:
        """Return the coordinates after a number of trials had ended, and their groups."""
        if self._features is None:
            return self._points, self._groups
        fitted = self._history.rows(self._history.first_ended(count))
        compiled = CompiledPoints(self._points, self._groups, self._features, fitted)
        return compiled, compiled.groups


@cache
def due_fit(ended: int) -> int:
    """Return the largest number of trials up to ``ended`` at which hyperparameters are fitted."""
    due = STARTUP
    growth = _GROWTH
    while (after := max(due + 2, int(due * growth))) <= ended:
        due = after
        growth = _GROWTH if due < _SETTLED_TRIALS else _SETTLED_GROWTH
    return due
