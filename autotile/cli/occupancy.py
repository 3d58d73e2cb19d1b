"""``autotile occupancy``: blocks per SM, and the limits that determine them."""

from __future__ import annotations

from typing import Annotated

import typer

from autotile.cli.arguments import DeviceOption, JsonOption
from autotile.cli.output import examples, notice, show

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
    show(result, as_json=as_json)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples(
            "autotile occupancy --threads 1024 --registers 32 --smem 8192 --device rtx-3060",
            "autotile occupancy --threads 256 --registers 128",
        )
    )(occupancy)
