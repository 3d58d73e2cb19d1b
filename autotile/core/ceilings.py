"""Ceilings of a GPU for the roofline: rates that were measured on it, or those of its datasheet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, field
from datetime import UTC, datetime
from typing import Any, Literal

from autotile.core.device import DeviceProperties
from autotile.core.documents import Moment, Name, NonNegative, convert
from autotile.core.frozen import dataclass

CeilingSource = Literal["measured", "datasheet"]

TENSOR = "tensor "
"""Prefix of the rates of tensor cores in `DeviceCeilings.flops_per_s`, followed by the type of their inputs."""

_TENSOR_INPUTS: Mapping[str, tuple[str, ...]] = {
    "float32": ("tf32",),
    "bfloat16": ("bfloat16",),
    "float16": ("float16",),
    "int8": ("int8",),
    "float8_e4m3fn": ("fp8",),
    "float8_e5m2": ("fp8",),
}
"""Types of the inputs of tensor cores that compute with elements of a type."""


@dataclass(frozen=True, slots=True)
class DeviceCeilings:
    """The rates that bound a kernel on one GPU.

    Attributes
    ----------
    gpu_name
        Name of the GPU.
    measured_at
        Time of the measurement (UTC).
    copy_bytes_per_s
        Bandwidth of device memory, reads and writes together; 0 if unknown.
    flops_per_s
        Operations per second by element type: ``float32``, ``float64`` and ``float16`` of the CUDA cores, and
        ``tensor bfloat16``, ``tensor float16``, ``tensor tf32``, ``tensor fp8`` and ``tensor int8`` of the tensor
        cores. A multiply-add counts as two.
    l2_bytes_per_s
        Bandwidth of the L2 cache; None if it was not measured.
    clock_mhz
        SM clock during the measurement; 0 if unknown.
    driver
        Version of CUDA that the driver supports.
    source
        ``measured`` on the GPU, or from its ``datasheet``.
    """

    gpu_name: Name
    measured_at: Moment
    copy_bytes_per_s: NonNegative
    flops_per_s: Mapping[Name, NonNegative] = field(default_factory=dict)
    l2_bytes_per_s: NonNegative | None = None
    clock_mhz: NonNegative = 0.0
    driver: Name = ""
    source: CeilingSource = "measured"

    def rates_for(self, dtype: str) -> dict[str, float]:
        """Return the rates that may bound a kernel of an element type, by the name of their unit, slowest first."""
        wanted = {dtype, *(TENSOR + inputs for inputs in _TENSOR_INPUTS.get(dtype, ()))}
        found = {name: rate for name, rate in self.flops_per_s.items() if name in wanted and rate > 0.0}
        return dict(sorted(found.items(), key=lambda item: item[1]))

    def to_json(self) -> dict[str, Any]:
        """Return every field as a JSON object."""
        return {**asdict(self), "measured_at": self.measured_at.isoformat()}

    @classmethod
    def from_json(cls, data: Any) -> DeviceCeilings:
        """Invert `to_json`.

        Raises
        ------
        DataError
            The value does not match the schema.
        """
        return convert(data, cls)


def datasheet_ceilings(device: DeviceProperties) -> DeviceCeilings:
    """Return the ceilings that the properties of a device state: memory bandwidth and fp32 rate of the CUDA cores."""
    return DeviceCeilings(
        gpu_name=device.name,
        measured_at=datetime.fromtimestamp(0, UTC),
        copy_bytes_per_s=device.memory_bandwidth_bytes_per_s,
        flops_per_s={"float32": device.peak_fp32_flops_per_s},
        clock_mhz=device.clock_mhz,
        driver=device.driver,
        source="datasheet",
    )
