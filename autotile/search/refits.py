"""Hyperparameters of a model, which are fitted again as trials end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray
from optuna.study import StudyDirection

from autotile.search.embedding import CompiledPoints
from autotile.search.gaussian_process import Floats
from autotile.search.history import History
from autotile.search.row_sampler import Rows
from autotile.search.surrogate import Fit, fitted_parameters
from autotile.search.transfer import ExpectedSpeeds

STARTUP = 6
"""Number of trials that end before a model is used."""

_GROWTH = 1.1
"""Growth of the number of ended trials at which hyperparameters are fitted again."""

_SETTLED_TRIALS = 100
_SETTLED_GROWTH = 1.25
"""The same after 100 trials: hyperparameters change little by then."""


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
