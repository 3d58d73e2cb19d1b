"""Missed problems that were tuned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from autotile.cli.tables import below
from autotile.report.tuning import TuneReport


@dataclass(frozen=True, slots=True)
class TunedReport:
    """Several problems, tuned one after another."""

    reports: Sequence[TuneReport]

    def to_json(self) -> list[dict[str, Any]]:
        """One document a problem."""
        return [report.to_json() for report in self.reports]

    def __rich__(self) -> RenderableType:
        """One report under the other."""
        if not self.reports:
            return Text("nothing was tuned")
        first, *others = self.reports
        return Group(first, *(below(report) for report in others))
