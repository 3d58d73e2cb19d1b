"""The search space: every configuration that meets the rules and is worth a trial, as one table."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autotile.core.device import DeviceProperties
from autotile.core.model import Config, Value, config_text
from autotile.errors import EmptySpaceError, SpecError
from autotile.kernel.expressions import Expression
from autotile.kernel.launch import fixed_names
from autotile.kernel.problem import check_device
from autotile.kernel.spec import KernelSpec, Parameter
from autotile.space.enumeration import Codes, SpaceStage, code_dtype, join, rank
from autotile.space.limits import Demand, Limit, broken_limit, demand_of, limits_of

MAX_COMBINATIONS = 2**63 - 1
"""Most combinations a space may have before its rules, so that a rank fits in int64."""

_CHUNK_ROWS = 2**20
"""Rows compared with the device's limits at once, which takes some ten int64 columns."""


@dataclass(frozen=True, eq=False)
class SearchSpace:
    """A table of configurations, one row each, ordered as nested loops over the declared values would visit them."""

    parameters: tuple[Parameter, ...]
    codes: Codes
    """Index into each parameter's values: shape (rows, parameters), column by column in memory, the smallest unsigned
    dtype that holds every index."""
    combinations: int
    """Combinations before any rule."""
    rules: tuple[SpaceStage, ...]
    """What each rule left, cumulatively, in the order applied."""
    limits: tuple[SpaceStage, ...]
    """What each limit of the device left, cumulatively; empty before they are applied."""
    seconds: float
    """Wall time of the enumeration."""

    def __len__(self) -> int:
        return len(self.codes)

    def config(self, row: int) -> dict[str, Value]:
        """Configuration of a row, in the declared order of parameters.

        Raises
        ------
        IndexError
            There is no such row.
        """
        codes = self.codes[row].tolist()
        return {parameter.name: parameter.values[code] for parameter, code in zip(self.parameters, codes, strict=True)}

    def row_of(self, config: Config) -> int | None:
        """Row of a configuration, or None where it is not in the table or names other parameters."""
        if len(config) != len(self.parameters):
            return None
        wanted = 0
        for parameter, positions in zip(self.parameters, self._positions, strict=True):
            code = positions.get(config.get(parameter.name))
            if code is None:
                return None
            wanted = wanted * len(positions) + code
        row = int(np.searchsorted(self._ranks, wanted))
        return row if row < len(self) and self._ranks[row] == wanted else None

    def column(self, name: str) -> NDArray[np.generic]:
        """Values of one parameter in every row: int64, bool or string, shape (rows,).

        Raises
        ------
        KeyError
            There is no such parameter.
        """
        index = self._index[name]
        return np.array(self.parameters[index].values)[self.codes[:, index]]

    def select(self, mask: ArrayLike, limits: tuple[SpaceStage, ...] = ()) -> SearchSpace:
        """Keep the rows where ``mask`` (bool, shape (rows,)) is true, and note the limits that chose them."""
        kept = np.asfortranarray(self.codes[np.asarray(mask, np.bool_)])
        return replace(self, codes=kept, limits=self.limits + limits)

    def including(self, configs: Iterable[Config]) -> SearchSpace:
        """The same with rows for configurations that are not in the table, be they pruned or not feasible.

        Raises
        ------
        KeyError
            A parameter is missing, or its value is not among those declared.
        """
        added = {
            tuple(codes[config[each.name]] for each, codes in zip(self.parameters, self._positions, strict=True)): None
            for config in configs
            if self.row_of(config) is None
        }
        if not added:
            return self
        rows = np.concatenate([self.codes, np.array(list(added), self.codes.dtype)])
        return replace(self, codes=_ordered(list(rows.T), [len(each.values) for each in self.parameters]))

    def rows_in(self, other: SearchSpace) -> NDArray[np.bool_]:
        """Which rows another table of the same parameters holds too, shape (rows,)."""
        return np.isin(self._ranks, other._ranks, assume_unique=True)

    def evaluate(self, expression: Expression, fixed: Mapping[str, Value]) -> NDArray[np.generic]:
        """Value of an expression in every row, shape (rows,).

        The expression is evaluated once for each combination of its own parameters that occurs, unless those could be
        more than the rows.

        Parameters
        ----------
        expression
            Over parameters and the names in ``fixed``.
        fixed
            Values of sizes and device properties.

        Raises
        ------
        SpecError
            The expression has no value in some row.
        """
        named = [parameter for parameter in self.parameters if parameter.name in expression.names]
        if not named:
            return np.full(len(self), expression.evaluate(fixed))
        sizes = [len(parameter.values) for parameter in named]
        cells = prod(sizes)
        if cells > len(self):
            return np.asarray(expression.evaluate({**fixed, **{each.name: self.column(each.name) for each in named}}))
        ranks = rank([self.codes[:, self._index[each.name]] for each in named], sizes, len(self))
        occurs = np.zeros(cells, np.bool_)
        occurs[ranks] = True
        codes = np.unravel_index(np.flatnonzero(occurs), sizes)
        values = {each.name: np.array(each.values)[code] for each, code in zip(named, codes, strict=True)}
        found = expression.evaluate({**fixed, **values})
        table = np.zeros(cells, found.dtype)
        table[occurs] = found
        return table[ranks]

    @cached_property
    def _index(self) -> dict[str, int]:
        return {parameter.name: index for index, parameter in enumerate(self.parameters)}

    @cached_property
    def _positions(self) -> list[dict[object, int]]:
        return [{value: code for code, value in enumerate(parameter.values)} for parameter in self.parameters]

    @cached_property
    def _ranks(self) -> NDArray[np.int64]:
        return rank(list(self.codes.T), [len(parameter.values) for parameter in self.parameters], len(self))


