"""Which of many points are worth a look where several things count."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Mask = NDArray[np.bool_]


def non_dominated(points: ArrayLike) -> Mask:
    """Points that no other point is at least as good as in everything and better than in something.

    Points that are equal are kept or left out together. For two objectives the time is that of a sort; for more, that
    of one comparison of every point that is left with each that is kept.

    Parameters
    ----------
    points
        The less the better; finite, shape (points, objectives).

    Returns
    -------
    numpy.ndarray
        bool, shape (points,).
    """
    values = np.asarray(points, dtype=np.float64)
    if not len(values):
        return np.zeros(0, dtype=np.bool_)
    ascending, place = np.unique(values, axis=0, return_inverse=True)
    kept = _falling(ascending[:, 1]) if values.shape[1] == 2 else _undominated(ascending)
    return kept[place.ravel()]


def _falling(second: NDArray[np.float64]) -> Mask:
    """Where the second objective is less than in all points before, none of which is greater in the first."""
    return np.append(True, second[1:] < np.minimum.accumulate(second)[:-1])


def _undominated(ascending: NDArray[np.float64]) -> Mask:
    """Points in ascending order: what dominates one comes before it, so the first that is left is kept."""
    kept = np.zeros(len(ascending), dtype=np.bool_)
    left = np.arange(len(ascending))
    while len(left):
        kept[left[0]] = True
        left = left[(ascending[left] < ascending[left[0]]).any(axis=1)]
    return kept
