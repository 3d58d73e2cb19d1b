"""Ceilings of a GPU: the highest rates of its memories and arithmetic units that were measured on it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from autotile.core.device import Capability, DeviceProperties
from autotile.core.documents import Moment, Name, Text
from autotile.core.text import (
    NOTHING,
    RIGHT,
    Part,
    Result,
    ResultTable,
    bandwidth_text,
    flops_text,
    moment_text,
    percent_text,
)
from autotile.errors import DataError

Unit = Literal["B/s", "FLOP/s", "us"]
Rate = Annotated[float, msgspec.Meta(gt=0.0, le=1e18)]
Uuid = Annotated[str, msgspec.Meta(pattern=r"\A((GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12})?\Z")]
"""UUID of a GPU as NVML and ``nvidia-smi -L`` write it; empty for a model of GPU."""

CEILINGS: dict[str, tuple[str, Unit]] = {
    "dram_read": ("DRAM, read", "B/s"),
    "dram_copy": ("DRAM, copy", "B/s"),
    "l2_read": ("L2 cache, read", "B/s"),
    "l2_copy": ("L2 cache, copy", "B/s"),
    "fma_float32": ("fp32 FMA", "FLOP/s"),
    "fma_float64": ("fp64 FMA", "FLOP/s"),
    "fma_float16": ("fp16 FMA", "FLOP/s"),
    "tensor_float16": ("fp16 tensor cores", "FLOP/s"),
    "tensor_bfloat16": ("bf16 tensor cores", "FLOP/s"),
    "tensor_tf32": ("tf32 tensor cores", "FLOP/s"),
    "tensor_float8_e4m3fn": ("fp8 tensor cores", "FLOP/s"),
    "tensor_int8": ("int8 tensor cores", "FLOP/s"),
    "tensor_float64": ("fp64 tensor cores", "FLOP/s"),
    "launch_graph": ("empty kernel in a graph", "us"),
    "launch_host": ("launch from the host", "us"),
}
"""Label and unit of each ceiling. A copy counts the bytes that it reads and those that it writes. Rates of tensor cores
are of dense products with sums in fp32, of int8 in int32, whose operations count as FLOP; int8 is not measured."""

_ROOFS = {
    "float64": ("tensor_float64", "fma_float64"),
    "complex128": ("fma_float64",),
    "float32": ("tensor_tf32", "fma_float32"),
    "complex64": ("fma_float32",),
    "float16": ("tensor_float16", "fma_float16", "fma_float32"),
    "bfloat16": ("tensor_bfloat16", "fma_float32"),
    "float8_e4m3fn": ("tensor_float8_e4m3fn", "fma_float32"),
    "float8_e5m2": ("tensor_float8_e4m3fn", "fma_float32"),
    "int8": ("tensor_int8",),
    "uint8": ("tensor_int8",),
}
"""Ceilings of the arithmetic of each element type. Both 8-bit floats have the same rate."""

FMA_FP32 = "fma_float32"
UNITS = ("fma", "tensor")
"""Arithmetic units, that of the element type of a problem: multiply-adds of the CUDA cores, and the tensor cores."""

ARITHMETIC = tuple(name for name in CEILINGS if name.partition("_")[0] in UNITS)
"""Ceilings of arithmetic units, each of which stands for the unit of one type."""


def unit_ceiling(unit: str, dtype: str) -> str | None:
    """Return the ceiling of an arithmetic unit of `UNITS` or `ARITHMETIC`; None if the element type has no such unit.

    Multiply-adds of types that the CUDA cores convert are those of fp32.
    """
    if unit in ARITHMETIC:
        return unit
    return next((name for name in _ROOFS.get(dtype, ()) if name.startswith(f"{unit}_")), None)


@dataclass(frozen=True, slots=True)
class Ceiling:
    """A rate, or the time of an empty launch, with its 95 % interval."""

    name: Name
    """One of `CEILINGS`."""
    value: Rate
    """Median, in `unit`."""
    low: Rate
    high: Rate
    """95 % interval of the median."""
    method: Name
    """Instruction or access that reached it, such as ``"wgmma m64n256k16"``."""
    clock_mhz: Rate | None = None
    """Mean SM clock during a launch, counted on the device; None where it is not."""

    @property
    def label(self) -> str:
        """Name for people: ``"DRAM, copy"``."""
        return CEILINGS[self.name][0] if self.name in CEILINGS else self.name

    @property
    def unit(self) -> Unit:
        """Unit of the value: bytes or floating-point operations per second, or microseconds."""
        return CEILINGS[self.name][1] if self.name in CEILINGS else "FLOP/s"

    @property
    def text(self) -> str:
        """The value with its unit: ``"4,276 GB/s"``, ``"59.2 TFLOP/s"``, ``"2.31 us"``."""
        return self._shown(self.value)

    @property
    def interval_text(self) -> str:
        """The interval with its unit: ``"4,270 to 4,281 GB/s"``."""
        low, high = self._shown(self.low), self._shown(self.high)
        number, _, unit = low.partition(" ")
        return f"{number} to {high}" if high.endswith(unit) else f"{low} to {high}"

    def _shown(self, value: float) -> str:
        texts = {"B/s": bandwidth_text, "FLOP/s": flops_text}
        return texts[self.unit](value) if self.unit in texts else f"{value:.3g} us"


@dataclass(frozen=True, slots=True, repr=False)
class DeviceCeilings(Result):
    """Ceilings of one GPU, from one measurement or, as `datasheet_ceilings` computes them, from a datasheet."""

    gpu_uuid: Uuid
    gpu_name: Name
    compute_capability: Capability
    """The GPU, and its model."""
    driver: Name
    """CUDA version that the driver supports."""
    measured_at: Moment | None
    """Time of the measurement; None for figures of a datasheet."""
    ceilings: tuple[Ceiling, ...]
    """Those that the GPU has, in the order of `CEILINGS`."""
    warnings: tuple[Text, ...] = ()
    """Reasons why they may be too low, one line each, such as another process on the GPU."""
    source: Literal["measured", "datasheet"] = "measured"

    def find(self, name: str) -> Ceiling | None:
        """Return the ceiling of a name of `CEILINGS`; None if the GPU has none."""
        return next((ceiling for ceiling in self.ceilings if ceiling.name == name), None)

    @property
    def memory(self) -> Ceiling | None:
        """The highest rate of DRAM: the slope of a roofline; None if it was not measured."""
        return next(iter(self._named("dram_read", "dram_copy")), None)

    @property
    def l2(self) -> Ceiling | None:
        """The highest rate of the L2 cache; None if it was not measured."""
        return next(iter(self._named("l2_read", "l2_copy")), None)

    def compute(self, dtype: str) -> tuple[Ceiling, ...]:
        """Return the roofs of kernels of an element type, the highest first; empty for integers.

        Kernels of float32 have two: one of tf32 tensor cores, which few of them use, and one of FMA.
        """
        return self._named(*_ROOFS.get(dtype, ()))

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON values, with the unit of each ceiling."""
        ceilings = [{**msgspec.to_builtins(one), "unit": one.unit} for one in self.ceilings]
        return {**msgspec.to_builtins(self), "ceilings": ceilings}

    def _named(self, *names: str) -> tuple[Ceiling, ...]:
        found = [ceiling for ceiling in self.ceilings if ceiling.name in names]
        return tuple(sorted(found, key=lambda ceiling: -ceiling.value))

    def _headline(self) -> str:
        if self.source == "datasheet":
            return f"{self.gpu_name}, by its datasheet"
        return f"{self.gpu_name} ({self.gpu_uuid}), measured {moment_text(self.measured_at)}"

    _heading = _headline

    def _parts(self) -> Iterator[Part]:
        yield self.table
        if self.warnings:
            yield [("warning", warning) for warning in self.warnings]

    @property
    def table(self) -> ResultTable:
        """One row for each ceiling."""
        rows = [
            (c.label, c.text, c.interval_text, f"{c.clock_mhz:,.0f} MHz" if c.clock_mhz else NOTHING, c.method)
            for c in self.ceilings
        ]
        headings = ("ceiling", f"{RIGHT}value", f"{RIGHT}95 % interval", f"{RIGHT}clock", "method")
        return ResultTable(headings, rows, ("method",))


