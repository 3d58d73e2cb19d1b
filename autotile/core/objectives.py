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
"""JSON names of the objectives: time in microseconds, registers per thread, energy in millijoules per run, and maximum
error of an output element, relative to the larger of its expected magnitude and the output's RMS."""


def split_objectives(names: Iterable[str], metrics: Iterable[str] = ()) -> tuple[tuple[str, ...], str | None]:
    """Return the named objectives, see `normalize_objectives`, and the expression among them, None if there is none.

    Parameters
    ----------
    names
        Names of objectives, separated by commas too, or an expression of `autotile.kernel.spec`.
    metrics
        Names of metrics, each of which is an expression.

    Raises
    ------
    InputError
        There is no such objective, or an expression is not the only one.
    """
    given = [name.strip() for name in names]
    known = {*metrics}
    expressions = [text for text in given if text in known or not text.replace(",", "").replace(" ", "").isalpha()]
    if expressions and len(given) - given.count(TIME) > 1:
        raise InputError(
            f"the objective {expressions[0]!r} is an expression, which must be the only one; leave others out"
        )
    if expressions:
        return (TIME,), expressions[0]
    return normalize_objectives(name for text in given for name in text.split(",")), None


def normalize_objectives(names: Iterable[str]) -> tuple[str, ...]:
    """Return the named objectives without duplicates, with time first, which is always included.

    Raises
    ------
    InputError
        There is no such objective.
    """
    requested = [name.strip() for name in names]
    for name in requested:
        if name not in OBJECTIVES:
            known = ", ".join(OBJECTIVES)
            raise InputError(f"there is no objective {name!r}{nearest(name, OBJECTIVES)} (known: {known})")
    return tuple(dict.fromkeys([TIME, *requested]))


def objective_values(trial: Trial, objectives: Sequence[str]) -> tuple[float, ...] | None:
    """Return the values of a trial for the objectives; None if it did not run or has no value for one of them."""
    if not trial.outcome.has_time:
        return None
    values = [_value(trial, name) for name in objectives]
    known = [value for value in values if value is not None]
    return tuple(known) if len(known) == len(values) else None


def _value(trial: Trial, objective: str) -> float | None:
    if objective == TIME:
        return trial.cost
    if objective == REGISTERS:
        return trial.resources.registers if trial.resources is not None else None
    value = trial.telemetry.get(OBJECTIVES[objective])
    return float(value) if value is not None else None


Mask = NDArray[np.bool_]


def non_dominated(points: ArrayLike) -> Mask:
    """Return the points that no other point dominates, that is, equals or betters in all and betters in one objective.

    Equal points are either all included or all excluded. With two objectives, the cost is that of a sort; with more,
    each retained point is compared with all remaining points once.

    Parameters
    ----------
    points
        Finite values to minimize, shape (points, objectives).

    Returns
    -------
    numpy.ndarray
        bool, shape (points,).
    """
    values = np.asarray(points, dtype=np.float64)
    if not len(values):
        return np.zeros(0, dtype=np.bool_)
    ascending, inverse = np.unique(values, axis=0, return_inverse=True)
    kept = _strictly_decreasing(ascending[:, 1]) if values.shape[1] == 2 else _non_dominated_sorted(ascending)
    return kept[inverse.ravel()]


def _strictly_decreasing(second: NDArray[np.float64]) -> Mask:
    """Return where the second objective is less than in all previous points, which are no worse in the first."""
    return np.append(True, second[1:] < np.minimum.accumulate(second)[:-1])


def _non_dominated_sorted(ascending: NDArray[np.float64]) -> Mask:
    """Apply `non_dominated` to sorted points: a dominating point comes first, so the first remaining point is kept."""
    kept = np.zeros(len(ascending), dtype=np.bool_)
    remaining = np.arange(len(ascending))
    while len(remaining):
        kept[remaining[0]] = True
        remaining = remaining[(ascending[remaining] < ascending[remaining[0]]).any(axis=1)]
    return kept
