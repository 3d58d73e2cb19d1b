"""Configurations as a caller gives them: some parameters by name, the others from the default."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from autotile.core.model import Config, Value
from autotile.errors import ConfigError, nearest
from autotile.kernel.spec import KernelSpec, Parameter

_MAX_VALUE = 10**7
"""Bound on the magnitude of a parameter's value, so that products of a few of them fit in 64 bits."""


def complete_config(spec: KernelSpec, given: Mapping[str, Any]) -> Config:
    """Return a configuration with the parameters that are given, and the others from the default.

    Raises
    ------
    ConfigError
        A name is not a parameter, or a value has another type than the parameter.
    """
    parameters = {parameter.name for parameter in spec.parameters}
    for name in given:
        if name not in parameters:
            raise ConfigError(
                f"{name!r} is not a parameter of {spec.name}{nearest(name, parameters)} (parameters: "
                f"{', '.join(parameter.name for parameter in spec.parameters)})"
            )
    return split_assignments(spec, given)[0]


def split_assignments(spec: KernelSpec, assignments: Mapping[str, Any]) -> tuple[dict[str, Value], dict[str, int]]:
    """Separate parameters from sizes, and complete the configuration from the default one.

    Raises
    ------
    ConfigError
        A name is neither a parameter nor a size, or a value has another type than the parameter.
    """
    parameters = {parameter.name: parameter for parameter in spec.parameters}
    config: dict[str, Value] = {name: spec.default[name] for name in parameters}
    sizes: dict[str, int] = {}
    for name, value in assignments.items():
        if name in parameters:
            config[name] = _typed_value(parameters[name], value)
        elif name in spec.sizes:
            sizes[name] = value
        else:
            known = (*parameters, *spec.sizes)
            raise ConfigError(
                f"{spec.name} has neither a parameter nor a size {name!r}{nearest(name, known)} (parameters: "
                f"{', '.join(parameters)}; sizes and flags: {', '.join(spec.sizes)})"
            )
    return config, sizes


def _typed_value(parameter: Parameter, value: Any) -> Value:
    """Return a value in the type of the parameter's own values, which all have the same type."""
    own = parameter.values[0]
    if isinstance(own, str):
        if isinstance(value, str):
            return value
    elif isinstance(own, bool):
        if not isinstance(value, str) and value in (False, True):
            return bool(value)
    elif isinstance(own, float):
        if not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value):
            return float(value)
    elif not isinstance(value, bool) and isinstance(value, Integral) and abs(int(value)) < _MAX_VALUE:
        return int(value)
    raise ConfigError(f"{parameter.name} = {value!r} is not among its values {', '.join(map(str, parameter.values))}")
