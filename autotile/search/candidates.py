"""The rows of a search space that can still be proposed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autotile.ground.joining import rank
from autotile.ground.model import Value
from autotile.ground.space import SearchSpace

_SAME_DISTANCE = 1e-5
"""Distances closer than this are equal but for rounding: they are sums of float32 fractions between 0 and 1."""


class Candidates:
    """Rows of a space that are available and were not taken yet.

    Parameters
    ----------
    space
        The rows.
    available
        Rows that may be proposed at all, bool, shape (rows,); None for all.

    Raises
    ------
    ValueError
        ``available`` is not one entry a row.
    """

    def __init__(self, space: SearchSpace, available: ArrayLike | None = None) -> None:
        self.space = space
        self.free: NDArray[np.bool_] = np.ones(len(space), np.bool_)
        if available is not None:
            self.free &= np.asarray(available, np.bool_)
        self.left = int(np.count_nonzero(self.free))
        """Rows that can still be proposed."""
        self._sizes = [len(parameter.values) for parameter in space.parameters]
        self._ranks = rank(list(space.codes.T), self._sizes, len(space))
        self._distances = [_distances(parameter.values) for parameter in space.parameters]

    def take(self, row: int) -> None:
        """Never offer a row again."""
        self.left -= int(self.free[row])
        self.free[row] = False

    def give_back(self, row: int) -> None:
        """Offer a row again that was taken."""
        self.left += int(not self.free[row])
        self.free[row] = True

    def rows_of(self, codes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Row of each combination of codes, shape (n, parameters); -1 where it is invalid."""
        wanted = rank(list(codes.T), self._sizes, len(codes))
        rows = np.searchsorted(self._ranks, wanted)
        rows[rows == len(self._ranks)] = 0
        return np.where(self._ranks[rows] == wanted, rows, -1)

    def free_rows_of(self, codes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Row of each combination of codes, shape (n, parameters); -1 where it is invalid or taken."""
        rows = self.rows_of(codes)
        return np.where((rows >= 0) & self.free[rows], rows, -1)

    def first(self) -> int:
        """The first free row."""
        return int(np.argmax(self.free))

    def uniform(self, rng: np.random.Generator) -> int:
        """Any free row, each as likely."""
        return int(np.flatnonzero(self.free)[rng.integers(self.left)])

    def nearest(self, codes: NDArray[np.int64], rng: np.random.Generator) -> int:
        """The free row nearest to a combination of codes, shape (parameters,); one of them at random where they tie.

        A parameter of numbers adds the steps between the two values over the most there can be, in the order of the
        numbers, so that a doubling is one step in a list of powers of two; any other parameter adds 1 if it differs.
        """
        distance = np.where(self.free, np.float32(0), np.float32(np.inf))
        for index, code in enumerate(codes):
            distance += self._distances[index][code][self.space.codes[:, index]]
        return int(rng.choice(np.flatnonzero(distance <= distance.min() + _SAME_DISTANCE)))


def positions(values: Sequence[Value]) -> NDArray[np.int64] | None:
    """Place of each value in ascending order; None where the values are not numbers."""
    if any(isinstance(value, bool | str) for value in values):
        return None
    return np.argsort(np.argsort(np.array(values))).astype(np.int64)


def _distances(values: Sequence[Value]) -> NDArray[np.float32]:
    """Distance between any two values of a parameter, 0 to 1."""
    places = positions(values)
    if places is None:
        return 1 - np.eye(len(values), dtype=np.float32)
    steps: NDArray[np.int64] = np.abs(places[:, None] - places[None, :])
    return (steps / max(1, len(values) - 1)).astype(np.float32)
