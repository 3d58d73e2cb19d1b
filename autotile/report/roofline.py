"""The roofline of a study: ceilings measured on its GPU, else those of the datasheet, and which of them bounds a trial.

S. Williams, A. Waterman and D. Patterson, Roofline: an insightful visual performance model, CACM 52 (2009).
"""

from __future__ import annotations

from autotile.core.ceilings import DeviceCeilings
from autotile.core.device import DeviceProperties
from autotile.core.frozen import dataclass
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
        Rates of the arithmetic units, slowest first; empty if unknown.
    is_measured
        Whether they were measured on the GPU; otherwise they are of its datasheet.
    origin
        When and how they were found, for people.
    """

    memory: Roof | None
    compute: tuple[Roof, ...]
    is_measured: bool
    origin: str

    def bound(self, work: Workrate, time_us: float | None) -> Bound | None:
        """Return the ceiling that binds a run, and the share of it that is reached; None if that is not known."""
        if time_us is None:
            return None
        found = []
        if self.memory is not None and work.bytes:
            found.append(Bound(self.memory, work.bytes / time_us * 1e6))
        if self.compute and work.flops:
            rate = work.flops / time_us * 1e6
            reached = [roof for roof in self.compute if rate <= _EXCEEDED * roof.rate]
            found.append(Bound((reached or self.compute)[0 if reached else -1], rate))
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
    if measured is not None:
        memory = measured.memory
        units = sorted(measured.compute(dtype), key=lambda ceiling: ceiling.value)
        return Roofline(
            Roof(memory.label, memory.value, True) if memory is not None else None,
            tuple(Roof(one.label, one.value, False) for one in units),
            True,
            f"measured on {measured.gpu_name} on {moment_text(measured.measured_at)}",
        )
    hint = "not measured on this GPU; `autotile measure-device` measures the ceilings"
    if device is None:
        return Roofline(None, (), False, hint)
    memory_rate, peak = device.memory_bandwidth_bytes_per_s, device.peak_fp32_flops_per_s
    return Roofline(
        Roof("DRAM (datasheet)", memory_rate, True) if memory_rate else None,
        (Roof("fp32 FMA (datasheet)", peak, False),) if dtype == "float32" and peak else (),
        False,
        f"figures of the datasheet, {hint}",
    )
