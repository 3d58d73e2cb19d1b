"""How large a search space is, and what each rule and limit leaves of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from autotile.cli.tables import RIGHT, below, facts, table, title
from autotile.core.device import DeviceProperties
from autotile.core.model import Problem
from autotile.core.text import device_text, duration_text
from autotile.space.enumeration import SpaceStage
from autotile.space.search_space import SearchSpace


@dataclass(frozen=True, slots=True)
class SpaceReport:
    """A kernel's space for a problem on a device."""

    problem: Problem
    device: DeviceProperties
    space: SearchSpace

    def to_json(self) -> dict[str, Any]:
        """Counts after each rule and limit, and the values of each parameter."""
        space = self.space
        return {
            "kernel": self.problem.kernel,
            "problem": dict(self.problem.sizes),
            "dtype": self.problem.dtype,
            "device": {"name": self.device.name, "source": self.device.source},
            "combinations": space.combinations,
            "valid": len(space),
            "rules": _stages(space.rules),
            "limits": _stages(space.limits),
            "parameters": {parameter.name: list(parameter.values) for parameter in space.parameters},
            "seconds": round(space.seconds, 6),
        }

    def __rich__(self) -> RenderableType:
        """Parameters, then the funnel."""
        values = facts((p.name, " ".join(map(str, p.values))) for p in self.space.parameters)
        found = f"{len(self.space):,} valid configurations, enumerated in {duration_text(self.space.seconds)}"
        return Group(
            title(f"{self.problem} on {device_text(self.device)}"), values, below(self._funnel()), below(found)
        )

    def _funnel(self) -> Table:
        space = self.space
        shown = table("after", f"{RIGHT}configurations left")
        shown.add_row("all combinations", f"{space.combinations:,}")
        for stage in space.rules:
            shown.add_row(f"{'heuristic' if stage.is_heuristic else 'rule'} {stage.name}", f"{stage.remaining:,}")
        for stage in space.limits:
            shown.add_row(f"limit {stage.name}", f"{stage.remaining:,}")
        return shown


def _stages(stages: Sequence[SpaceStage]) -> list[dict[str, Any]]:
    return [
        {"name": stage.name, "remaining": stage.remaining, **({"heuristic": True} if stage.is_heuristic else {})}
        for stage in stages
    ]
