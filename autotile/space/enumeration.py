"""Enumeration of the combinations of parameter values that meet the rules, by joining one parameter at a time.

A row holds one code, an index into the values of a parameter, for each parameter joined so far. A rule is applied as
soon as its last parameter is joined. As it has few parameters, it is evaluated once over the grid of their values, and
each row looks up its result in this truth table. Therefore, a rule must have a value on its whole grid, whatever other
rules exclude; it must guard its own divisions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

import msgspec
import numpy as np
from numpy.typing import NDArray

from autotile.core.model import Values
from autotile.core.text import plural
from autotile.errors import EmptySpaceError, SpecError
from autotile.kernel.expressions import Location
from autotile.kernel.spec import Parameter, Rule

Codes = NDArray[np.unsignedinteger]
"""Indices into the values of a parameter, in the smallest unsigned type that holds them."""

Columns = Mapping[str, Codes]
Mask = NDArray[np.bool_]
Domains = Mapping[str, NDArray[np.generic]]
"""Values of each parameter, as an array."""

MAX_ROWS = 16_000_000
"""Maximum number of rows of a table."""

MAX_TABLE_BYTES = 512 * 2**20
"""Maximum size of a table: `MAX_ROWS` with 33 parameters of at most 256 values; making it takes a few times as much."""

MAX_EXAMINED = 256_000_000
"""Maximum number of combinations that one join examines; at some nanoseconds each, a few seconds."""

MAX_GRID = 2**20
"""Maximum size of a truth table; a rule over a larger grid is evaluated for each row."""

_ONE_CODE: Codes = np.zeros(1, np.uint8)
"""Codes of a parameter with a single value, to be broadcast."""

_CHUNK = 2**20
"""Combinations examined at a time, which bounds the memory of those that are discarded."""


class SpaceStage(msgspec.Struct, frozen=True):
    """Number of combinations that meet a rule or limit and all those applied before it."""

    name: str
    remaining: int
    is_heuristic: bool = False
    """Whether it is a heuristic rather than a rule."""


def join(
    parameters: Sequence[Parameter], rules: Sequence[Rule], fixed: Values, source: str = ""
) -> tuple[list[Codes], list[SpaceStage]]:
    """Enumerate the combinations that meet the rules, conditions over parameters and the names in ``fixed``.

    Return one column of codes per parameter, of equal length, with the rows in the order of the joins; and the counts
    after each rule, in the order applied. ``source`` is the path of the file, for messages.
    """
    domains = {parameter.name: np.array(parameter.values) for parameter in parameters}
    conditions = [_condition(rule, domains, fixed) for rule in rules]
    combinations = prod(map(len, domains.values()))
    constants: Columns = {name: _ONE_CODE for name, values in domains.items() if len(values) == 1}
    columns: dict[str, Codes] = {}  # of the joined parameters that have more than one value
    rows = 1
    joined: set[str] = set()
    stages: list[SpaceStage] = []

    def check_size(name: str, size: int, maximum: int) -> None:
        if size > maximum:
            raise Location(source, f"parameters.{name}").error(
                f"joining {name} makes a table of at least {size:,} combinations, at most {maximum:,} are accepted; "
                "add rules with few parameters, or list fewer values"
            )

    def check_bytes(size: int, row_bytes: int) -> None:
        if size * row_bytes > MAX_TABLE_BYTES:
            raise SpecError(
                f"{size:,} combinations of {len(domains)} parameters take {size * row_bytes:,} bytes, at most "
                f"{MAX_TABLE_BYTES:,} are accepted; add rules, or list fewer parameters or values",
                source=source,
                key="parameters",
            )

    def record(rule: Rule, remaining: int) -> None:
        before = stages[-1].remaining if stages else combinations
        stages.append(SpaceStage(rule.name, remaining, rule.is_heuristic))
        if remaining == 0:
            met = ", ".join(stage.name for stage in stages[:-1])
            found = plural(before, "combination")
            those = f"of the {found} that meet {met}" if met else f"of {found}"
            raise rule.expression.location.error(
                f"the {rule} leaves none {those}; relax it or add values",
                expression=rule.expression.text,
                kind=EmptySpaceError,
            )

    for rule, (names, share, _) in zip(rules, conditions, strict=True):
        if not names:  # it keeps all combinations or none
            record(rule, combinations if share else 0)
    for name in join_order(domains, conditions):
        joined.add(name)
        completed = [
            (rule, holds)
            for rule, (names, _, holds) in zip(rules, conditions, strict=True)
            if name in names and joined.issuperset(names)
        ]
        if name in constants and not completed:
            continue
        size = len(domains[name])
        check_size(name, rows * size, MAX_EXAMINED if completed else MAX_ROWS)
        pieces: list[dict[str, Codes]] = []
        counts = [0] * len(completed)
        kept = 0
        step = max(1, _CHUNK // size)
        for start in range(0, rows, step):
            chunk = {other: column[start : start + step] for other, column in columns.items()}
            chunk_rows = min(step, rows - start)
            keep = np.ones((chunk_rows, size), np.bool_)
            for position, (_, holds) in enumerate(completed):
                keep &= holds(name, {**constants, **chunk}, chunk_rows)
                counts[position] += int(np.count_nonzero(keep))
            row, code = np.divmod(np.flatnonzero(keep), size)
            added = {name: code.astype(code_dtype(size))} if size > 1 else {}
            pieces.append({other: column[row] for other, column in chunk.items()} | added)
            kept += len(row)
            check_size(name, kept, MAX_ROWS)
            check_bytes(kept, sum(column.itemsize for column in pieces[-1].values()))
        unbound = combinations // prod(len(domains[other]) for other in (*columns, name))
        for (rule, _), count in zip(completed, counts, strict=True):
            record(rule, count * unbound)
        columns = {other: np.concatenate([piece.pop(other) for piece in pieces]) for other in tuple(pieces[0])}
        rows = kept
    check_bytes(rows, len(parameters) * code_dtype(max(map(len, domains.values()))).itemsize)
    no_memory = dict.fromkeys(constants, np.broadcast_to(_ONE_CODE, rows))
    return [{**no_memory, **columns}[parameter.name] for parameter in parameters], stages


def rank(columns: Sequence[Codes], sizes: Sequence[int], rows: int) -> NDArray[np.int64]:
    """Return the position of each row in the full grid of codes, with the last column varying fastest (int64)."""
    result = np.zeros(rows, np.int64)
    for column, size in zip(columns, sizes, strict=True):
        result *= size
        result += column
    return result


def code_dtype(size: int) -> np.dtype[np.unsignedinteger]:
    """Return the smallest unsigned type that holds ``size`` different codes."""
    return np.min_scalar_type(size - 1)


Condition = tuple[tuple[str, ...], float, Callable[[str, Columns, int], Mask]]
"""The parameters of a rule, the share of its grid that meets it, 1 if unknown, and a function that applies it.

