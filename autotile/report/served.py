"""What would be served for a problem, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType

from autotile.cli.tables import below, facts, title
from autotile.core.model import config_text
from autotile.core.text import interval_text, occupancy_text, source_text, time_text
from autotile.kernel.workrate import Workrate
from autotile.serving.bound import BoundKernel


@dataclass(frozen=True, slots=True)
class ServedReport:
    """A served kernel; ``rate`` turns its time into a rate."""

    bound: BoundKernel
    rate: Workrate

    def to_json(self) -> dict[str, Any]:
        """The kernel's own document."""
        return self.bound.to_json()

    def __rich__(self) -> RenderableType:
        """What is served, then why."""
        bound = self.bound
        device = bound.device.name if bound.tier == "transferred" else source_text(bound.device.name, bound.source)
        return Group(title(f"{bound.problem} on {device}"), facts(self._facts()), below(bound.explain()))

    def _facts(self) -> Iterator[tuple[str, str]]:
        bound = self.bound
        yield "tier", bound.tier
        yield "configuration", config_text(bound.config)
        measured, resources, occupancy = bound.measurement, bound.resources, bound.occupancy
        if measured is not None:
            interval = f"95 % interval {interval_text(measured.low_us, measured.high_us)}"
            time, where = time_text(measured.time_us), source_text(bound.tuned_on, bound.source)
            if bound.tier == "exact":
                yield "time", f"{time} ({interval})"
            else:
                yield "time there", f"{time} on {where} ({interval})"
        if measured is not None and bound.tier == "exact":
            yield "rate", self.rate.text(measured.time_us, bound.device)
        if resources is not None:
            yield "registers", f"{resources.registers} a thread, {resources.spill_bytes} B spilled"
            yield "shared memory", f"{resources.static_smem_bytes + bound.geometry.dynamic_smem_bytes:,} B a block"
        if occupancy is not None:
            yield "occupancy", occupancy_text(bound.device, occupancy)
