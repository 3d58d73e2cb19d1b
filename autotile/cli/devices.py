"""``autotile devices``: GPUs of this machine and GPU profiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from autotile.cli.arguments import JsonOption
from autotile.cli.output import examples, show
from autotile.cli.tables import RIGHT, Listing, below
from autotile.core.device import DeviceProperties

if TYPE_CHECKING:
    from autotile.api.inspection import DeviceList

_TEXT_COLUMNS = ("name", "capability")


def devices(*, as_json: JsonOption = False) -> None:
    """List the GPUs of this machine and the GPU profiles."""
    from autotile.api import inspection

    show(inspection.devices(), devices_table, devices_document, as_json=as_json)


def devices_table(devices: DeviceList) -> RenderableType:
    """Render one table of the GPUs of this machine and one of the profiles."""
    gpus: RenderableType = Text("no CUDA device on this machine; `autotile doctor` says why")
    if devices.gpus:
        gpus = _listing("index", {str(index): gpu for index, gpu in enumerate(devices.gpus)})
    return Group(gpus, below(_listing("profile", devices.profiles)))


def _listing(heading: str, devices: Mapping[str, DeviceProperties]) -> Listing:
    from autotile.api.inspection import DEVICE_HEADINGS, device_row

    headings = (name if name in _TEXT_COLUMNS else f"{RIGHT}{name}" for name in DEVICE_HEADINGS)
    return Listing((heading, *headings), [(key, *device_row(device)) for key, device in devices.items()], ("name",))


def devices_document(devices: DeviceList) -> dict[str, Any]:
    """Return every property of every device for JSON."""
    return {
        "live": [{"index": index, **_properties(gpu)} for index, gpu in enumerate(devices.gpus)],
        "profiles": [{"profile": name, **_properties(device)} for name, device in devices.profiles.items()],
    }


def _properties(device: DeviceProperties) -> dict[str, Any]:
    return {**device.to_json(), "peak_fp32_flops_per_s": device.peak_fp32_flops_per_s}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=examples("autotile devices", "autotile devices --json"))(devices)
