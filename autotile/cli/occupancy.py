"""``autotile occupancy``: blocks per SM, and the limits that determine them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table

from autotile.cli.arguments import DeviceOption, JsonOption
from autotile.cli.output import examples, notice, show
from autotile.cli.tables import RIGHT, below, device_document, facts, table, title
from autotile.core.device import DeviceProperties
from autotile.core.model import Occupancy
from autotile.core.text import device_text, occupancy_text

if TYPE_CHECKING:
    from autotile.api.explanation import BlockResources
    from autotile.api.inspection import OccupancyResult

_FIGURES = ("a block uses", "an SM has", "blocks allowed")


def occupancy(
    threads: Annotated[int, typer.Option(metavar="N", min=1, help="Threads per block.", show_default=False)],
    *,
    registers: Annotated[int, typer.Option(metavar="N", min=0, help="Registers per thread; 0 to ignore them.")] = 0,
    smem: Annotated[int, typer.Option(metavar="BYTES", min=0, help="Static and dynamic shared memory per block.")] = 0,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compute how many blocks fit on an SM, and what limits them."""
    from autotile.api import inspection

    result = inspection.occupancy(threads, registers, smem, device=device)
    for text in result.notices:
        notice(text)
    show(result, occupancy_table, occupancy_document, as_json=as_json)


def occupancy_table(result: OccupancyResult) -> RenderableType:
    """Render the limits, then the occupancy in one line."""
    return Group(
        title(device_text(result.device)),
        limits_table(result.device, result.block, result.occupancy),
        below(facts([("occupancy", occupancy_text(result.device, result.occupancy))])),
    )


def limits_table(device: DeviceProperties, block: BlockResources, occupancy: Occupancy) -> Table:
    """Render, for each limit, the resources of a block, those of an SM, and the blocks that they allow."""
    from autotile.api.explanation import LIMIT_HEADINGS, limit_rows

    limits = table(*(f"{RIGHT}{heading}" if heading in _FIGURES else heading for heading in LIMIT_HEADINGS))
    for row in limit_rows(device, block, occupancy):
        limits.add_row(*row, style="bold" if row[-1] else None)
    return limits


def occupancy_document(result: OccupancyResult) -> dict[str, Any]:
    """Return the resources and the occupancy for JSON; 2147483647 blocks stand for a limit that does not apply."""
    return {
        "device": device_document(result.device),
        "threads": result.block.threads,
        "registers": result.block.registers,
        "smem_bytes": result.block.smem_bytes,
        **occupancy_values(result.occupancy),
    }


def occupancy_values(occupancy: Occupancy) -> dict[str, Any]:
    """Return an occupancy for JSON."""
    return {
        "blocks_per_sm": occupancy.blocks_per_sm,
        "warps_per_sm": occupancy.warps_per_sm,
        "occupancy": occupancy.occupancy,
        "limited_by": list(occupancy.limited_by),
        "limits": dict(occupancy.limits),
    }


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "autotile occupancy --threads 1024 --registers 32 --smem 8192 --device rtx-3060",
            "autotile occupancy --threads 256 --registers 128",
        )
    )(occupancy)
