"""Quick checks of whether configurations are valid for a problem: the rules that depend on it, then the limits.

`autotile.space.limits.check_config` checks one configuration completely. For the candidates of a model, which are
checked in turn at ever new sizes, the rules about parameters and flags are checked once, and those about sizes alone
once for a kernel.
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
from autotile.space.limits import check_config, limit_violation
from autotile.space.occupancy import demand_of


@dataclass(frozen=True, slots=True)
class KernelRules:
    """The rules of a kernel, parted so that the best candidates are checked quickly.

    Attributes
    ----------
    spec
        The kernel.
    of_problem
        Rules about sizes and flags alone, which hold for all configurations or for none.
    of_pair
        Rules about sizes and parameters.
    of_config
        Rules about parameters and flags alone, which hold for all sizes or for none.
    refused
        Configurations that break one of the latter, and those known to meet them.
    """

    spec: KernelSpec
    of_problem: tuple[Expression, ...]
    of_pair: tuple[Expression, ...]
    of_config: tuple[Expression, ...]
    refused: dict[int, bool] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: KernelSpec, sizes: Mapping[str, int], device: DeviceProperties) -> KernelRules:
        """Part the rules of a kernel; ``sizes`` are those of any problem."""
        fixed = fixed_names(spec, sizes, device).keys()
        proper = spec.sizes.keys() - set(spec.flags)
        rules = [rule.expression for rule in spec.rules]
        return cls(
            spec,
            tuple(rule for rule in rules if rule.names <= fixed),
            tuple(rule for rule in rules if not rule.names <= fixed and not rule.names.isdisjoint(proper)),
            tuple(rule for rule in rules if not rule.names <= fixed and rule.names.isdisjoint(proper)),
        )


class Checks:
    """Checks of configurations for one problem."""

    def __init__(
        self,
        rules: Sequence[KernelRules],
        kernels: Mapping[str, Mapping[str, int]],
        device: DeviceProperties,
        dtype: str,
    ) -> None:
        self._rules = dict(zip(kernels, rules, strict=True))
        self._kernels, self._device, self._dtype = kernels, device, dtype
        self._fixed: dict[str, dict[str, Value] | None] = {}
        """Sizes, flags and ``device.*`` of each kernel; None where no configuration is valid."""

    def pass_for(self, number: int, candidate: ModelCandidate) -> bool:
        """Return whether a configuration is valid for the problem; ``number`` is its position in the layout."""
        name, config = candidate.kernel, candidate.config
        rules, sizes = self._rules[name], self._kernels[name]
        if name not in self._fixed:
            fixed = fixed_names(rules.spec, sizes, self._device)
            self._fixed[name] = fixed if all(rule.evaluate(fixed) for rule in rules.of_problem) else None
        known = self._fixed[name]
        if known is None or rules.refused.get(number):
            return False
        if rules.spec.computed:
            return not check_config(rules.spec, config, sizes, self._device, self._dtype)
        names = {**known, **config}
        if number not in rules.refused:
            rules.refused[number] = not (
                _is_declared(rules.spec, config) and all(rule.evaluate(names) for rule in rules.of_config)
            )
            if rules.refused[number]:
                return False
        if not all(rule.evaluate(names) for rule in rules.of_pair):
            return False
        return not limit_violation(demand_of(rules.spec, names, sizes, self._dtype), self._device, rules.spec)


def _is_declared(spec: KernelSpec, config: Config) -> bool:
    """Return whether a kernel, which may have changed since a model was learned, has the parameters and values."""
    declared = {parameter.name: parameter.values for parameter in spec.parameters}
    return config.keys() == declared.keys() and all(config[name] in values for name, values in declared.items())
