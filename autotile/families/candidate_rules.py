"""Quick checks of whether configurations are valid for a problem: the rules and limits that depend on it.

`autotile.space.limits.check_config` checks one configuration completely. For the candidates of a model, which are
checked in turn at ever new sizes, what depends on parameters and flags alone is checked once for each, and the rules
about sizes alone once for a kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autotile.core.device import DeviceProperties
from autotile.core.model import Config, Value
from autotile.families.model_inputs import ModelCandidate
from autotile.kernel.expressions import Expression
from autotile.kernel.launch import fixed_names
from autotile.kernel.spec import KernelSpec
from autotile.space.limits import Limit, check_config, limit_violation, limits_of
from autotile.space.occupancy import demand_of


@dataclass(frozen=True, slots=True)
class KernelRules:
    """The rules and limits of a kernel for given flags, parted so that candidates are checked quickly.

    Attributes
    ----------
    spec, device
        The kernel and the device.
    fixed
        ``device.*`` by name.
    of_problem
        Rules about sizes and flags alone, which hold for all configurations or for none.
    of_pair
        Rules about sizes and parameters.
    of_config
        Rules about parameters and flags alone, which hold for all sizes or for none.
    pair_limits, config_limits
        Limits that depend on the sizes, and the others.
    valid
        Whether a configuration meets the rules and limits that do not depend on the sizes, by its position and the
        element type.
    """

    spec: KernelSpec
    device: DeviceProperties
    fixed: Mapping[str, Value]
    of_problem: tuple[Expression, ...]
    of_pair: tuple[Expression, ...]
    of_config: tuple[Expression, ...]
    pair_limits: tuple[Limit, ...]
    config_limits: tuple[Limit, ...]
    valid: dict[tuple[int, str], bool] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: KernelSpec, sizes: Mapping[str, int], device: DeviceProperties) -> KernelRules:
        """Part the rules of a kernel; ``sizes`` are those of any problem."""
        names = fixed_names(spec, sizes, device)
        proper = spec.sizes.keys() - set(spec.flags)
        rules = [rule.expression for rule in spec.rules]
        limits = limits_of(spec)
        sized = {one.name for one in limits if any(not part.names.isdisjoint(proper) for part in one.expressions(spec))}
        return cls(
            spec,
            device,
            {name: value for name, value in names.items() if name not in sizes},
            tuple(rule for rule in rules if rule.names <= names.keys()),
            tuple(rule for rule in rules if not rule.names <= names.keys() and not rule.names.isdisjoint(proper)),
            tuple(rule for rule in rules if not rule.names <= names.keys() and rule.names.isdisjoint(proper)),
            tuple(limit for limit in limits if limit.name in sized),
            tuple(limit for limit in limits if limit.name not in sized),
        )

    def names_of(self, sizes: Mapping[str, int]) -> dict[str, Value] | None:
        """Return the value of every name that no parameter determines; None if no configuration is valid."""
        names = {**self.fixed, **sizes}
        return names if all(rule.value(names) for rule in self.of_problem) else None

    def are_met(
        self, number: int, config: Config, sizes: Mapping[str, int], names: Mapping[str, Value], dtype: str
    ) -> bool:
        """Return whether a configuration is valid for a problem; ``names`` are those of `names_of`."""
        if self.spec.computed:
            return not check_config(self.spec, config, sizes, self.device, dtype)
        names = {**names, **config}
        valid = self.valid.get((number, dtype))
        if valid is None:
            valid = self.valid[number, dtype] = (
                _is_declared(self.spec, config)
                and all(rule.value(names) for rule in self.of_config)
                and not limit_violation(
                    demand_of(self.spec, names, sizes, dtype), self.device, self.spec, self.config_limits
                )
            )
        return (
            valid
            and all(rule.value(names) for rule in self.of_pair)
            and not limit_violation(demand_of(self.spec, names, sizes, dtype), self.device, self.spec, self.pair_limits)
        )


class Checks:
    """Checks of configurations for one problem."""

    def __init__(self, rules: Sequence[KernelRules], kernels: Mapping[str, Mapping[str, int]], dtype: str) -> None:
        self._rules = dict(zip(kernels, rules, strict=True))
        self._kernels, self._dtype = kernels, dtype
        self._names: dict[str, dict[str, Value] | None] = {}
        """Names of each kernel; None where no configuration is valid."""

    def pass_for(self, number: int, candidate: ModelCandidate) -> bool:
        """Return whether a configuration is valid for the problem; ``number`` is its position in the layout."""
        name = candidate.kernel
        rules, sizes = self._rules[name], self._kernels[name]
        if name not in self._names:
            self._names[name] = rules.names_of(sizes)
        names = self._names[name]
        return names is not None and rules.are_met(number, candidate.config, sizes, names, self._dtype)


def _is_declared(spec: KernelSpec, config: Config) -> bool:
    """Return whether a kernel, which may have changed since a model was learned, has the parameters and values."""
    declared = {parameter.name: parameter.values for parameter in spec.parameters}
    return config.keys() == declared.keys() and all(config[name] in values for name, values in declared.items())
