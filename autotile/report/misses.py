"""Problems that could not be served exactly, and what came of tuning them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from autotile.report.layout import RIGHT, below
from autotile.report.listing import Listing
from autotile.report.text import moment_text, sizes_text
from autotile.report.tuning import TuneReport
from autotile.store.misses import StoredMiss


@dataclass(frozen=True, slots=True)
class MissesReport:
    """What was asked for in vain."""

    misses: Sequence[StoredMiss]

    def to_json(self) -> list[dict[str, Any]]:
        """One row a problem and GPU."""
        return [
            {
                "kernel": miss.problem.kernel,
                "problem": dict(miss.problem.sizes),
                "dtype": miss.problem.dtype,
                "device": miss.gpu_name,
                "tier": miss.tier,
                "count": miss.count,
                "last_at": miss.last_at.isoformat(),
            }
            for miss in self.misses
        ]

    def __rich__(self) -> RenderableType:
        """One entry a problem and GPU."""
        if not self.misses:
            return Text("nothing was asked for in vain")
        headings = ("kernel", "problem", "device", "served", f"{RIGHT}times", "last")
        return Listing(headings, list(map(_row, self.misses)), ("last", "device"))


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


def _row(miss: StoredMiss) -> tuple[str, ...]:
    problem = f"{sizes_text(miss.problem.sizes)} {miss.problem.dtype}"
    return miss.problem.kernel, problem, miss.gpu_name, miss.tier, f"{miss.count:,}", moment_text(miss.last_at)
