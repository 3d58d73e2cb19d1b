"""Whether a single configuration is feasible: for who has one, and needs no table of all of them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from autotile.ground.capability import device_fault
from autotile.ground.geometry import known_names
from autotile.ground.hardware import DeviceProperties
from autotile.ground.limits import Demand, broken_limit
from autotile.ground.model import Config, Value
from autotile.ground.spec import KernelSpec
from autotile.ground.syntax import nearest


def check_config(
    spec: KernelSpec, config: Config, sizes: Mapping[str, int], device: DeviceProperties, dtype: str | None = None
) -> str:
    """Say in one line why a configuration is not feasible; "" where it is.

    Parameters
    ----------
    spec, sizes, device, dtype
        As for `autotile.ground.space.feasible_space`.
    config
        A value for each parameter.

    Raises
    ------
    SpecError
        An expression has no value for this configuration.
    ProblemError
        A size is missing.
    """
    stranger = device_fault(spec, device) or _not_in_domains(spec, config)
    if stranger:
        return stranger
    names = known_names(spec, config, sizes, device)
    for rule in spec.rules:
        if not rule.expression.evaluate(names):
            figures = ", ".join(f"{name} = {names[name]}" for name in sorted(rule.expression.names))
            return f"the rule {rule.name!r} is broken: {rule.expression.text}, where {figures}"
    return broken_limit(demand_of(spec, names, sizes, dtype or spec.dtypes[0]), device, spec)


def is_worth_a_trial(spec: KernelSpec, config: Config, sizes: Mapping[str, int], device: DeviceProperties) -> bool:
    """Whether a search would try a feasible configuration: it meets the rules for the search alone.

    Raises
    ------
    SpecError, ProblemError
        As for `check_config`.
    """
    names = known_names(spec, config, sizes, device)
    return all(rule.expression.evaluate(names) for rule in spec.pruning)


def demand_of(spec: KernelSpec, names: Mapping[str, Value], sizes: Mapping[str, int], dtype: str) -> Demand:
    """What a single configuration asks of a device, given the value of every name."""
    return Demand.of(spec, sizes, dtype, lambda expression: np.array([int(expression.evaluate(names))]))


def _not_in_domains(spec: KernelSpec, config: Config) -> str:
    known = {parameter.name: parameter.values for parameter in spec.parameters}
    for name in config:
        if name not in known:
            return f"{name} is not a parameter of {spec.name}{nearest(name, known)}"
    for name, values in known.items():
        if name not in config:
            return f"the parameter {name} is missing"
        value = config[name]
        if not any(value == other and isinstance(value, str) == isinstance(other, str) for other in values):
            return f"{name} = {value} is not among its values {', '.join(map(str, values))}"
    return ""
