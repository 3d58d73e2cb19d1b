"""Transfer from other studies of a kernel: at other sizes, on other GPUs, or of older versions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotile.core.model import Config
from autotile.kernel.spec import Parameter
from autotile.search.embedding import Embedding
from autotile.search.gaussian_process import Floats, GaussianProcess, fit, informative, one_blas_thread
from autotile.search.row_sampler import MAX_EVALUATED_ROWS, Rows
from autotile.space.search_space import SearchSpace

_MAX_FITTED = 384
"""Maximum number of trials of a source that its model is fitted to."""
_MIN_TRIALS = 6
"""Minimum number of trials of a source; fewer are not worth a model."""
_MAX_ROWS = 16 * MAX_EVALUATED_ROWS
"""Maximum number of rows that a source's model predicts; of a larger space, the rows of the sources' own trials and a
uniform sample."""
_PRIOR_TRIALS = 4
"""Weight of the prior rank correlation, in trials of this study."""
_PRIOR_CORRELATION = 0.7
"""Rank correlation of a source with this study that is assumed without trials. Over 800 configurations of five recorded
kernels, each on two GPUs of seven pairs, it is 0.47, 0.65, 0.75, 0.85, 0.90, 0.92 and 1.00."""


@dataclass(frozen=True, slots=True)
class Source:
    """Successful trials of another study.

    Attributes
    ----------
    name
        Name of the study in messages.
    configs, times_us
        Configuration and time in microseconds of each trial.
    """

    name: str
    configs: Sequence[Config]
    times_us: Sequence[float]


class TransferPrior:
    """Relative speeds of rows, predicted by one model per source.

    A source is modelled over the parameters that it shares with this space, by the Gaussian process that the search
    itself uses, so that it also predicts rows that the source did not try and values that it did not have.

    Parameters
    ----------
    space
        The space that is searched.
    sources
        The sources; those with fewer than six trials are ignored.

    Attributes
    ----------
    rows
        Rows that are predicted, ascending.
    best
        The same rows in the order of their prediction before any trial, the best first.
    """

    def __init__(self, space: SearchSpace, sources: Sequence[Source]) -> None:
        self.rows: Rows = _rows_to_predict(space, sources)
        with one_blas_thread():
            speeds = [found for source in sources if (found := _speeds(space, self.rows, source)) is not None]
        self._speeds: Floats = np.array(speeds).reshape(len(speeds), len(self.rows))
        untried = self._weights(np.zeros(0, np.int64), np.zeros(0)) @ self._speeds
        self.best: Rows = self.rows[np.argsort(-untried, kind="stable")]

    def __bool__(self) -> bool:
        return len(self._speeds) > 0

    def speeds(self, rows: Rows, tried: Rows, times_us: Floats) -> Floats:
        """Predict the speed of rows relative to a source's fastest, shape (rows,); the mean for unknown rows.

        Parameters
        ----------
        rows
            Rows to predict.
        tried, times_us
            Successful rows of this study and their times; sources are weighted by how well they predict these.
        """
        combined = self._weights(tried, times_us) @ self._speeds
        predicted = np.full(len(rows), float(combined.mean()))
        indices, known = self._indices(rows)
        predicted[known] = combined[indices[known]]
        return predicted

    def losses(self, rows: Rows, tried: Rows, times_us: Floats, losses: Floats) -> Floats:
        """Predict the loss of rows, on the scale of the losses of the rows that were tried.

        The loss is assumed to decrease linearly with the predicted speed. The slope is fitted to the rows that were
        tried; its prior is the slope of the loss over the speed measured in this study.

        Parameters
        ----------
        rows
            Rows to predict.
        tried, times_us, losses
            Successful rows of this study, at least one, with their times and their losses.
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

    def _weights(self, tried: Rows, times_us: Floats) -> Floats:
        """Return the weight of each source, by its rank correlation with the results of this study."""
        indices, known = self._indices(tried)
        count = int(np.count_nonzero(known))
        weights = np.full(len(self._speeds), _PRIOR_CORRELATION)
        if count > 2:
            measured = _ranks(-times_us[known])
            for index, speeds in enumerate(self._speeds[:, indices[known]]):
                correlation = _correlation(_ranks(speeds), measured)
                weights[index] = (_PRIOR_TRIALS * _PRIOR_CORRELATION + count * correlation) / (_PRIOR_TRIALS + count)
        weights = np.square(np.maximum(weights, 1e-3))
        return np.asarray(weights / weights.sum())

    def _indices(self, rows: Rows) -> tuple[Rows, NDArray[np.bool_]]:
        """Return the index of each row among the predicted ones, and whether it is one of them."""
        indices = np.minimum(np.searchsorted(self.rows, rows), len(self.rows) - 1)
        return indices, self.rows[indices] == rows


def _rows_to_predict(space: SearchSpace, sources: Sequence[Source]) -> Rows:
    if len(space) <= _MAX_ROWS:
        return np.arange(len(space))
    own = [row for source in sources for config in source.configs if (row := space.row_of(config)) is not None]
    drawn = np.random.default_rng(0).integers(len(space), size=_MAX_ROWS)
    return np.unique(np.append(drawn, own)).astype(np.int64)


def _speeds(space: SearchSpace, rows: Rows, source: Source) -> Floats | None:
    """Predict the relative speed of each row from one source; None if it has too little in common with the space."""
    shared = [parameter for parameter in space.parameters if all(parameter.name in config for config in source.configs)]
    if len(source.configs) < _MIN_TRIALS or not shared:
        return None
    joint = [_with_values(parameter, source.configs) for parameter in shared]
    embedding = Embedding(joint)
    codes = np.array([_codes_of(config, joint) for config in source.configs])
    times = np.asarray(source.times_us, np.float64)
    chosen = informative(np.argsort(times, kind="stable"), _MAX_FITTED)
    speeds = times.min() / times[chosen]
    center, spread = float(speeds.mean()), max(float(speeds.std()), 1e-6)
    targets = (speeds - center) / spread
    points = embedding.of(codes[chosen])
    process = GaussianProcess(
        fit(points, targets, embedding.groups), embedding.of(_codes_among(space, rows, joint)), points
    )
    mean, _ = process.predict(targets[None], np.ones(len(chosen), np.bool_))
    predicted = np.clip(center + spread * mean[0], 0.0, 1.0)
    for config, time in zip(source.configs, times, strict=True):  # measured speeds replace predicted ones
        row = space.row_of(config)
        index = int(np.searchsorted(rows, row)) if row is not None else len(rows)
        if index < len(rows) and rows[index] == row:
            predicted[index] = times.min() / time
    return np.asarray(predicted)


def _codes_of(config: Config, parameters: Sequence[Parameter]) -> list[int]:
    return [parameter.values.index(config[parameter.name]) for parameter in parameters]


def _with_values(parameter: Parameter, configs: Sequence[Config]) -> Parameter:
    """Return the parameter with the values that only the source has appended."""
    others = dict.fromkeys(config[parameter.name] for config in configs)
    return Parameter(parameter.name, (*parameter.values, *(v for v in others if v not in parameter.values)))


def _codes_among(space: SearchSpace, rows: Rows, shared: Sequence[Parameter]) -> NDArray[np.int64]:
    index = {parameter.name: position for position, parameter in enumerate(space.parameters)}
    columns = [space.codes[rows, index[parameter.name]] for parameter in shared]
    return np.stack(columns, axis=1).astype(np.int64)


def _ranks(values: Floats) -> Floats:
    return np.argsort(np.argsort(values)).astype(np.float64)


def _correlation(a: Floats, b: Floats) -> float:
    if a.std() == 0 or b.std() == 0:
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])
