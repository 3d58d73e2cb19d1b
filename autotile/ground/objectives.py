"""What a tuning minimises: time, and beside it registers, energy or error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from autotile.ground.errors import InputError
from autotile.ground.model import Trial
from autotile.ground.syntax import nearest

TIME, REGISTERS, ENERGY, ERROR = "time", "registers", "energy", "error"

OBJECTIVES: Mapping[str, str] = MappingProxyType(
    {TIME: "time_us", REGISTERS: "registers", ENERGY: "energy_mj", ERROR: "max_error"}
)
"""Each objective's name in documents, with its unit: microseconds; registers a thread; millijoules a run; the greatest
error of an output's element, relative to the larger of its right value and the output's RMS."""


def whole_objectives(names: Iterable[str]) -> tuple[str, ...]:
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
