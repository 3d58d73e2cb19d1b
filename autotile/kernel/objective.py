"""The objective of a search and metrics of the user's own: expressions over measured values, parameters and sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autotile.kernel.array_expressions import ArrayExpression, parse_array_expression
from autotile.kernel.nodes import Kind
from autotile.kernel.syntax import Location
from autotile.kernel.table import Table, check_names

MEASURED = (
    "time_us",
    "registers",
    "spill_bytes",
    "static_smem_bytes",
    "dynamic_smem_bytes",
    "threads",
    "blocks",
    "occupancy",
    "energy_mj",
    "max_error",
)
"""Values of a trial that expressions may use, beside parameters, sizes, flags and metrics."""

RUN_VALUES = ("time_us", "energy_mj", "max_error")
"""Values that only a run gives; the others are known after compilation."""


class Metric(NamedTuple):
    """A named value that is computed for each trial."""

    name: str
    expression: ArrayExpression


class Objective(NamedTuple):
    """Quantity that a search minimises or maximises instead of the time."""

    expression: ArrayExpression
    maximize: bool = False


def parse_metrics(table: Table, kinds: Mapping[str, Kind], taken: Mapping[str, str]) -> tuple[Metric, ...]:
    """Parse ``[metrics]``; a metric may use those before it.

    Parameters
    ----------
    table
        The section.
    kinds
        Kind of each size, flag and parameter that is a number or a boolean.
    taken
        Names of sizes, flags and parameters, with their nouns.

    Raises
    ------
    SpecError
        A name is taken, or an expression is malformed or uses an unknown name.
    """
    check_names(table, what="a metric", taken={**taken, **dict.fromkeys(MEASURED, "a measured value")})
    metrics: list[Metric] = []
    for name in table.data:
        names = [metric.name for metric in metrics]
        metrics.append(Metric(name, parse_score(table.text(name, multiline=True), names, kinds, table.location(name))))
    return tuple(metrics)


def parse_objective(table: Table, metrics: Sequence[Metric], kinds: Mapping[str, Kind]) -> Objective | None:
    """Parse ``[objective]``; None if the section is empty."""
    table.allow(("value", "maximize"))
    if not table.data:
        return None
    names = [metric.name for metric in metrics]
    expression = parse_score(table.text("value", multiline=True), names, kinds, table.location("value"))
    return Objective(expression, table.boolean("maximize", default=False))


def parse_score(text: str, metrics: Sequence[str], kinds: Mapping[str, Kind], location: Location) -> ArrayExpression:
    """Parse an expression over measured values, metrics, and the names in ``kinds``.

    Raises
    ------
    SpecError
        The expression is malformed or uses an unknown name.
    """
    return parse_array_expression(text, (*MEASURED, *metrics, *kinds), kinds, location)
