"""Coordinates of configurations for a model: their parameters, and the resources that the compiler reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from autotile.core.model import Trial, Value
from autotile.kernel.spec import Parameter
from autotile.search.gaussian_process import Floats

Rows = NDArray[np.int64]


def positions(values: Sequence[Value]) -> NDArray[np.int64] | None:
    """Return the position of each value in ascending order; None unless all values are numbers."""
    if any(isinstance(value, bool | str) for value in values):
        return None
    return np.argsort(np.argsort(np.array(values))).astype(np.int64)


def features_of(compiled: Trial, sm_count: int) -> Floats | None:
    """Return coordinates of a candidate's resources, each about 0 to 1; None if it did not compile.

    Registers, spilled bytes, shared memory, threads per block and blocks per SM enter by their logarithm, scaled to the
    range that GPUs allow. Occupancy and the filled share of the last wave of blocks are between 0 and 1 already.

    Parameters
    ----------
    compiled
        A candidate that was compiled.
    sm_count
        Number of SMs of the device.

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
    """Coordinates of compiled rows: those of their parameters, followed by those of their resources.

    Features that are constant among the rows that a model is fitted to are left out. A row without features, which did
    not compile, has the mean of the others.

    Parameters
    ----------
    points
        Return the coordinates of rows by their parameters.
    groups
        Groups of these coordinates, see `Embedding`.
    features
        Result of `features_of` by row.
    fitted
        Rows that the model is fitted to.

    Attributes
    ----------
    groups
        Group of each coordinate, shape (coordinates,); each feature is a group of its own.
    """

    def __init__(
        self, points: Callable[[Rows], Floats], groups: Rows, features: Mapping[int, Floats], fitted: Rows
    ) -> None:
        self._points = points
        self._features = features
        known = np.array([features[row] for row in fitted.tolist() if row in features])
        self._mean: Floats = known.mean(axis=0) if len(known) else np.zeros(0)
        self._varying = np.flatnonzero(np.ptp(known, axis=0) > 0) if len(known) else np.zeros(0, np.int64)
        self.groups = np.append(groups, groups.max(initial=-1) + 1 + np.arange(len(self._varying)))

    def __call__(self, rows: Rows) -> Floats:
        """Return the coordinates of rows, shape (rows, coordinates)."""
        points = self._points(rows)
        if not len(self._varying):
            return points
        used = [self._features.get(row, self._mean)[self._varying] for row in rows.tolist()]
        return np.concatenate([points, np.array(used).reshape(len(rows), len(self._varying))], axis=1)


_CHOICE_COORDINATE = np.sqrt(0.5)
"""Coordinate of a choice, with which two different choices are at distance 1."""


class Embedding:
    """Coordinates of configurations, in groups that share a length scale.

    A parameter of numbers is one coordinate between 0 and 1: the logarithm if all are positive, so that a doubling is
    the same step everywhere, else the position in ascending order. If such numbers are integers and not all powers of
    two, a second coordinate is the number of factors of two: warps, banks and vector loads make 48 unlike 47. Strings,
    booleans and numbers that merely enumerate choices (0, 1, 2) have one coordinate per choice, all of one group.

    The last group holds the products of any two tile sizes, on one scale: threads of a block, elements of a tile, work
    of a thread. It needs few coordinates: the squared differences of all sums of two of p logarithms add up to p - 2
    times those of each logarithm plus that of the sum of all.

    Parameters
    ----------
    parameters
        Parameters of the space.

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
        """Return the coordinates, shape (n, coordinates), of configurations by their codes, shape (n, parameters)."""
        return np.concatenate([self.of_each(codes), self._products(codes)], axis=1)

    def of_each(self, codes: NDArray[np.integer]) -> Floats:
        """Return the coordinates that belong to one parameter each."""
        columns = [table[codes[:, index]] for index, table in self._tables]
        return np.concatenate(columns, axis=1) if columns else np.zeros((len(codes), 0))

    def _products(self, codes: NDArray[np.integer]) -> Floats:
        if not self._sizes:
            return np.zeros((len(codes), 0))
        columns = np.stack([column[codes[:, index]] for index, column in self._sizes], axis=1)
        return np.append(np.sqrt(len(self._sizes) - 2) * columns, columns.sum(axis=1, keepdims=True), axis=1)


def _tables(values: Sequence[Value]) -> list[Floats]:
    """Return the coordinates of each value, one table per group, of shape (values, coordinates of the group)."""
    count = len(values)
    if count < 2:
        return []
    if count == 2:
        return [np.array([[0.0], [1.0]])]
    ordinals = positions(values)
    if ordinals is None or sorted(map(float, values)) == list(range(count)):
        return [_CHOICE_COORDINATE * np.eye(count)]
    logarithms = _logarithms(values)
    if logarithms is None:
        return [ordinals[:, None] / (count - 1)]
    tables = [_unit(logarithms)]
    twos = _factors_of_two(values)
    if twos.any() and not np.array_equal(twos, logarithms):
        tables.append(_unit(twos))
    return tables


def _logarithms(values: Sequence[Value]) -> Floats | None:
    """Return the logarithm of each value if these are sizes: at least three positive numbers."""
    if len(values) < 3 or positions(values) is None:
        return None
    numbers = np.array(values, np.float64)
    return np.log2(numbers) if numbers.min() > 0 else None


def _on_one_scale(sizes: list[tuple[int, Floats]]) -> list[tuple[int, Floats]]:
    """Return logarithms divided by the mean range of a sum of two; none if there are fewer than two."""
    if len(sizes) < 2:
        return []
    mean_range = 2 * float(np.mean([np.ptp(column) for _, column in sizes]))
    return [(index, column / mean_range) for index, column in sizes]


def _unit(column: Floats) -> Floats:
    """Return a column scaled to 0 to 1, shape (n, 1); all 0 if it is constant."""
    shifted = column - column.min()
    return np.asarray(shifted / (shifted.max() or 1.0))[:, None]


def _factors_of_two(values: Sequence[Value]) -> Floats:
    """Return the number of factors of two of each positive integer; 0 for any other number."""
    twos = [(value & -value).bit_length() - 1 if isinstance(value, int) else 0 for value in values]
    return np.array(twos, np.float64)
