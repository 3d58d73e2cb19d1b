"""``autotile devices``: GPUs, GPU profiles, and measured ceilings."""

from __future__ import annotations

from typing import Annotated

import typer

from autotile.cli.arguments import DatabaseOption, GpuOption, JsonOption
from autotile.cli.output import examples, show
from autotile.errors import InputError


def devices(
    *,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure what a GPU reaches: bandwidths and arithmetic rates, in 10 s.")
    ] = False,
    device: GpuOption = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the GPUs of this machine, the GPU profiles and measured ceilings.

    With --measure: measures the ceilings of a GPU. Reports draw rooflines with the newest measurement instead of the
    datasheet's figures. Nothing else should run on the GPU meanwhile.
    """
    from autotile.api import devices as api

    if measure:
        show(api.measure_device(device, database=database), as_json=as_json)
    elif device is not None:
        raise InputError("--device names the GPU to measure; add --measure")
    else:
        show(api.devices(database=database), as_json=as_json)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples("autotile devices", "autotile devices --json", "autotile devices --measure --device 1")
    )(devices)
