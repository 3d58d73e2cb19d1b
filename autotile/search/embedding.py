"""Configurations as coordinates of a model: their parameters, and what the compiler reports of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from autotile.core.model import Trial, Value
from autotile.kernel.spec import Parameter
from autotile.search.row_sampler import positions

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]


def features_of(compiled: Trial, sm_count: int) -> Floats | None:
    """Coordinates of what a candidate uses, each about 0 to 1; None where it did not compile.

    Registers, spilled bytes, shared bytes, threads and blocks on an SM enter by their logarithm, over the range that
    GPUs allow. Occupancy and the share of the last wave of blocks that is filled are shares to begin with.

    Parameters
    ----------
    compiled
        A candidate that went at least as far as the second gate.
    sm_count
        SMs of the device.

    Returns
    -------
    numpy.ndarray or None
        Shape (7,).
    """
    geometry, resources, occupancy = compiled.geometry, compiled.resources, compiled.occupancy
    if geometry is None or resources is None or occupancy is None:
        return None
    smem_bytes = resources.static_smem_bytes + geometry.dynamic_smem_bytes
    waves = geometry.blocks / (sm_count * max(1, occupancy.blocks_per_sm))
    return np.array(
        [
            np.log2(max(resources.registers, 1) / 16) / 4,
            np.log2(1 + resources.spill_bytes / 16) / 8,
            np.log2(1 + smem_bytes / 1024) / 8,
            np.log2(geometry.threads / 32) / 5,
            np.log2(max(1, occupancy.blocks_per_sm)) / 5,
            occupancy.occupancy,
            waves / np.ceil(waves),
        ]
    )


class CompiledPoints:
    """Coordinates of rows that were compiled: those of their parameters, and behind them what they use.

    What does not differ among the rows that a model is fitted to is left out. A row of which nothing is known, one
    that did not compile, is taken to use what the others do in the mean.

    Parameters
    ----------
    points
        Coordinates of rows by their parameters.
    groups
        Their groups, see `autotile.search.embedding.Embedding`.
    features
        What rows use, by row: `features_of`.
    fitted
        Rows that the model is fitted to.

    Attributes
    ----------
    groups
        Group of each coordinate, shape (coordinates,); each feature is one of its own.
    """

    def __init__(
        self, points: Callable[[Rows], Floats], groups: Rows, features: Mapping[int, Floats], fitted: Rows
    ) -> None:
        self._points = points
        self._features = features
        known = np.array([features[row] for row in fitted.tolist() if row in features])
        self._usual: Floats = known.mean(axis=0) if len(known) else np.zeros(0)
        self._telling = np.flatnonzero(np.ptp(known, axis=0) > 0) if len(known) else np.zeros(0, np.int64)
        self.groups = np.append(groups, groups.max(initial=-1) + 1 + np.arange(len(self._telling)))

    def __call__(self, rows: Rows) -> Floats:
        """Coordinates of rows, shape (rows, coordinates)."""
        points = self._points(rows)
        if not len(self._telling):
            return points
        used = [self._features.get(row, self._usual)[self._telling] for row in rows.tolist()]
        return np.concatenate([points, np.array(used).reshape(len(rows), len(self._telling))], axis=1)


_APART = np.sqrt(0.5)
"""Coordinate of a choice, so that two different choices lie at distance 1."""


class Embedding:
    """Coordinates of configurations, in groups that share a length scale.

    A parameter of numbers is one coordinate between 0 and 1: the logarithm where all are positive, so that a doubling
    is the same step anywhere, else the place in ascending order. Where such numbers are integers and not all powers of
    two, a second coordinate holds how often two divides them: warps, banks and vector loads make 48 behave unlike 47.
    Text, truth values and numbers that only count the choices (0, 1, 2) are a coordinate a choice, all of one group.

    The last group holds the products of two tile sizes, all on one scale: threads of a block, elements of a tile, work
    of a thread. It takes few coordinates, since the squared differences of all sums of two of p logarithms add up to
    p - 2 times those of each logarithm and once that of the sum of all.

    Parameters
    ----------
    parameters
        Of the space.

    Attributes
    ----------
    groups
        Group of each coordinate, shape (coordinates,).
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        tables = [(index, table) for index, each in enumerate(parameters) for table in _tables(each.values)]
        sizes = [(index, _logarithms(each.values)) for index, each in enumerate(parameters)]
        self._tables = tables
        self._sizes = _on_one_scale([(index, column) for index, column in sizes if column is not None])
        groups = [[group] * table.shape[1] for group, (_, table) in enumerate(tables)]
        products = [len(tables)] * (len(self._sizes) + 1 if self._sizes else 0)
        self.groups: NDArray[np.int64] = np.array([*chain.from_iterable(groups), *products], np.int64)

    def of(self, codes: NDArray[np.integer]) -> Floats:
        """Coordinates of configurations given by their codes, shape (n, parameters); result (n, coordinates)."""
        return np.concatenate([self.of_each(codes), self._products(codes)], axis=1)

    def of_each(self, codes: NDArray[np.integer]) -> Floats:
        """The coordinates that belong to one parameter each."""
        columns = [table[codes[:, index]] for index, table in self._tables]
        return np.concatenate(columns, axis=1) if columns else np.zeros((len(codes), 0))

    def _products(self, codes: NDArray[np.integer]) -> Floats:
        if not self._sizes:
            return np.zeros((len(codes), 0))
        columns = np.stack([column[codes[:, index]] for index, column in self._sizes], axis=1)
        return np.append(np.sqrt(len(self._sizes) - 2) * columns, columns.sum(axis=1, keepdims=True), axis=1)


def _tables(values: Sequence[Value]) -> list[Floats]:
    """Coordinates of each value, one table a group: shape (values, coordinates of the group)."""
    count = len(values)
    if count < 2:
        return []
    if count == 2:
        return [np.array([[0.0], [1.0]])]
    places = positions(values)
    if places is None or sorted(map(float, values)) == list(range(count)):
        return [_APART * np.eye(count)]
    logarithms = _logarithms(values)
    if logarithms is None:
        return [places[:, None] / (count - 1)]
    tables = [_unit(logarithms)]
    twos = _factors_of_two(values)
    if twos.any() and not np.array_equal(twos, logarithms):
        tables.append(_unit(twos))
    return tables


def _logarithms(values: Sequence[Value]) -> Floats | None:
    """Logarithm of each value where these are sizes: three positive numbers or more."""
    if len(values) < 3 or positions(values) is None:
        return None
    numbers = np.array(values, np.float64)
    return np.log2(numbers) if numbers.min() > 0 else None


def _on_one_scale(sizes: list[tuple[int, Floats]]) -> list[tuple[int, Floats]]:
    """Logarithms over the usual range of a sum of two; none where there are no two."""
    if len(sizes) < 2:
        return []
    usual = 2 * float(np.mean([np.ptp(column) for _, column in sizes]))
    return [(index, column / usual) for index, column in sizes]


def _unit(column: Floats) -> Floats:
    """A column from 0 to 1, shape (n, 1); all 0 where it is constant."""
    away = column - column.min()
    return np.asarray(away / (away.max() or 1.0))[:, None]


def _factors_of_two(values: Sequence[Value]) -> Floats:
    """How often two divides each positive integer; 0 for any other number."""
    twos = [(value & -value).bit_length() - 1 if isinstance(value, int) else 0 for value in values]
    return np.array(twos, np.float64)
