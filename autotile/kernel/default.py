"""The default configuration of a file that declares none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

from autotile.core.model import Value
from autotile.errors import SpecError
from autotile.kernel.expressions import Expression
from autotile.kernel.spec import Parameter, Rule

_MAX_STEPS = 200_000
"""Maximum number of partial configurations that are examined, which takes about a second."""
_MAX_THREADS = 1024
"""Threads of a block on every device since compute capability 2.0."""


def derived_default(
    parameters: Sequence[Parameter],
    rules: Sequence[Rule],
    blocks: Sequence[Sequence[Expression]],
    sizes: Mapping[str, int],
) -> dict[str, Value] | None:
    """Return the first valid configuration in the order of distance from the middle of each parameter's values.

    Parameters
    ----------
    parameters, rules
        Parameters, and the conditions to meet; those about ``device.*`` are left out.
    blocks
        Block dimensions of each step, whose product must be 1 to 1024 where it depends on parameters and sizes only.
    sizes
        Default sizes and flags.

    Returns
    -------
    dict or None
        Value of each parameter; None where none is found in the first 200,000 steps.

    Raises
    ------
    SpecError
        None is found, and a rule has no value for a configuration that was examined.
    """
    known = {*sizes, *(parameter.name for parameter in parameters)}
    conditions = [rule.expression for rule in rules if rule.expression.names <= known]
    checked = [block for block in blocks if all(dimension.names <= known for dimension in block)]
    search = _Search(parameters, conditions, checked, sizes)
    found = next(search.found(0, {}), None)
    if found is None and search.failure is not None:
        raise search.failure
    return found


class _Search:
    """Depth-first search; a condition is checked as soon as its last parameter has a value."""

    def __init__(
        self,
        parameters: Sequence[Parameter],
        conditions: Sequence[Expression],
        blocks: Sequence[Sequence[Expression]],
        sizes: Mapping[str, int],
    ) -> None:
        self._parameters = parameters
        self._sizes = sizes
        position = {parameter.name: index for index, parameter in enumerate(parameters)}

        def last(names: Iterator[str]) -> int:
            return max((position[name] for name in names if name in position), default=0)

        self._due: list[list[Expression]] = [[] for _ in parameters]
        for condition in conditions:
            self._due[last(iter(condition.names))].append(condition)
        self._blocks_due: list[list[Sequence[Expression]]] = [[] for _ in parameters]
        for block in blocks:
            self._blocks_due[last(name for dimension in block for name in dimension.names)].append(block)
        self._steps = 0
        self.failure: SpecError | None = None
        """The first rule that had no value."""

    def found(self, index: int, chosen: dict[str, Value]) -> Iterator[dict[str, Value]]:
        """Yield the valid completions of a configuration of the first ``index`` parameters."""
        if index == len(self._parameters):
            yield dict(chosen)
            return
        parameter = self._parameters[index]
        for value in _from_the_middle(parameter.values):
            self._steps += 1
            if self._steps > _MAX_STEPS:
                return
            chosen[parameter.name] = value
            if self._holds(index, chosen):
                yield from self.found(index + 1, chosen)
            del chosen[parameter.name]

    def _holds(self, index: int, chosen: Mapping[str, Value]) -> bool:
        known = {**self._sizes, **chosen}
        try:
            if not all(condition.evaluate(known) for condition in self._due[index]):
                return False
            threads = [prod(int(side.evaluate(known)) for side in block) for block in self._blocks_due[index]]
            return all(1 <= count <= _MAX_THREADS for count in threads)
        except SpecError as error:
            self.failure = self.failure or error
            return False


def _from_the_middle(values: Sequence[Value]) -> list[Value]:
    middle = (len(values) - 1) // 2
    return [values[index] for index in sorted(range(len(values)), key=lambda index: abs(index - middle))]
