"""Objectives of a tuning session and the Pareto front of several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autotile.core.model import Trial
from autotile.errors import InputError, nearest

TIME, REGISTERS, ENERGY, ERROR = "time", "registers", "energy", "error"

OBJECTIVES: Mapping[str, str] = MappingProxyType(
    {TIME: "time_us", REGISTERS: "registers", ENERGY: "energy_mj", ERROR: "max_error"}
)
"""Each objective's name in documents, with its unit: microseconds; registers a thread; millijoules a run; the greatest
error of an output's element, relative to the larger of its right value and the output's RMS."""


def normalize_objectives(names: Iterable[str]) -> tuple[str, ...]:
    """The objectives that are meant, each once: time is always among them, and the first.

    Raises
    ------
    InputError
        There is no such objective.
    """
    asked = [name.strip() for name in names]
    for name in asked:
        if name not in OBJECTIVES:
            known = ", ".join(OBJECTIVES)
            raise InputError(f"there is no objective {name!r}{nearest(name, OBJECTIVES)} (known: {known})")
    return tuple(dict.fromkeys([TIME, *asked]))


def objective_values(trial: Trial, objectives: Sequence[str]) -> tuple[float, ...] | None:
    """What a trial reached in each objective; None where it did not run, or one of them is not known of it."""
    if not trial.outcome.has_time:
        return None
    values = [_value(trial, name) for name in objectives]
    known = [value for value in values if value is not None]
    return tuple(known) if len(known) == len(values) else None


def _value(trial: Trial, objective: str) -> float | None:
    if objective == TIME:
        return trial.time_us
    if objective == REGISTERS:
        return trial.resources.registers if trial.resources is not None else None
    value = trial.telemetry.get(OBJECTIVES[objective])
    return float(value) if value is not None else None


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
