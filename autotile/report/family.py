"""A family that was tuned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from autotile.cli.list import loss_text, rule_facts
from autotile.cli.tables import RIGHT, below, facts, table, title
from autotile.core.text import (
    NOTHING,
    device_text,
    duration_text,
    percent_text,
    plural,
    sizes_text,
    time_text,
)
from autotile.families.rule import FamilyRule
from autotile.tuning.family_session import FamilyResult


@dataclass(frozen=True, slots=True)
class FamilyReport:
    """A family's result; ``call`` is a line of Python that is served by the rule."""

    result: FamilyResult
    call: str

    def to_json(self) -> dict[str, Any]:
        """The result's document, with the line that is served by the rule."""
        return {**self.result.to_json(), "call": self.call}

    def __rich__(self) -> RenderableType:
        """The points with what is lost at each, the rule, then what a person does next."""
        result = self.result
        head = title(f"{result.kernel} {result.family} {result.dtype} on {device_text(result.device)}")
        if result.rule is None:
            return Group(head, facts([("interrupted", "before there was a rule; the same command goes on from there")]))
        parts = [_points_table(result.rule), below(rule_facts(result.rule)), below(facts(self._facts(result.rule)))]
        return Group(head, *parts)

    def _facts(self, rule: FamilyRule) -> Iterator[tuple[str, str]]:
        result = self.result
        yield "loss", loss_text(rule)
        if result.default_loss is not None:
            yield "default", f"{percent_text(result.default_loss)} mean loss of the default configuration alone"
        yield "chosen", f"{plural(len(rule.configs), 'configuration')} of {result.candidates} measured at every point"
        resumed = f", {plural(result.resumed, 'point')} resumed" if result.resumed else ""
        yield "took", duration_text(result.seconds) + resumed
        yield "saved in", result.database
        yield "serve it", self.call


def _points_table(rule: FamilyRule) -> Table:
    shown = table("point", f"{RIGHT}best", f"{RIGHT}loss", f"{RIGHT}loss when left out", wrap=False)
    for point in rule.points:
        held_out = NOTHING if point.held_out is None else percent_text(point.held_out)
        shown.add_row(sizes_text(point.sizes), time_text(point.best_us), percent_text(point.loss), held_out)
    return shown
