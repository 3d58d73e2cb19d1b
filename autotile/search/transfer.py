"""What trials of other studies let one expect of a space: the same kernel at another size, on another GPU, or older."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotile.core.model import Config
from autotile.kernel.spec import Parameter
from autotile.search.embedding import Embedding
from autotile.search.gaussian_process import GaussianProcess, fit, informative, one_blas_thread
from autotile.search.row_sampler import WHOLE
from autotile.space.search_space import SearchSpace

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]

_LEARNT = 384
"""Most trials of a source that a model of it is fitted to."""
_LEAST = 6
"""A source with fewer trials that ran says nothing worth a model."""
_LARGEST = 16 * WHOLE
"""Rows that a model is asked of; of a larger space the source's own best rows and some from anywhere."""
_TRUST = 4
"""Trials of this study that the belief in a source is worth before there are any."""
_BELIEF = 0.7
"""Rank correlation that a source is taken to have then. Over 800 configurations of five recorded kernels, each on two
GPUs of seven pairs, it is 0.47, 0.65, 0.75, 0.85, 0.90, 0.92 and 1.00."""


@dataclass(frozen=True, slots=True)
class Source:
    """Trials of another study that ran.

    Attributes
    ----------
    name
        How the study is told to a person.
    configs, times_us
        A configuration and its time for each trial.
    """

    name: str
    configs: Sequence[Config]
    times_us: Sequence[float]


class Expectation:
    """Relative speeds that rows are expected to have, by one model a source.

    A source is modelled over the parameters that it shares with this space, by the same Gaussian process that the
    search itself uses, so that rows which the source never tried, and values that it did not have, are answered too.

    Parameters
    ----------
    space
        The space that is searched.
    sources
        Those with six trials or more count.
    """

    def __init__(self, space: SearchSpace, sources: Sequence[Source]) -> None:
        self.rows: Rows = _rows_to_ask(space, sources)
        """Rows of which something is expected, ascending."""
        with one_blas_thread():
            speeds = [found for source in sources if (found := _expected(space, self.rows, source)) is not None]
        self._speeds: Floats = np.array(speeds).reshape(len(speeds), len(self.rows))
        untried = self._weights(np.zeros(0, np.int64), np.zeros(0)) @ self._speeds
        self.best: Rows = self.rows[np.argsort(-untried, kind="stable")]
        """The same, in the order of what is expected before any are tried, the best first."""

    def __bool__(self) -> bool:
        return len(self._speeds) > 0

    def of(self, rows: Rows, tried: Rows, times_us: Floats) -> Floats:
        """Expected speed of rows relative to a source's fastest, shape (rows,); the mean where nothing is expected.

        Parameters
        ----------
        rows
            Rows to answer for.
        tried, times_us
            Rows of this study that ran, with their times: sources count the more, the better they have predicted those.
        """
        combined = self._weights(tried, times_us) @ self._speeds
        found = np.full(len(rows), float(combined.mean()))
        places, known = self._places(rows)
        found[known] = combined[places[known]]
        return found

    def losses(self, rows: Rows, tried: Rows, times_us: Floats, losses: Floats) -> Floats:
        """Expected loss of rows, on the scale of the losses of those that were tried.

        The loss is taken to fall in proportion to the expected speed, at a rate that is fitted to what was tried: at
        first the rate at which it falls with the speed measured here.

        Parameters
        ----------
        rows
            Rows to answer for.
        tried, times_us, losses
            Rows of this study that ran, their times and their losses; one at least.
        """
        speeds = self.of(np.concatenate([tried, rows]), tried, times_us)
        here, there = speeds[: len(tried)], speeds[len(tried) :]
        spread = float((times_us.min() / times_us).std())
        usual = float(losses.std()) / spread if spread > 0 else 0.0
        away = here - here.mean()
        prior = _TRUST * float(speeds.var())
        slope = (prior * usual - float(away @ losses)) / max(prior + float(away @ away), 1e-12)
        slope = min(max(slope, 0.0), 2 * usual)
        return np.asarray(losses.mean() - slope * (there - here.mean()))

    def _weights(self, tried: Rows, times_us: Floats) -> Floats:
        places, known = self._places(tried)
        count = int(np.count_nonzero(known))
        weights = np.full(len(self._speeds), _BELIEF)
        if count > 2:
            here = _ranks(-times_us[known])
            for index, speeds in enumerate(self._speeds[:, places[known]]):
                agreement = _correlation(_ranks(speeds), here)
                weights[index] = (_TRUST * _BELIEF + count * agreement) / (_TRUST + count)
        weights = np.square(np.maximum(weights, 1e-3))
        return np.asarray(weights / weights.sum())

    def _places(self, rows: Rows) -> tuple[Rows, NDArray[np.bool_]]:
        places = np.minimum(np.searchsorted(self.rows, rows), len(self.rows) - 1)
        return places, self.rows[places] == rows


def _rows_to_ask(space: SearchSpace, sources: Sequence[Source]) -> Rows:
    if len(space) <= _LARGEST:
        return np.arange(len(space))
    own = [row for source in sources for config in source.configs if (row := space.row_of(config)) is not None]
    drawn = np.random.default_rng(0).integers(len(space), size=_LARGEST)
    return np.unique(np.append(drawn, own)).astype(np.int64)


def _expected(space: SearchSpace, rows: Rows, source: Source) -> Floats | None:
    """Relative speed of each row by a model of one source; None where it has too little in common with the space."""
    shared = [parameter for parameter in space.parameters if all(parameter.name in config for config in source.configs)]
    if len(source.configs) < _LEAST or not shared:
        return None
    joint = [_with_values(parameter, source.configs) for parameter in shared]
    embedding = Embedding(joint)
    codes = np.array([_codes_of(config, joint) for config in source.configs])
    times = np.asarray(source.times_us, np.float64)
    chosen = informative(np.argsort(times, kind="stable"), _LEARNT)
    speeds = times.min() / times[chosen]
    middle, spread = float(speeds.mean()), max(float(speeds.std()), 1e-6)
    targets = (speeds - middle) / spread
    points = embedding.of(codes[chosen])
    process = GaussianProcess(
        fit(points, targets, embedding.groups), embedding.of(_codes_among(space, rows, joint)), points
    )
    mean, _ = process.predict(targets[None], np.ones(len(chosen), np.bool_))
    expected = np.clip(middle + spread * mean[0], 0.0, 1.0)
    for config, time in zip(source.configs, times, strict=True):  # what was measured need not be modelled
        row = space.row_of(config)
        place = int(np.searchsorted(rows, row)) if row is not None else len(rows)
        if place < len(rows) and rows[place] == row:
            expected[place] = times.min() / time
    return np.asarray(expected)


def _codes_of(config: Config, parameters: Sequence[Parameter]) -> list[int]:
    return [parameter.values.index(config[parameter.name]) for parameter in parameters]


def _with_values(parameter: Parameter, configs: Sequence[Config]) -> Parameter:
    """The parameter with the values that only the source has, behind its own."""
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
