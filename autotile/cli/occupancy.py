"""``autotile occupancy``: blocks per SM, and the limits that determine them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table

from autotile.cli.application import examples
from autotile.cli.arguments import DeviceOption, JsonOption
from autotile.cli.output import notice, show
from autotile.cli.tables import RIGHT, below, facts, table, title
from autotile.core.device import DeviceProperties
from autotile.core.model import Occupancy
from autotile.core.text import device_text, occupancy_text

if TYPE_CHECKING:
    from autotile.api.explanation import BlockResources
    from autotile.api.inspection import OccupancyResult


def occupancy(
    threads: Annotated[int, typer.Option(metavar="N", min=1, help="Threads in a block.", show_default=False)],
    *,
    registers: Annotated[
        int, typer.Option(metavar="N", min=0, help="Registers a thread; 0 leaves them out of account.")
    ] = 0,
    smem: Annotated[
        int, typer.Option(metavar="BYTES", min=0, help="Shared memory of a block, static and dynamic together.")
    ] = 0,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Work out how many blocks fit on an SM, and why not more."""
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
    from autotile.space.occupancy import UNLIMITED

    reserved = device.smem_reserved_per_block_bytes
    smem = f"{block.smem_bytes:,} B" + (f" + {reserved:,} B reserved" if reserved else "")
    registers = f"{block.registers:,} a thread" if block.registers else "not known"
    used_and_available = {
        "threads": (f"{block.threads:,}", f"{device.max_threads_per_sm:,}"),
        "registers": (registers, f"{device.registers_per_sm:,}"),
        "shared_memory": (smem, f"{device.smem_per_sm_bytes:,} B"),
        "blocks": ("1", f"{device.max_blocks_per_sm:,}"),
    }
    limits = table("limit", f"{RIGHT}a block uses", f"{RIGHT}an SM has", f"{RIGHT}blocks allowed", "")
    for name, (used, available) in used_and_available.items():
        allowed = "no limit" if occupancy.limits[name] == UNLIMITED else f"{occupancy.limits[name]:,}"
        binds, style = ("binds", "bold") if name in occupancy.limited_by else ("", None)
        limits.add_row(name.replace("_", " "), used, available, allowed, binds, style=style)
    return limits


def occupancy_document(result: OccupancyResult) -> dict[str, Any]:
    """Return the resources and the occupancy for JSON; 2147483647 blocks stand for a limit that does not apply."""
    return {
        "device": {"name": result.device.name, "source": result.device.source},
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
