"""The search space: all configurations that meet the rules and the heuristics, as one table."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import prod

import msgspec
import numpy as np
from msgspec import structs
from numpy.typing import ArrayLike, NDArray

from autotile.core.device import DeviceProperties
from autotile.core.forks import cached_property
from autotile.core.model import Config, Problem, Value, Values, config_text
from autotile.errors import ArgumentError, EmptySpaceError, SpecError
from autotile.kernel.arguments import Mask
from autotile.kernel.expressions import Expression
from autotile.kernel.launch import fixed_names, known_names
from autotile.kernel.problem import check_device
from autotile.kernel.spec import Computed, KernelSpec, Parameter
from autotile.space.enumeration import Codes, SpaceStage, code_dtype, join, rank
from autotile.space.limits import Demand, demand_of, limit_violation, limits_of, unfit_scalar

MAX_COMBINATIONS = 2**63 - 1
"""Maximum number of combinations before the rules, so that a rank fits in int64."""

_FEW_ROWS = 16
"""Rows up to which an expression is evaluated one row at a time, which is faster than over columns."""
_CHUNK_ROWS = 2**20
"""Rows that are checked against the limits of the device at a time, which takes about ten int64 columns."""


class SearchSpace(msgspec.Struct, frozen=True, eq=False, dict=True):
    """A table with one row per configuration, in the order of nested loops over the declared values."""

    parameters: tuple[Parameter, ...]
    codes: Codes
    """Index into the values of each parameter: shape (rows, parameters), Fortran order, in the smallest unsigned dtype
    that holds every index."""
    combinations: int
    """Number of combinations before any rule."""
    rules: tuple[SpaceStage, ...]
    """Cumulative counts after each rule and heuristic, in the order applied."""
    limits: tuple[SpaceStage, ...]
    """Cumulative counts after each limit of the device; empty before they are applied."""
    seconds: float
    """Wall time of the enumeration, in seconds."""
    computed: tuple[Computed, ...] = ()
    """Values that functions compute from a configuration."""

    @classmethod
    def of(cls, spec: KernelSpec, configs: Sequence[Config]) -> SearchSpace:
        """Return a table of some configurations in their order, with declared values; equal ones have a row each."""
        parameters = spec.parameters
        dtype = code_dtype(max((len(each.values) for each in parameters), default=1))
        none = np.empty((0, len(parameters)), dtype, order="F")
        space = cls(parameters, none, len(configs), (), (), 0.0, spec.computed)
        table = np.array([*map(space._codes_of, configs)], dtype).reshape(len(configs), len(parameters))
        return structs.replace(space, codes=np.asfortranarray(table))

    def __len__(self) -> int:
        return len(self.codes)

    def config(self, row: int) -> dict[str, Value]:
        """Return the configuration of a row, with parameters in declared order."""
        codes = self.codes[row].tolist()
        return {parameter.name: parameter.values[code] for parameter, code in zip(self.parameters, codes, strict=True)}

    def row_of(self, config: Config) -> int | None:
        """Return the row of a configuration; None if it is not in the table or has other parameters."""
        if len(config) != len(self.parameters):
            return None
        config_rank = 0
        for parameter, positions in zip(self.parameters, self._positions, strict=True):
            code = positions.get(config.get(parameter.name))
            if code is None:
                return None
            config_rank = config_rank * len(positions) + code
        row = int(np.searchsorted(self.ranks, config_rank))
        return row if row < len(self) and self.ranks[row] == config_rank else None

    def column(self, name: str) -> NDArray[np.generic]:
        """Return the values of one parameter: int64, bool or string, shape (rows,)."""
        index = self._index[name]
        return np.array(self.parameters[index].values)[self.codes[:, index]]

    def select(self, mask: ArrayLike, limits: tuple[SpaceStage, ...] = ()) -> SearchSpace:
        """Return the rows in which ``mask`` (bool, shape (rows,)) is true, with the limits that selected them."""
        kept = np.asfortranarray(self.codes[np.asarray(mask, np.bool_)])
        return structs.replace(self, codes=kept, limits=self.limits + limits)

    def including(self, configs: Iterable[Config]) -> SearchSpace:
        """Return the table with additional rows for configurations that are not in it, valid or not."""
        added = dict.fromkeys(self._codes_of(config) for config in configs if self.row_of(config) is None)
        if not added:
            return self
        rows = np.concatenate([self.codes, np.array(list(added), self.codes.dtype)])
        return structs.replace(self, codes=_ordered(list(rows.T), [len(each.values) for each in self.parameters]))

    def _codes_of(self, config: Config) -> tuple[int, ...]:
        return tuple(codes[config[each.name]] for each, codes in zip(self.parameters, self._positions, strict=True))

    def rows_in(self, other: SearchSpace) -> NDArray[np.bool_]:
        """Return which rows are also in another table of the same parameters, shape (rows,)."""
        return np.isin(self.ranks, other.ranks, assume_unique=True)

    def evaluate(self, expression: Expression, fixed: Values) -> NDArray[np.generic]:
        """Return the value of an expression in every row, shape (rows,).

        It is over parameters and the names in ``fixed``: sizes and device properties. It is evaluated once for each
        occurring combination of the parameters in it, or for each row if there are more combinations than rows.
        """
        if computed := [each for each in self.computed if each.name in expression.names]:
            from autotile.kernel.python_kernel import map_rows  # few kernels have functions

            columns = {name: self.column(name) for name in self._index}
            values = {each.name: map_rows(each.of, columns) for each in computed}
            return np.asarray(expression.evaluate({**fixed, **columns, **values}))
        named = [parameter for parameter in self.parameters if parameter.name in expression.names]
        if not named:
            return np.full(len(self), expression.value(fixed))
        if len(self) <= _FEW_ROWS:
            names = [parameter.name for parameter in named]
            known: dict[tuple[Value, ...], Value] = {}
            each_value = []
            for config in self.configs:
                row = tuple([config[name] for name in names])
                if row not in known:
                    known[row] = expression.value({**fixed, **dict(zip(names, row, strict=True))})
                each_value.append(known[row])
            return np.array(each_value)
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

    configs = cached_property(lambda self: [self.config(row) for row in range(len(self))])
    """The configuration of each row."""
    _index = cached_property(lambda self: {each.name: index for index, each in enumerate(self.parameters)})
    _positions = cached_property(
        lambda self: [{value: code for code, value in enumerate(each.values)} for each in self.parameters]
    )
    ranks = cached_property(
        lambda self: rank(list(self.codes.T), [len(each.values) for each in self.parameters], len(self))
    )
    """Position of each row in the full grid of codes, ascending."""


def enumerate_space(spec: KernelSpec, problem: Problem, device: DeviceProperties) -> SearchSpace:
    """Enumerate the configurations that meet the rules and the heuristics of a kernel for a problem."""
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
    columns, stages = join(spec.parameters, rules, fixed_names(spec, problem, device), spec.source)
    return SearchSpace(
        parameters=spec.parameters,
        codes=_ordered(columns, [len(parameter.values) for parameter in spec.parameters]),
        combinations=combinations,
        rules=tuple(stages),
        limits=(),
        seconds=time.perf_counter() - started,
        computed=spec.computed,
    )


def feasible_space(spec: KernelSpec, problem: Problem, device: DeviceProperties) -> SearchSpace:
    """Enumerate the configurations that meet the rules, the heuristics, and the limits of the device.

    The limits are checked against the resources that the file declares. If the heuristics leave no configuration, they
    are ignored. An `ArgumentError` is raised if a scalar that the problem binds does not fit in its type.
    """
    try:
        return _feasible(spec, problem, device)
    except EmptySpaceError as empty:
        if not spec.heuristics:
            raise
        try:
            return _feasible(replace(spec, heuristics=()), problem, device)
        except SpecError:
            raise empty from None


def _feasible(spec: KernelSpec, problem: Problem, device: DeviceProperties) -> SearchSpace:
    started = time.perf_counter()
    fixed = fixed_names(spec, problem, device)
    if fault := unfit_scalar(spec, problem.dtype, fixed):
        raise ArgumentError(fault)
    space = enumerate_space(spec, problem, device)
    fits = np.ones(len(space), np.bool_)
    limits = limits_of(spec)
    remaining = [0] * len(limits)
    example: dict[str, int] = {}
    for start in range(0, len(space), _CHUNK_ROWS):
        rows = slice(start, start + _CHUNK_ROWS)
        part = structs.replace(space, codes=space.codes[rows])
        demand = Demand(spec, problem, partial(_column, part, fixed))
        for position, limit in enumerate(limits):
            dropped = fits[rows] & np.logical_not(limit.fits(demand, device))
            if limit.name not in example and dropped.any():
                example[limit.name] = start + int(np.argmax(dropped))
            fits[rows] &= ~dropped
            remaining[position] += int(np.count_nonzero(fits[rows]))
    stages = tuple(SpaceStage(limit.name, count) for limit, count in zip(limits, remaining, strict=True))
    if not stages[-1].remaining:
        position = remaining.index(0)
        name, hint, before = limits[position].name, limits[position].hint, [len(space), *remaining][position]
        config = space.config(example[name])
        violation = limit_violation(demand_of(spec, known_names(spec, config, problem, device), problem), device)
        raise EmptySpaceError(
            f"the limit {name} of {device.name} leaves none of the {before:,} configurations that meet the rules and "
            f"the limits before it; for example, {config_text(config)}: {violation.partition(': ')[2]}; {hint}",
            source=spec.source,
            key="launch",
        )
    return structs.replace(space.select(fits, stages), seconds=time.perf_counter() - started)


def _column(space: SearchSpace, fixed: Values, extra: Values, rows: Mask, expression: Expression) -> NDArray[np.int64]:
    """Return the value of an expression in the given rows, 1 in others; shape (1,) if it contains no parameter.

    Parameters are those of `autotile.space.limits.EvaluateWhere`.
    """
    if not np.any(rows):
        return np.ones(1, np.int64)
    fixed = {**extra, **fixed}
    varying = {*(each.name for each in space.parameters), *(each.name for each in space.computed)}
    if expression.names.isdisjoint(varying):
        return np.array([int(expression.evaluate(fixed))])
    if np.all(rows):
        return space.evaluate(expression, fixed).astype(np.int64, copy=False)
    column = np.ones(len(space), np.int64)
    column[rows] = space.select(rows).evaluate(expression, fixed)
    return column


def _ordered(columns: list[Codes], sizes: list[int]) -> Codes:
    """Return columns as one array, with the rows in ascending rank."""
    rows = len(columns[0])
    order = np.argsort(rank(columns, sizes, rows))
    codes = np.empty((rows, len(columns)), code_dtype(max(sizes)), order="F")
    for index, column in enumerate(columns):
        codes[:, index] = column[order]
    return codes
