"""Helpers of Kernel Tuner that scripts import: marks of failures, the best of the results, and their text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from autotile.errors import InputError, type_text
from autotile.kernel_tuner.parameters import computed, evaluate
from autotile.kernel_tuner.parameters import replace_param_occurrences as replace_param_occurrences

default_block_size_names = ["block_size_x", "block_size_y", "block_size_z"]


class ErrorConfig(str):
    """Mark of a configuration without a time; in JSON it is the name of its class."""

    __slots__ = ()

    def __new__(cls) -> ErrorConfig:
        """Return the mark."""
        return super().__new__(cls, cls.__name__)

    def __repr__(self) -> str:
        return type(self).__name__


class InvalidConfig(ErrorConfig):
    """The configuration does not meet a restriction or a limit of the device, or its result is wrong."""

    __slots__ = ()


class CompilationFailedConfig(ErrorConfig):
    """The configuration does not compile."""

    __slots__ = ()


class RuntimeFailedConfig(ErrorConfig):
    """The configuration cannot be launched, crashed, or did not end in time."""

    __slots__ = ()


class NpEncoder(json.JSONEncoder):
    """Encodes NumPy values."""

    def default(self, o: Any) -> Any:
        """Return a plain value for one of NumPy's."""
        if isinstance(o, np.generic):
            return o.item()
        return o.tolist() if isinstance(o, np.ndarray) else super().default(o)


objective_default_map = {
    **dict.fromkeys(("time", "energy", "cost", "loss"), False),
    **dict.fromkeys(("fitness", "GFLOP/s", "TFLOP/s", "GB/s", "TB/s"), True),
    **dict.fromkeys(("GFLOPS/W", "TFLOPS/W", "GFLOP/J", "TFLOP/J"), True),
}
"""Whether a greater value of these objectives is better."""


def get_objective_defaults(objective: str | None, objective_higher_is_better: bool | None) -> tuple[str, bool]:
    """Return an objective, ``time`` if none is given, and its direction; an `InputError` if that is not known."""
    objective = objective or "time"
    if objective_higher_is_better is None:
        if objective not in objective_default_map:
            raise InputError(f"whether a higher {objective} is better is not known; give objective_higher_is_better")
        objective_higher_is_better = objective_default_map[objective]
    return objective, objective_higher_is_better


def get_best_config(
    results: Iterable[Mapping[str, Any]], objective: str, objective_higher_is_better: bool = False
) -> Mapping[str, Any]:
    """Return the result with the best value of an objective; failures come last."""
    sign = -1.0 if objective_higher_is_better else 1.0
    return min(results, key=lambda result: float(np.nan_to_num(sign * objective_value(result, objective), nan=np.inf)))


def objective_value(result: Mapping[str, Any], objective: str) -> float:
    """Return the value of an objective; NaN if the result has no number, as of a failure."""
    found = result.get(objective)
    return float(found) if "__error__" not in result and isinstance(found, Real) else np.nan


def get_config_string(
    params: Mapping[str, Any], keys: Sequence[str] | None = None, units: Mapping[str, str] | None = None
) -> str:
    """Return a result on one line: ``block_size_x=128, time=0.250ms``."""
    shown = keys or list(params)
    texts = []
    for name, value in params.items():
        if name in shown:
            unit = "" if isinstance(value, ErrorConfig) else (units or {}).get(name, "")
            texts.append(f"{name}={value:.3f}{unit}" if isinstance(value, float) else f"{name}={value!s}{unit}")
    return ", ".join(texts)


def get_instance_string(params: Mapping[str, Any]) -> str:
    """Return the values of a configuration, joined by underscores."""
    return "_".join(map(str, params.values()))


def process_metrics(params: dict[str, Any], metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """Add metrics to the parameters and values of a configuration; each may use those before it.

    They are string expressions, or functions of such a dictionary, by name; anything else is an `InputError`.
    """
    if not isinstance(metrics or {}, Mapping):
        raise InputError(f"metrics is {type_text(type(metrics))}, expected a dictionary, whose order is kept")
    for name, metric in (metrics or {}).items():
        if not isinstance(metric, str) and not callable(metric):
            raise InputError(f"the metric {name} is {metric!r}, expected a string or a function")
        with computed(f"metric {name}", params):
            params[name] = evaluate(metric, params) if isinstance(metric, str) else metric(params)
    return params