def enumerate_space(spec: KernelSpec, sizes: Mapping[str, int], device: DeviceProperties) -> SearchSpace:
    """Enumerate the configurations that meet the file's rules, those for the search alone among them.

    Parameters
    ----------
    spec
        The kernel.
    sizes
        A value for every size.
    device
        What ``device.*`` in a rule stands for.

    Raises
    ------
    SpecError
        A rule leaves nothing, a rule cannot be evaluated, or the space is too large.
    ProblemError
        A size is missing.
    DeviceError
        The kernel is not for devices of this compute capability.
    """
    started = time.perf_counter()
    check_device(spec, device)
    combinations = prod(len(parameter.values) for parameter in spec.parameters)
    if combinations > MAX_COMBINATIONS:
        raise SpecError(
            f"{combinations:.3g} combinations, at most {MAX_COMBINATIONS:.3g} are accepted; list fewer values",
            source=spec.source,
            key="parameters",
        )
    rules = (*spec.rules, *spec.heuristics)
    columns, stages = join(spec.parameters, rules, fixed_names(spec, sizes, device), spec.source)
    return SearchSpace(
        parameters=spec.parameters,
        codes=_ordered(columns, [len(parameter.values) for parameter in spec.parameters]),
        combinations=combinations,
        rules=tuple(stages),
        limits=(),
        seconds=time.perf_counter() - started,
    )


def feasible_space(
    spec: KernelSpec, sizes: Mapping[str, int], device: DeviceProperties, dtype: str | None = None
) -> SearchSpace:
    """Enumerate the configurations that meet the rules and that the device can hold, as far as the file declares it.

    Where the rules for the search alone leave nothing, they are left out.

    Parameters
    ----------
    spec, sizes, device
        As for `enumerate_space`.
    dtype
        Element type of the problem, which its memory and tensor maps depend on; None for the kernel's first.

    Raises
    ------
    SpecError
        As for `enumerate_space`, or a limit of the device leaves nothing.
    ProblemError, DeviceError
        As for `enumerate_space`.
    """
    try:
        return _feasible(spec, sizes, device, dtype)
    except EmptySpaceError as empty:
        if not spec.heuristics:
            raise
        try:
            return _feasible(replace(spec, heuristics=()), sizes, device, dtype)
        except SpecError:
            raise empty from None


def _feasible(spec: KernelSpec, sizes: Mapping[str, int], device: DeviceProperties, dtype: str | None) -> SearchSpace:
    started = time.perf_counter()
    space = enumerate_space(spec, sizes, device)
    fixed = fixed_names(spec, sizes, device)
    fits = np.ones(len(space), np.bool_)
    limits = limits_of(spec)
    remaining = [0] * len(limits)
    example: dict[str, int] = {}
    for start in range(0, len(space), _CHUNK_ROWS):
        rows = slice(start, start + _CHUNK_ROWS)
        part = replace(space, codes=space.codes[rows])
        demand = Demand.of(spec, sizes, dtype or spec.dtypes[0], partial(_column, part, fixed))
        for position, limit in enumerate(limits):
            dropped = fits[rows] & ~limit.fits(demand, device, spec)
            if limit.name not in example and dropped.any():
                example[limit.name] = start + int(np.argmax(dropped))
            fits[rows] &= ~dropped
            remaining[position] += int(np.count_nonzero(fits[rows]))
    stages = tuple(SpaceStage(limit.name, count) for limit, count in zip(limits, remaining, strict=True))
    if not stages[-1].remaining:
        name, cure, before = _emptied(limits, stages, len(space))
        config = space.config(example[name])
        fault = broken_limit(demand_of(spec, {**fixed, **config}, sizes, dtype or spec.dtypes[0]), device, spec)
        raise EmptySpaceError(
            f"the limit {name} of {device.name} leaves none of the {before:,} configurations that meet the rules and "
            f"the limits before it, as of {config_text(config)}: {fault.partition(': ')[2]}; {cure}",
            source=spec.source,
            key="launch",
        )
    return replace(space.select(fits, stages), seconds=time.perf_counter() - started)


def _column(space: SearchSpace, fixed: Mapping[str, Value], expression: Expression) -> NDArray[np.int64]:
    """Value of an expression in every row, shape (rows,); shape (1,) where no parameter is in it."""
    if expression.names.isdisjoint(parameter.name for parameter in space.parameters):
        return np.array([int(expression.evaluate(fixed))])
    return space.evaluate(expression, fixed).astype(np.int64, copy=False)


def _emptied(limits: tuple[Limit, ...], stages: tuple[SpaceStage, ...], before: int) -> tuple[str, str, int]:
    """The limit that left nothing, what helps against it, and how many configurations there were before."""
    counts = [before, *(stage.remaining for stage in stages)]
    position = next(position for position, stage in enumerate(stages) if not stage.remaining)
    return limits[position].name, limits[position].cure, counts[position]


def _ordered(columns: list[Codes], sizes: list[int]) -> Codes:
    """Put columns side by side, with the rows in ascending rank."""
    rows = len(columns[0])
    order = np.argsort(rank(columns, sizes, rows))
    codes = np.empty((rows, len(columns)), code_dtype(max(sizes)), order="F")
    for index, column in enumerate(columns):
        codes[:, index] = column[order]
    return codes