Given the joined parameter, the columns of the others, and the number of rows, the function returns whether each row
meets the rule with each value of the joined parameter, shape (rows, values)."""


def _condition(rule: Rule, domains: Domains, fixed: Values) -> Condition:
    expression = rule.expression
    names = tuple(name for name in domains if name in expression.names)
    sizes = [len(domains[name]) for name in names]
    if prod(sizes) > MAX_GRID:

        def evaluated(joined: str, columns: Columns, rows: int) -> Mask:
            values = {name: domains[name][columns[name]][:, np.newaxis] for name in names if name != joined}
            holds = expression.evaluate({**fixed, **values, joined: domains[joined]})
            return np.broadcast_to(holds, (rows, len(domains[joined])))

        return names, 1.0, evaluated
    after = range(len(names) - 1, -1, -1)  # axes behind that of each parameter
    grid = {name: domains[name].reshape(-1, *[1] * axes) for name, axes in zip(names, after, strict=True)}
    table = np.broadcast_to(expression.evaluate({**fixed, **grid}), sizes)

    def looked_up(joined: str, columns: Columns, rows: int) -> Mask:
        truth = np.moveaxis(table, names.index(joined), -1)
        keys = rank([columns[name] for name in names if name != joined], truth.shape[:-1], rows)
        return truth.reshape(-1, truth.shape[-1])[keys]

    return names, float(np.mean(table)), looked_up


def join_order(domains: Domains, conditions: Sequence[Condition]) -> list[str]:
    """Order the parameters so that tables stay small.

    The next rule is the one whose missing parameters, with every rule that they complete, have the smallest expected
    growth of the table; parameters without rules come last. Ties are resolved by declared order.
    """
    order: list[str] = []
    pending = [(names, share) for names, share, _ in conditions if names]

    def growth(condition: tuple[tuple[str, ...], float]) -> float:
        bound = {*order, *condition[0]}
        values = prod(len(domains[name]) for name in condition[0] if name not in order)
        return values * prod(share for names, share in pending if bound.issuperset(names))

    while pending:
        chosen, _ = min(pending, key=growth)
        missing = [name for name in chosen if name not in order]
        order += sorted(missing, key=lambda name: len(domains[name]))
        pending = [(names, share) for names, share in pending if not set(order).issuperset(names)]
    return order + [name for name in domains if name not in order]
