"""The cost of trials, which a search minimises, and their metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from autotile.core.model import COST, METRIC, OBJECTIVE, Config, Problem, Trial, config_text
from autotile.errors import InputError
from autotile.kernel.expressions import Location
from autotile.kernel.spec import RUN_VALUES, KernelSpec, Objective, parse_score
from autotile.tuning.options import TuneOptions

_LOWEST_US, _HIGHEST_US = 1e-3, 1e12
_HALVINGS = 60


def session_objective(spec: KernelSpec, options: TuneOptions) -> Objective | None:
    """Return the objective of a session: the expression that the user gives, else that of the search-space file.

    Raises
    ------
    SpecError
        The expression is malformed or uses an unknown name.
    """
    if options.objective is None:
        return spec.objective
    names = [metric.name for metric in spec.metrics]
    expression = parse_score(options.objective, names, spec.score_kinds, Location("--objective"))
    return Objective(expression, options.maximize)


def measures_energy(spec: KernelSpec, objective: Objective | None) -> bool:
    """Return whether the objective or a metric needs the energy of a run."""
    expressions = [metric.expression for metric in spec.metrics]
    if objective is not None:
        expressions.append(objective.expression)
    return any("energy_mj" in expression.names for expression in expressions)


class Scorer:
    """Computes the objective and the metrics of trials.

    The cost is what a search minimises: the time, or the value of the objective, or its reciprocal if it is maximised;
    so costs are positive, and their ratios say how much better a configuration is.

    Parameters
    ----------
    spec, problem
        The kernel and its problem.
    objective
        What to minimise or maximise; None for the time.
    """

    def __init__(self, spec: KernelSpec, problem: Problem, objective: Objective | None) -> None:
        self._metrics = spec.metrics
        self._names = spec.score_kinds.keys()
        self._sizes = problem.sizes
        self._objective = objective
        used = set(objective.expression.names) if objective is not None else set()
        for metric in reversed(spec.metrics):
            if metric.name in used:
                used |= metric.expression.names
        self._needs_run = bool(used & {*RUN_VALUES} - {"time_us"})

    def scored(self, trial: Trial) -> Trial:
        """Return a trial with its metrics, and its objective and cost if the session has one.

        Raises
        ------
        InputError
            The objective has no value, or not a positive one.
        """
        telemetry = {
            name: value
            for name, value in trial.telemetry.items()
            if name not in (COST, OBJECTIVE) and not name.startswith(METRIC)
        }
        if trial.time_us is None:
            return replace(trial, telemetry=telemetry) if telemetry != trial.telemetry else trial
        names = self._environment(trial, trial.time_us)
        for metric in self._metrics:
            if metric.name in names:
                telemetry[f"{METRIC}{metric.name}"] = names[metric.name]
        if self._objective is not None:
            telemetry[OBJECTIVE] = value = self._value(trial.config, names)
            telemetry[COST] = 1 / value if self._objective.maximize else value
        return replace(trial, telemetry=telemetry) if telemetry != trial.telemetry else trial

    def cost(self, trial: Trial, time_us: float) -> float:
        """Return the cost of a measured trial if it took another time."""
        if self._objective is None:
            return time_us
        value = self._value(trial.config, self._environment(trial, time_us))
        return 1 / value if self._objective.maximize else value

    def time_limit_us(self, trial: Trial, best: Trial | None) -> float | None:
        """Return the time at which a compiled candidate would cost as much as the best; None if that is not known."""
        if best is None or best.cost is None or self._objective is None:
            return best.time_us if best is not None else None
        if self._needs_run:
            return None
        low, high = _LOWEST_US, _HIGHEST_US
        try:
            if not self.cost(trial, low) < best.cost < self.cost(trial, high):
                return None
            for _ in range(_HALVINGS):
                middle = math.sqrt(low * high)
                low, high = (middle, high) if self.cost(trial, middle) < best.cost else (low, middle)
        except InputError:
            return None
        return math.sqrt(low * high)

    def weight(self, trial: Trial) -> float:
        """Return the ratio of a measured trial's cost to its time."""
        if trial.time_us is None or trial.cost is None:
            return 1.0
        return trial.cost / trial.time_us

    def _value(self, config: Config, names: Mapping[str, Any]) -> float:
        assert self._objective is not None
        expression = self._objective.expression
        missing = sorted(expression.names - names.keys())
        if missing:
            raise InputError(f"the objective {expression.text!r} needs {missing[0]}, which has no value here")
        value = _number(expression.evaluate(names))
        if value is None or value <= 0:
            raise InputError(
                f"the objective {expression.text!r} is {value if value is not None else 'not finite'} with "
                f"{config_text(config)}; expected a positive number"
            )
        return value

    def _environment(self, trial: Trial, time_us: float) -> dict[str, Any]:
        """Return the value of every name that is known of a trial."""
        names: dict[str, Any] = {**self._sizes, "time_us": time_us}
        names |= {name: int(value) for name, value in trial.config.items() if name in self._names}
        if trial.resources is not None:
            used = trial.resources
            names |= {
                "registers": used.registers,
                "spill_bytes": used.spill_bytes,
                "static_smem_bytes": used.static_smem_bytes,
            }
        if trial.geometry is not None:
            launch = trial.geometry
            names |= {
                "dynamic_smem_bytes": launch.dynamic_smem_bytes,
                "threads": launch.threads,
                "blocks": launch.blocks,
            }
        if trial.occupancy is not None:
            names["occupancy"] = trial.occupancy.occupancy
        names |= {name: trial.telemetry[name] for name in ("energy_mj", "max_error") if name in trial.telemetry}
        for metric in self._metrics:
            if metric.expression.names <= names.keys():
                value = _number(metric.expression.evaluate(names))
                if value is not None:
                    names[metric.name] = value
        return names


def _number(value: Any) -> float | None:
    """Return a finite number; None if the value is not one."""
    array = np.asarray(value)
    if array.size != 1 or np.iscomplexobj(array) or not np.isfinite(array).all():
        return None
    return float(array.reshape(()))
