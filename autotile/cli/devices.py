"""``autotile devices`` and ``autotile measure-device``: GPUs, GPU profiles, and measured ceilings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from autotile.cli.arguments import DatabaseOption, GpuOption, JsonOption
from autotile.cli.output import examples, notice, show
from autotile.cli.tables import RIGHT, Listing, below, title
from autotile.core.device import DeviceProperties

if TYPE_CHECKING:
    from autotile.api.devices import DeviceList
    from autotile.core.ceilings import DeviceCeilings

_TEXT_COLUMNS = ("name", "capability", "ceiling", "method")


def devices(*, database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """List the GPUs of this machine, the GPU profiles and measured ceilings."""
    from autotile.api.devices import devices as list_devices

    show(list_devices(database=database), devices_table, devices_document, as_json=as_json)


def measure_device(*, device: GpuOption = None, database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """Measure what a GPU reaches: bandwidths and arithmetic rates, in 10 s.

    Reports draw rooflines with the newest measurement of a GPU instead of its datasheet's figures. Nothing else should
    run on the GPU meanwhile.
    """
    from autotile.api.devices import measure_device as measure

    measured = measure(device, database=database)
    for warning in measured.warnings:
        notice(warning)
    show(measured, ceilings_table, lambda measured: measured.to_json(), as_json=as_json)


def devices_table(devices: DeviceList) -> RenderableType:
    """Render one table of the GPUs of this machine, one of the profiles, and one of the ceilings of each GPU."""
    gpus: RenderableType = Text("no CUDA device on this machine; `autotile doctor` says why")
    if devices.gpus:
        gpus = _listing("index", {str(index): gpu for index, gpu in enumerate(devices.gpus)})
    measured = [below(ceilings_table(one)) for one in devices.ceilings]
    return Group(gpus, below(_listing("profile", devices.profiles)), *measured)


def ceilings_table(measured: DeviceCeilings) -> RenderableType:
    """Render the ceilings of a GPU."""
    from autotile.core.ceilings import CEILING_HEADINGS, ceiling_row

    headings = tuple(name if name in _TEXT_COLUMNS else f"{RIGHT}{name}" for name in CEILING_HEADINGS)
    rows = [ceiling_row(ceiling) for ceiling in measured.ceilings]
    return Group(title(measured.headline), Listing(headings, rows, ("method",)))


def _listing(heading: str, devices: Mapping[str, DeviceProperties]) -> Listing:
    from autotile.api.devices import DEVICE_HEADINGS, device_row

    headings = (name if name in _TEXT_COLUMNS else f"{RIGHT}{name}" for name in DEVICE_HEADINGS)
    return Listing((heading, *headings), [(key, *device_row(device)) for key, device in devices.items()], ("name",))


def devices_document(devices: DeviceList) -> dict[str, Any]:
    """Return every property of every device, and every ceiling, for JSON."""
    return {
        "live": [{"index": index, **_properties(gpu)} for index, gpu in enumerate(devices.gpus)],
        "profiles": [{"profile": name, **_properties(device)} for name, device in devices.profiles.items()],
        "ceilings": [measured.to_json() for measured in devices.ceilings],
    }


def _properties(device: DeviceProperties) -> dict[str, Any]:
    return {**device.to_json(), "peak_fp32_flops_per_s": device.peak_fp32_flops_per_s}


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(epilog=examples("autotile devices", "autotile devices --json"))(devices)
    app.command("measure-device", epilog=examples("autotile measure-device", "autotile measure-device --device 1"))(
        measure_device
    )
