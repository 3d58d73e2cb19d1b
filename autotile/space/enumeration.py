"""All combinations of parameter values that meet the rules, found by joining one parameter at a time.

A row holds one code, an index into a parameter's values, for each parameter joined so far. A rule is applied as soon as
its last parameter is joined. It names few parameters, so it is evaluated once over the grid of their values, a truth
table, in which each row looks its answer up. A rule must therefore have an answer on the whole of its own grid,
whatever other rules exclude: it guards its own divisions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from autotile.core.frozen import dataclass
from autotile.core.model import Value
from autotile.errors import EmptySpaceError, SpecError
from autotile.kernel.spec import Parameter, Rule

Codes = NDArray[np.unsignedinteger]
"""Indices into values, in the smallest unsigned type that holds them."""

Columns = Mapping[str, Codes]
Domains = Mapping[str, NDArray[np.generic]]
"""The values of each parameter, as an array."""

MAX_ROWS = 16_000_000
"""Most rows that a table may keep; at one byte a parameter and row, some hundreds of megabytes."""

MAX_EXAMINED = 256_000_000
"""Most combinations that one join may examine; at some nanoseconds each, a few seconds."""

MAX_GRID = 2**20
"""Largest grid for which a truth table is made; a rule over a larger one is evaluated on the rows themselves."""

_CHUNK = 2**20
"""Combinations examined at once, so that those thrown away take little memory."""


@dataclass(frozen=True, slots=True)
class SpaceStage:
    """What a rule or limit left: ``remaining`` whole combinations that meet it and all that were applied before."""

    name: str
    remaining: int
    is_heuristic: bool = False
    """Whether it is a heuristic rather than a rule."""


def join(
    parameters: Sequence[Parameter], rules: Sequence[Rule], fixed: Mapping[str, Value], source: str = ""
) -> tuple[list[Codes], list[SpaceStage]]:
    """Find every combination that meets the rules.

    Parameters
    ----------
    parameters
        Names and values.
    rules
        Conditions over parameters and the names in ``fixed``.
    fixed
        Values of sizes and device properties.
    source
        The file's name, for messages.

    Returns
    -------
    list of numpy.ndarray
        One column of codes for each parameter, of equal length; the order of rows is that of the joins.
    list of SpaceStage
        What each rule left, in the order applied.

    Raises
    ------
    SpecError
        A rule leaves nothing or has no answer somewhere on its grid, or a table would grow beyond `MAX_ROWS` or
        `MAX_EXAMINED`.
    """
    domains = {parameter.name: np.array(parameter.values) for parameter in parameters}
    conditions = [_Condition.of(rule, domains, fixed) for rule in rules]
    table = _GrowingTable(domains, source)
    table.apply_constant([condition for condition in conditions if not condition.names])
    for name in join_order(domains, conditions):
        bound = {name, *table.columns}
        table.join(name, [c for c in conditions if name in c.names and bound.issuperset(c.names)])
    return [table.columns[parameter.name] for parameter in parameters], table.stages


def rank(columns: Sequence[Codes], sizes: Sequence[int], rows: int) -> NDArray[np.int64]:
    """Position of each row in the full grid of codes, the last column running fastest (int64)."""
    result = np.zeros(rows, np.int64)
    for column, size in zip(columns, sizes, strict=True):
        result *= size
        result += column
    return result


def code_dtype(size: int) -> np.dtype[np.unsignedinteger]:
    """Smallest unsigned type that holds ``size`` different codes."""
    return np.min_scalar_type(size - 1)


@dataclass(frozen=True, slots=True)
class _Condition:
    """A rule, the parameters it names, and its truth table over the grid of their values unless that is too large."""

    rule: Rule
    names: tuple[str, ...]
    domains: Domains
    fixed: Mapping[str, Value]
    truth: NDArray[np.bool_] | None
    share: float
    """Share of its grid that the rule keeps; 1 where that is not known."""

    @classmethod
    def of(cls, rule: Rule, domains: Domains, fixed: Mapping[str, Value]) -> _Condition:
        names = tuple(name for name in domains if name in rule.expression.names)
        shape = tuple(len(domains[name]) for name in names)
        if prod(shape) > MAX_GRID:
            return cls(rule, names, domains, fixed, truth=None, share=1.0)
        truth = np.broadcast_to(rule.expression.evaluate({**fixed, **_open_grid(names, domains)}), shape)
        return cls(rule, names, domains, fixed, truth, share=float(np.mean(truth)))

    def holds(self, joined: str, columns: Columns, rows: int) -> NDArray[np.bool_]:
        """Whether each row meets the rule with each value of the parameter being joined: bool, (rows, values)."""
        others = [name for name in self.names if name != joined]
        shape = (rows, len(self.domains[joined]))
        if self.truth is None:
            values = {name: self.domains[name][columns[name]][:, np.newaxis] for name in others}
            holds = self.rule.expression.evaluate({**self.fixed, **values, joined: self.domains[joined]})
            return np.broadcast_to(holds, shape)
        truth = np.moveaxis(self.truth, self.names.index(joined), -1)
        keys = rank([columns[name] for name in others], truth.shape[:-1], rows)
        return truth.reshape(-1, shape[1])[keys]


def _open_grid(names: Sequence[str], domains: Domains) -> dict[str, NDArray[np.generic]]:
    """Values of each parameter along an axis of its own, so that they broadcast to the grid of all."""
    last = len(names) - 1
    return {name: domains[name].reshape(-1, *[1] * (last - axis)) for axis, name in enumerate(names)}


def join_order(domains: Domains, conditions: Sequence[_Condition]) -> list[str]:
    """Order the parameters so that tables stay small.

    The rule that comes next is the one whose missing parameters, with every rule that they complete, are expected to
    multiply the rows by least; parameters that no rule names come last. Equal choices go by the order declared.
    """
    order: list[str] = []
    pending = [condition for condition in conditions if condition.names]

    def growth(condition: _Condition) -> float:
        bound = {*order, *condition.names}
        values = prod(len(domains[name]) for name in condition.names if name not in order)
        return values * prod(other.share for other in pending if bound.issuperset(other.names))

    while pending:
        chosen = min(pending, key=growth)
        missing = [name for name in chosen.names if name not in order]
        order += sorted(missing, key=lambda name: len(domains[name]))
        pending = [condition for condition in pending if not set(order).issuperset(condition.names)]
    return order + [name for name in domains if name not in order]


class _GrowingTable:
    """The rows that meet every rule applied so far, over the parameters joined so far."""

    def __init__(self, domains: Domains, source: str) -> None:
        self.domains = domains
        self.source = source
        self.rows = 1
        self.columns: dict[str, Codes] = {}
        self.stages: list[SpaceStage] = []
        self.combinations = prod(len(values) for values in domains.values())

    def apply_constant(self, conditions: Sequence[_Condition]) -> None:
        """Apply rules that name no parameter: each keeps everything or nothing."""
        for condition in conditions:
            self._record(condition.rule, self.combinations if condition.share else 0)

    def join(self, name: str, conditions: Sequence[_Condition]) -> None:
        """Add a parameter and apply the rules that it completes."""
        size = len(self.domains[name])
        self._check_size(name, self.rows * size, MAX_EXAMINED if conditions else MAX_ROWS)
        pieces: list[dict[str, Codes]] = []
        counts = [0] * len(conditions)
        kept = 0
        step = max(1, _CHUNK // size)
        for start in range(0, self.rows, step):
            chunk = {other: column[start : start + step] for other, column in self.columns.items()}
            rows = min(step, self.rows - start)
            keep = np.ones((rows, size), np.bool_)
            for position, condition in enumerate(conditions):
                keep &= condition.holds(name, chunk, rows)
                counts[position] += int(np.count_nonzero(keep))
            row, code = np.divmod(np.flatnonzero(keep), size)
            pieces.append(
                {other: column[row] for other, column in chunk.items()} | {name: code.astype(code_dtype(size))}
            )
            kept += len(row)
            self._check_size(name, kept, MAX_ROWS)
        unbound = self.combinations // prod(len(self.domains[other]) for other in (*self.columns, name))
        for condition, count in zip(conditions, counts, strict=True):
            self._record(condition.rule, count * unbound)
        self.columns = {other: np.concatenate([piece[other] for piece in pieces]) for other in pieces[0]}
        self.rows = kept

    def _record(self, rule: Rule, remaining: int) -> None:
        before = self.stages[-1].remaining if self.stages else self.combinations
        self.stages.append(SpaceStage(rule.name, remaining, rule.is_heuristic))
        if remaining == 0:
            met = ", ".join(stage.name for stage in self.stages[:-1])
            those = f"of the {before:,} combinations that meet {met}" if met else f"of {before:,} combinations"
            raise rule.expression.location.error(
                f"the {rule} leaves none {those}; relax it or add values",
                expression=rule.expression.text,
                kind=EmptySpaceError,
            )

    def _check_size(self, name: str, rows: int, most: int) -> None:
        if rows > most:
            raise SpecError(
                f"joining {name} makes a table of at least {rows:,} combinations, at most {most:,} are accepted; add "
                "rules that name few parameters, or list fewer values",
                source=self.source,
                key=f"parameters.{name}",
            )