def check_ceilings(measured: DeviceCeilings) -> None:
    """Raise a `DataError` unless GPU and time are known, and each ceiling is known, once, and in its interval."""
    if not measured.gpu_uuid or measured.measured_at is None:
        raise DataError("a measurement has the UUID of its GPU, and a time", field="gpu_uuid")
    names = [ceiling.name for ceiling in measured.ceilings]
    for ceiling in measured.ceilings:
        if ceiling.name not in CEILINGS or names.count(ceiling.name) > 1:
            raise DataError(f"{ceiling.name!r:.80} is not a ceiling, or is there twice", field="ceilings")
        if not ceiling.low <= ceiling.value <= ceiling.high:
            raise DataError(f"the value of {ceiling.name} is outside its interval", field="ceilings")


_TENSOR_FLOPS: dict[str, dict[str, int]] = {
    "7.0": {"float16": 1024},
    "7.5": {"float16": 1024, "int8": 2048},
    "8.0": {"float16": 2048, "bfloat16": 2048, "tf32": 1024, "int8": 4096, "float64": 128},
    "8.6": {"float16": 1024, "bfloat16": 1024, "tf32": 512, "int8": 2048},
    "8.9": {"float16": 1024, "bfloat16": 1024, "tf32": 512, "float8_e4m3fn": 2048, "int8": 2048},
    "9.0": {"float16": 4096, "bfloat16": 4096, "tf32": 2048, "float8_e4m3fn": 8192, "int8": 8192, "float64": 256},
    "10.0": {"float16": 8192, "bfloat16": 8192, "tf32": 4096, "float8_e4m3fn": 16384, "int8": 16384, "float64": 128},
    "12.0": {"float16": 1024, "bfloat16": 1024, "tf32": 512, "float8_e4m3fn": 2048, "int8": 2048},
}
"""Operations of the tensor cores of an SM in a clock cycle, dense, by compute capability: the peaks of NVIDIA's
architecture whitepapers over number and clock of the SMs (V100, 2017; Turing, 2018; A100, 2020; GA102, 2020; H100,
2022; Ada, 2022; RTX Blackwell, 2025; B200: the datasheet of HGX B200)."""
_HALF_RATE = "geforce"
"""Part of the names of GPUs whose tensor cores sum in fp32 at half of that rate, by the same whitepapers; sums of int8
are not affected."""
_TENSOR_CLOCK_MHZ = {"9.0": 1830.0, "10.0": 1856.0}
"""Clock of the peaks of tensor cores, where it is lower than the maximum clock: 989.4 TFLOP/s of fp16 on the 132 SMs of
an H100 or H200, 2.25 PFLOP/s on the 148 of a B200 (datasheets)."""


