"""``autotile devices`` and ``autotile measure-device``: GPUs, GPU profiles, and measured ceilings."""

from __future__ import annotations

import typer

from autotile.cli.arguments import DatabaseOption, GpuOption, JsonOption
from autotile.cli.output import examples, show

_TEXT_COLUMNS = ("name", "capability", "ceiling", "method")


def devices(*, database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """List the GPUs of this machine, the GPU profiles and measured ceilings."""
    from autotile.api.devices import devices as list_devices

    show(list_devices(database=database), as_json=as_json)


def measure_device(*, device: GpuOption = None, database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """Measure what a GPU reaches: bandwidths and arithmetic rates, in 10 s.

    Reports draw rooflines with the newest measurement of a GPU instead of its datasheet's figures. Nothing else should
    run on the GPU meanwhile.
    """
    from autotile.api.devices import measure_device as measure

    measured = measure(device, database=database)
    show(measured, as_json=as_json)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(epilog=examples("autotile devices", "autotile devices --json"))(devices)
    app.command("measure-device", epilog=examples("autotile measure-device", "autotile measure-device --device 1"))(
        measure_device
    )
