"""The GPUs of this machine, and those that are known without being here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from autotile.cli.tables import RIGHT, Listing, below
from autotile.core.device import DeviceProperties
from autotile.core.text import bytes_text
from autotile.kernel.workrate import bandwidth_text, flops_text


@dataclass(frozen=True, slots=True)
class DevicesReport:
    """Live devices by index, and profiles by name."""

    live: Sequence[DeviceProperties]
    profiles: Mapping[str, DeviceProperties]

    def to_json(self) -> dict[str, Any]:
        """Every property of every device."""
        return {
            "live": [{"index": index, **_document(device)} for index, device in enumerate(self.live)],
            "profiles": [{"profile": name, **_document(device)} for name, device in self.profiles.items()],
        }

    def __rich__(self) -> RenderableType:
        """One table for each kind."""
        here: RenderableType = Text("no CUDA device on this machine; `autotile doctor` says why")
        if self.live:
            here = _devices("index", {str(index): device for index, device in enumerate(self.live)})
        return Group(here, below(_devices("profile", self.profiles)))


def _document(device: DeviceProperties) -> dict[str, Any]:
    return {**device.to_json(), "peak_fp32_flops_per_s": device.peak_fp32_flops_per_s}


def _devices(heading: str, devices: Mapping[str, DeviceProperties]) -> Listing:
    figures = [f"{RIGHT}{name}" for name in ("SMs", "fp32 peak", "memory", "bandwidth", "smem a block")]
    headings = (heading, "name", "capability", *figures)
    return Listing(headings, [(key, *_figures(device)) for key, device in devices.items()], ("name",))


def _figures(device: DeviceProperties) -> tuple[str, ...]:
    return (
        device.name,
        device.compute_capability,
        str(device.sm_count),
        flops_text(device.peak_fp32_flops_per_s),
        bytes_text(device.memory_bytes),
        bandwidth_text(device.memory_bandwidth_bytes_per_s),
        bytes_text(device.smem_per_block_optin_bytes),
    )
