"""Parameters as coordinates in which configurations that behave alike lie close together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autotile.ground.model import Value
from autotile.ground.spec import Parameter
from autotile.search.candidates import positions

Floats = NDArray[np.float64]

_APART = np.sqrt(0.5)
"""Coordinate of a choice, so that two different choices lie at distance 1."""


class Embedding:
    """Coordinates of configurations, in groups that share a length scale.

    A parameter of numbers is one coordinate between 0 and 1: the logarithm where all are positive, so that a doubling
    is the same step anywhere, else the place in ascending order. Where such numbers are integers and not all powers of
    two, a second coordinate holds how often two divides them: warps, banks and vector loads make 48 behave unlike 47.
    Text, truth values and numbers that only count the choices (0, 1, 2) are a coordinate a choice, all of one group.

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
        self._tables: list[tuple[int, Floats]] = []
        groups: list[int] = []
        for index, parameter in enumerate(parameters):
            for table in _tables(parameter.values):
                group = groups[-1] + 1 if groups else 0
                groups += [group] * table.shape[1]
                self._tables.append((index, table))
        self.groups: NDArray[np.int64] = np.array(groups, np.int64)

    def of(self, codes: NDArray[np.integer]) -> Floats:
        """Coordinates of configurations given by their codes, shape (n, parameters); result (n, coordinates)."""
        columns = [table[codes[:, index]] for index, table in self._tables]
        return np.concatenate(columns, axis=1) if columns else np.zeros((len(codes), 0))


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
    numbers = np.array(values, np.float64)
    if numbers.min() <= 0:
        return [places[:, None] / (count - 1)]
    tables = [_unit(np.log2(numbers))]
    twos = _factors_of_two(values)
    if twos.any() and not np.array_equal(twos, np.log2(numbers)):
        tables.append(_unit(twos))
    return tables


def _unit(column: Floats) -> Floats:
    """A column from 0 to 1, shape (n, 1); all 0 where it is constant."""
    away = column - column.min()
    return np.asarray(away / (away.max() or 1.0))[:, None]


def _factors_of_two(values: Sequence[Value]) -> Floats:
    """How often two divides each positive integer; 0 for any other number."""
    twos = [(value & -value).bit_length() - 1 if isinstance(value, int) else 0 for value in values]
    return np.array(twos, np.float64)
