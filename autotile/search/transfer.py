"""Speeds that are expected before the first trial: from other studies of a kernel, or from estimated times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from autotile.core.model import Config
from autotile.core.text import plural
from autotile.kernel.spec import Parameter
from autotile.search.gaussian_process import Embedding, Floats, GaussianProcess, Rows, fit, informative, one_blas_thread
from autotile.space.search_space import SearchSpace

_MAX_FITTED = 384
"""Maximum number of trials of a source that its model is fitted to."""
_MIN_TRIALS = 6
"""Minimum number of trials of a source; fewer are not worth a model."""
_MAX_ROWS = 1 << 17
"""Maximum number of rows that a source's model predicts; of a larger space, the rows of the sources' own trials and a
uniform sample."""
_PRIOR_TRIALS = 4
"""Weight of the prior rank correlation, in trials of this study."""
_PRIOR_CORRELATION = 0.7
"""Rank correlation of a source with this study that is assumed without trials. Over 800 configurations of five recorded
kernels, each on two GPUs of seven pairs, it is 0.47, 0.65, 0.75, 0.85, 0.90, 0.92 and 1.00."""
_MIN_CORRELATION = 0.5
"""Estimate of the rank correlation below which a source is ignored."""
_TESTED_TRIALS = 16
"""Number of the first successful trials that test the sources: later ones lie where the models expect fast rows, over
which the correlation is low even if the source is right."""
_FIRST_TURNS = 12
"""Number of proposals among which most follow the sources, unless these are ignored."""
_PERIODS = ((5, 2), (10, 5))
_LAST_PERIOD = 12
"""Periods of the proposals that follow the sources after the first ones, each up to a number of trials since the best
one; docs/search.md has the reason."""


Source = tuple[str, Sequence[tuple[Config, float]]]
"""Name of another study in messages, and the configurations that ran in it with their times in microseconds."""


@dataclass(frozen=True, slots=True)
class MisleadingSource:
    """A source that the results of a study contradict.

    ``correlation`` is the rank correlation of the speeds that it predicts with those measured in so many trials.
    """

    name: str
    correlation: float
    trials: int

    def __str__(self) -> str:
        return f"{self.name} (rank correlation {self.correlation:.1f} over {plural(self.trials, 'trial')})"

    def to_json(self) -> dict[str, Any]:
        """Return a plain dictionary."""
        return {"study": self.name, "rank_correlation": round(self.correlation, 3), "trials": self.trials}


Estimate = Callable[[SearchSpace], Floats | None]
"""Estimates the time of each row of a space, shape (rows,); None if it cannot."""


class ExpectedSpeeds:
    """Relative speeds of rows that are expected before any trial: by models of other studies, or by estimated times.

    ``rows`` are those that are predicted, ascending, and ``by_source`` their speeds, shape (sources, rows), of sources
    with ``names``; ``best`` are the rows in the order of their prediction before any trial, the best first; None for
    that of the speeds.
    """

    def __init__(self, rows: Rows, by_source: Floats, names: Sequence[str] = (), best: Rows | None = None) -> None:
        self.rows = rows
        self._by_source = by_source
        self._names = names
        untried = self.combined(np.zeros(0, np.int64), np.zeros(0))
        self.best = rows[np.argsort(-untried, kind="stable")] if best is None else best

    def combined(self, tried: Rows, times_us: Floats) -> Floats:
        """Return the speeds of the predicted rows, given the successful rows of this study and their times.

        They are the mean of the sources, weighted by how well they predict these times; 0 for ignored ones.
        """
        if len(self._by_source) == 1:
            return np.asarray(self._by_source[0])
        estimates = self._estimates(tried, times_us)
        right = estimates >= _MIN_CORRELATION
        weights = np.square(np.maximum(estimates, 1e-3)) * (right if right.any() else 1.0)
        return np.asarray(weights / weights.sum()) @ self._by_source

    def speeds(self, rows: Rows, tried: Rows, times_us: Floats) -> Floats:
        """Predict the speed of rows relative to the fastest, shape (rows,); the mean for unknown rows."""
        speeds = self.combined(tried, times_us)
        predicted = np.full(len(rows), float(speeds.mean()))
        indices, known = self._indices(rows)
        predicted[known] = speeds[indices[known]]
        return predicted

    def losses(self, rows: Rows, tried: Rows, times_us: Floats, losses: Floats) -> Floats:
        """Predict the loss of rows, on the scale of the losses of the rows that were tried, at least one.

        The loss is assumed to decrease linearly with the predicted speed. The slope is fitted to the rows that were
        tried; its prior is the slope of the loss over the speed measured in this study.
        """
        speeds = self.speeds(np.concatenate([tried, rows]), tried, times_us)
        of_tried, of_rows = speeds[: len(tried)], speeds[len(tried) :]
        spread = float((times_us.min() / times_us).std())
        usual_slope = float(losses.std()) / spread if spread > 0 else 0.0
        centered = of_tried - of_tried.mean()
        prior = _PRIOR_TRIALS * float(speeds.var())
        slope = (prior * usual_slope - float(centered @ losses)) / max(prior + float(centered @ centered), 1e-12)
        slope = min(max(slope, 0.0), 2 * usual_slope)
        return np.asarray(losses.mean() - slope * (of_rows - of_tried.mean()))

    def leads(self, turn: int, tried: Rows, times_us: Floats, since_best: int) -> bool:
        """Return True if a proposal should follow the sources.

        ``turn`` is the number of earlier proposals, and ``since_best`` that of trials that ended since the best one.
        """
        estimate = float(self._estimates(tried, times_us).max())
        if turn == 0 or estimate < _MIN_CORRELATION:
            return turn == 0
        if turn < _FIRST_TURNS:  # the results of the first and the second are the first test of the sources
            return turn % 4 != 1
        period = next((period for patience, period in _PERIODS if since_best < patience), _LAST_PERIOD)
        return turn % period == 0

    def misleading(self, tried: Rows, times_us: Floats) -> tuple[MisleadingSource, ...]:
        """Return the sources that are ignored, given the successful rows of this study and their times."""
        correlations, count = self._correlations(tried, times_us)
        estimates = self._estimates(tried, times_us)
        return tuple(
            MisleadingSource(name, float(correlation), count)
            for name, correlation, estimate in zip(self._names, correlations, estimates, strict=True)
            if estimate < _MIN_CORRELATION
        )

    def _estimates(self, tried: Rows, times_us: Floats) -> Floats:
        """Estimate the rank correlation of each source: the mean of the measured and the prior one by their trials."""
        correlations, count = self._correlations(tried, times_us)
        prior = _PRIOR_TRIALS * _PRIOR_CORRELATION
        return (prior + count * correlations) / (_PRIOR_TRIALS + count)

    def _indices(self, rows: Rows) -> tuple[Rows, NDArray[np.bool_]]:
        """Return the index of each row among the predicted ones, and whether it is one of them."""
        indices = np.minimum(np.searchsorted(self.rows, rows), len(self.rows) - 1)
        return indices, self.rows[indices] == rows

    def _correlations(self, tried: Rows, times_us: Floats) -> tuple[Floats, int]:
        """Return the rank correlation of each source with the first results, and their number; 0 for less than two."""
        indices, known = self._indices(tried)
        tested = np.flatnonzero(known)[:_TESTED_TRIALS]
        if len(tested) < 2:
            return np.zeros(len(self._by_source)), 0
        measured = np.argsort(np.argsort(-times_us[tested])).astype(np.float64)
        correlations = []
        for speeds in self._by_source[:, indices[tested]]:
            predicted = np.argsort(np.argsort(speeds)).astype(np.float64)
            is_constant = predicted.std() == 0 or measured.std() == 0
            correlations.append(0.0 if is_constant else float(np.corrcoef(predicted, measured)[0, 1]))
        return np.array(correlations), len(tested)


def estimated_speeds(space: SearchSpace, estimate: Estimate) -> ExpectedSpeeds | None:
    """Return the speeds by the estimated times of a space, or of a sample of a very large one; None without a time."""
    rows = _rows_to_predict(space, ())
    times_us = estimate(space if len(rows) == len(space) else replace(space, codes=space.codes[rows]))
    if times_us is None:
        return None
    best = rows[np.argsort(times_us, kind="stable")]
    return ExpectedSpeeds(rows, (times_us.min() / times_us)[None], best=best)


def transferred_speeds(space: SearchSpace, sources: Sequence[Source]) -> ExpectedSpeeds | None:
    """Return the speeds by one model per source; None without a source of at least six trials.

    A source is modelled over the parameters that it shares with this space, by the Gaussian process that the search
    itself uses, so that it also predicts rows that the source did not try and values that it did not have.
    """
    rows = _rows_to_predict(space, sources)
    with one_blas_thread():
        found = [(name, own) for name, timed in sources if (own := _speeds(space, rows, timed)) is not None]
    return ExpectedSpeeds(rows, np.array([own for _, own in found]), [name for name, _ in found]) if found else None


def _rows_to_predict(space: SearchSpace, sources: Sequence[Source]) -> Rows:
    if len(space) <= _MAX_ROWS:
        return np.arange(len(space))
    own = [row for _, timed in sources for config, _ in timed if (row := space.row_of(config)) is not None]
    drawn = np.random.default_rng(0).integers(len(space), size=_MAX_ROWS)
    return np.unique(np.append(drawn, own)).astype(np.int64)


def _speeds(space: SearchSpace, rows: Rows, timed: Sequence[tuple[Config, float]]) -> Floats | None:
    configs, times = [config for config, _ in timed], np.array([time_us for _, time_us in timed], np.float64)
    shared = [parameter for parameter in space.parameters if all(parameter.name in config for config in configs)]
    if len(configs) < _MIN_TRIALS or not shared:
        return None
    joint = []  # the parameters with the values that only the source has appended
    for parameter in shared:
        others = dict.fromkeys(config[parameter.name] for config in configs)
        values = (*parameter.values, *(value for value in others if value not in parameter.values))
        joint.append(Parameter(parameter.name, values))
    embedding = Embedding(joint)
    codes = np.array([[each.values.index(config[each.name]) for each in joint] for config in configs])
    chosen = informative(np.argsort(times, kind="stable"), _MAX_FITTED)
    speeds = times.min() / times[chosen]
    center, spread = float(speeds.mean()), max(float(speeds.std()), 1e-6)
    targets = (speeds - center) / spread
    points = embedding.of(codes[chosen])
    column_of = {parameter.name: position for position, parameter in enumerate(space.parameters)}
    own = np.stack([space.codes[rows, column_of[each.name]] for each in joint], axis=1).astype(np.int64)
    process = GaussianProcess(fit(points, targets, embedding.groups), embedding.of(own), points)
    mean, _ = process.predict(targets[None], np.ones(len(chosen), np.bool_))
    predicted = np.clip(center + spread * mean[0], 0.0, 1.0)
    for config, time in zip(configs, times, strict=True):  # measured speeds replace predicted ones
        row = space.row_of(config)
        index = int(np.searchsorted(rows, row)) if row is not None else len(rows)
        if index < len(rows) and rows[index] == row:
            predicted[index] = times.min() / time
    return np.asarray(predicted)
