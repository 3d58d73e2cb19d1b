"""What trials reached, as numbers that a Gaussian process can model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from scipy.special import ndtri

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