def arithmetic_peak(device: DeviceProperties, name: str) -> float:
    """Return the peak of an arithmetic unit of `ARITHMETIC` by the figures and the datasheet of a device; 0 if unknown.

    Of the CUDA cores, that of fp32 alone is known.
    """
    if name == FMA_FP32:
        return device.peak_fp32_flops_per_s
    if not name.startswith("tensor_"):
        return 0.0
    kind, capability = name.removeprefix("tensor_"), device.compute_capability
    flops = _TENSOR_FLOPS.get(capability, {}).get(kind, 0)
    if _HALF_RATE in device.name.casefold() and kind != "int8":
        flops //= 2
    limit_mhz = _TENSOR_CLOCK_MHZ.get(capability, math.inf) if kind != "float64" else math.inf
    return 1e6 * device.sm_count * flops * min(device.clock_mhz, limit_mhz)


def unit_text(name: str, passes: int) -> str:
    """Return the label of an arithmetic unit: ``"bf16 tensor cores"``, ``"bf16 tensor cores over 6 products"``."""
    return CEILINGS[name][0] + (f" over {passes} products" if passes > 1 else "")


def peak_text(name: str, passes: int) -> str:
    """Return the peak of a unit in words: ``"bf16 tensor peak"``, ``"bf16 tensor peak over 6 products"``."""
    label = unit_text(name, passes)
    return label.replace("tensor cores", "tensor peak") if "tensor cores" in label else f"{label} peak"


def datasheet_ceilings(device: DeviceProperties) -> DeviceCeilings:
    """Return the rates of the memory and of arithmetic units by the figures of a device, which no kernel reaches."""
    rates = {
        "dram_copy": (device.memory_bandwidth_bytes_per_s, "clock and bus width"),
        **{name: (arithmetic_peak(device, name), "maximum clock") for name in ARITHMETIC},
    }
    ceilings = tuple(Ceiling(name, rate, rate, rate, method) for name, (rate, method) in rates.items() if rate)
    return DeviceCeilings("", device.name, device.compute_capability, device.driver, None, ceilings, source="datasheet")


_WIDE = 0.05
"""Half width of an interval, relative to the value, above which a ceiling is doubtful: ten times the target of a
measurement."""
_EXCESS = 1.02
"""Factor of a rate above what the clock and the units allow, for the resolution of the clocks."""


def imprecise(measured: DeviceCeilings) -> tuple[str, ...]:
    """Return a warning for each rate whose interval is wide."""
    shares = [(one, (one.high - one.low) / (2 * one.value)) for one in measured.ceilings if one.unit != "us"]
    return tuple(
        f"{one.label}: the 95 % interval is {percent_text(share)} of the value to either side; is the GPU in use?"
        for one, share in shares
        if share > _WIDE
    )


def impossible(measured: DeviceCeilings, device: DeviceProperties) -> tuple[str, ...]:
    """Return one line for each rate that is above what the units of the GPU can do at its maximum clock."""
    found = []
    fma = measured.find("fma_float32")
    lanes = device.sm_count * device.fp32_lanes_per_sm
    if fma and device.clock_mhz and fma.value > _EXCESS * device.peak_fp32_flops_per_s:
        found.append(f"{fma.label}: {fma.text} is more than {lanes:,} units do at {device.clock_mhz:,.0f} MHz")
    memory, limit = measured.memory, device.memory_bandwidth_bytes_per_s
    if memory and limit and memory.value > _EXCESS * limit:
        found.append(f"{memory.label}: {memory.text} is more than the {bandwidth_text(limit)} of its clock and bus")
    return tuple(found)
