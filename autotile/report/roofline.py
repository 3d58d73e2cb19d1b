"""The roofline of a study: ceilings measured on its GPU, else those of the datasheet, and which of them bounds a trial.

S. Williams, A. Waterman and D. Patterson, Roofline: an insightful visual performance model, CACM 52 (2009).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autotile.core.ceilings import ARITHMETIC, DeviceCeilings, datasheet_ceilings, unit_text
from autotile.core.device import DeviceProperties
from autotile.core.text import bandwidth_text, flops_text, moment_text, percent_text
from autotile.kernel.problem import Workrate

_EXCEEDED = 1.02
"""Share of a ceiling above which a kernel does not use the units that it is of."""


@dataclass(frozen=True, slots=True)
class Roof:
    """A rate that bounds a kernel, in bytes or floating-point operations per second."""

    label: str
    rate: float
    is_memory: bool

    @property
    def text(self) -> str:
        """Label and rate: ``"DRAM, copy 4,276 GB/s"``."""
        return f"{self.label} {bandwidth_text(self.rate) if self.is_memory else flops_text(self.rate)}"


@dataclass(frozen=True, slots=True)
class Roofline:
    """The ceilings of a GPU for an element type.

    Attributes
    ----------
    memory
        Bandwidth of device memory; None if unknown.
    compute
        Rates of the arithmetic units of the element type, slowest first; empty if unknown.
    units
        Rates of all arithmetic units that are known, by their names.
    is_measured
        Whether they were measured on the GPU; otherwise they are of its datasheet.
    origin
        When and how they were found, for people.
    """

    memory: Roof | None
    compute: tuple[Roof, ...]
    units: Mapping[str, Roof]
    is_measured: bool
    origin: str

    def of(self, work: Workrate) -> tuple[Roof, ...] | None:
        """Return the rates that bound the operations of a kernel, slowest first; None if those of its unit are unknown.

        A kernel that states no unit may use any of its element type.
        """
        if work.unit is None:
            return self.compute
        unit = self.units.get(work.unit)
        if unit is None:
            return None
        label = unit.label.replace(unit_text(work.unit, 1), unit_text(work.unit, work.passes))
        return (Roof(label, unit.rate / work.passes, False),)

    def bound(self, work: Workrate, time_us: float | None) -> Bound | None:
        """Return the ceiling that binds a run, and the share of it that is reached; None if that is not known."""
        roofs = self.of(work)
        if time_us is None or (roofs is None and work.flops):
            return None
        found = []
        if self.memory is not None and work.bytes:
            found.append(Bound(self.memory, work.bytes / time_us * 1e6))
        if roofs and work.flops:
            rate = work.flops / time_us * 1e6
            reached = [roof for roof in roofs if rate <= _EXCEEDED * roof.rate]
            found.append(Bound((reached or roofs)[0 if reached else -1], rate))
        return max(found, key=lambda bound: bound.share, default=None)


@dataclass(frozen=True, slots=True)
class Bound:
    """The ceiling that binds a run, and the rate that the run reached."""

    roof: Roof
    rate: float

    @property
    def share(self) -> float:
        """Rate over the ceiling, 0.9 for 90 %."""
        return self.rate / self.roof.rate

    @property
    def text(self) -> str:
        """Rate and share: ``"28.7 TFLOP/s, 48.5 % of fp32 FMA 59.2 TFLOP/s"``."""
        rate = bandwidth_text(self.rate) if self.roof.is_memory else flops_text(self.rate)
        return f"{rate}, {percent_text(self.share)} of {self.roof.text}"


def roofline_of(dtype: str, device: DeviceProperties | None, measured: DeviceCeilings | None) -> Roofline:
    """Return the roofline of an element type on a device, measured where it was measured."""
    hint = "not measured on this GPU; `autotile devices --measure` measures the ceilings"
    if measured is None and device is None:
        return Roofline(None, (), {}, False, hint)
    if measured is not None:
        suffix, origin = "", f"measured on {measured.gpu_name} on {moment_text(measured.measured_at)}"
        ceilings = measured
    else:
        assert device is not None
        suffix, origin = " (datasheet)", f"figures of the datasheet, {hint}"
        ceilings = datasheet_ceilings(device)
    memory = ceilings.memory
    memory_label = "DRAM" if measured is None else memory.label if memory is not None else ""
    roofs = {one.name: Roof(f"{one.label}{suffix}", one.value, False) for one in ceilings.ceilings}
    compute = sorted((roofs[one.name] for one in ceilings.compute(dtype)), key=lambda roof: roof.rate)
    return Roofline(
        Roof(f"{memory_label}{suffix}", memory.value, True) if memory is not None else None,
        tuple(compute),
        {name: roof for name, roof in roofs.items() if name in ARITHMETIC},
        measured is not None,
        origin,
    )
