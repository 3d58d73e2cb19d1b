"""The best of the rows that a model predicts, and rows that are chosen among them without a result in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotile.search.gaussian_process import Floats, Posterior, log_expected_improvement
from autotile.search.surrogate import Prediction, Surrogate

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
