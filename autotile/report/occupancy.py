"""How many blocks fit on an SM, and which limit binds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from autotile.cli.tables import RIGHT, below, facts, table, title
from autotile.core.device import DeviceProperties
from autotile.core.model import Occupancy
from autotile.core.text import device_text, percent_text, plural
from autotile.space.occupancy import UNLIMITED


@dataclass(frozen=True, slots=True)
class OccupancyReport:
    """What a block uses and what that gives; ``smem_bytes`` is static and dynamic together."""

    device: DeviceProperties
    threads: int
    registers: int
    smem_bytes: int
    found: Occupancy

    def to_json(self) -> dict[str, Any]:
        """Inputs and answer; a limit of 2147483647 blocks means that a block uses none of that resource."""
        return {
            "device": {"name": self.device.name, "source": self.device.source},
            "threads": self.threads,
            "registers": self.registers,
            "smem_bytes": self.smem_bytes,
            **occupancy_document(self.found),
        }

    def __rich__(self) -> RenderableType:
        """Headline, then a line for each limit."""
        return Group(
            title(device_text(self.device)),
            occupancy_table(self.device, self.threads, self.registers, self.smem_bytes, self.found),
            below(facts([("occupancy", occupancy_sentence(self.device, self.found))])),
        )


def occupancy_document(found: Occupancy) -> dict[str, Any]:
    """An occupancy as plain values."""
    return {
        "blocks_per_sm": found.blocks_per_sm,
        "warps_per_sm": found.warps_per_sm,
        "occupancy": found.occupancy,
        "limited_by": list(found.limited_by),
        "limits": dict(found.limits),
    }


def occupancy_sentence(device: DeviceProperties, found: Occupancy) -> str:
    """The answer in one line."""
    binding = ", ".join(name.replace("_", " ") for name in found.limited_by)
    if found.blocks_per_sm == 0:
        return f"no block fits on an SM; limited by {binding}"
    return (
        f"{percent_text(found.occupancy)}: {plural(found.blocks_per_sm, 'block')} on an SM, "
        f"{found.warps_per_sm} of {device.max_warps_per_sm} warps; limited by {binding}"
    )


def occupancy_table(device: DeviceProperties, threads: int, registers: int, smem_bytes: int, found: Occupancy) -> Table:
    """A line for each limit: what a block uses, what an SM has, how many blocks that allows, which one binds."""
    reserved = device.smem_reserved_per_block_bytes
    uses = {
        "threads": (f"{threads:,}", f"{device.max_threads_per_sm:,}"),
        "registers": (f"{registers:,} a thread" if registers else "not known", f"{device.registers_per_sm:,}"),
        "shared_memory": (
            f"{smem_bytes:,} B" + (f" + {reserved:,} B reserved" if reserved else ""),
            f"{device.smem_per_sm_bytes:,} B",
        ),
        "blocks": ("1", f"{device.max_blocks_per_sm:,}"),
    }
    shown = table("limit", f"{RIGHT}a block uses", f"{RIGHT}an SM has", f"{RIGHT}blocks allowed", "")
    for name, (used, available) in uses.items():
        allowed = "no limit" if found.limits[name] == UNLIMITED else f"{found.limits[name]:,}"
        binds = name in found.limited_by
        shown.add_row(name.replace("_", " "), used, available, allowed, "binds" if binds else "", style=_style(binds))
    return shown


def _style(binds: bool) -> str | None:
    return "bold" if binds else None
