"""The first gate: what a launch asks of a device, against the device's limits, before anything is compiled.

Every limit is one function over columns of configurations, so that one rule both narrows a space and, on a single row,
explains why a configuration does not fit. Sources: "Technical Specifications per Compute Capability" in the CUDA C++
Programming Guide for threads, dimensions, registers and shared memory; `autotile.ground.occupancy` for residency.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np
from numpy.typing import NDArray

from autotile.ground.expressions import Expression
from autotile.ground.hardware import DeviceProperties
from autotile.ground.occupancy import max_blocks_per_sm, occupancy
from autotile.ground.spec import KernelSpec

Column = NDArray[np.int64]
Mask = NDArray[np.bool_]

_FAR = 2**20
"""Beyond every limit of a block; factors are cut off here so that their products stay within 64 bits."""

_FAR_BYTES = 2**40
"""Beyond every limit of shared memory."""


@dataclass(frozen=True)
class Demand:
    """What configurations ask of a device: columns of whole numbers (int64), one row a configuration."""

    block: tuple[Column, ...]
    grid: tuple[Column, ...]
    static_smem_bytes: Column
    dynamic_smem_bytes: Column
    registers: Column
    """Least registers a thread; 0 where the file says nothing."""

    @classmethod
    def of(cls, spec: KernelSpec, evaluate: Callable[[Expression], Column]) -> Demand:
        """Evaluate a kernel's launch, given how an expression is evaluated for every row."""
        launch = spec.launch
        block = tuple(evaluate(expression) for expression in launch.block)

        def optional(expression: Expression | None) -> Column:
            return evaluate(expression) if expression is not None else np.zeros_like(block[0])

        return cls(
            block=block,
            grid=tuple(evaluate(expression) for expression in launch.grid),
            static_smem_bytes=optional(launch.static_smem_bytes),
            dynamic_smem_bytes=optional(launch.dynamic_smem_bytes),
            registers=optional(launch.min_registers),
        )

    @cached_property
    def threads(self) -> Column:
        """Threads in a block."""
        return reduce(np.multiply, [np.clip(dimension, 0, _FAR) for dimension in self.block])

    @cached_property
    def smem_bytes(self) -> Column:
        """Shared memory of a block, static and dynamic."""
        return np.clip(self.static_smem_bytes, 0, _FAR_BYTES) + np.clip(self.dynamic_smem_bytes, 0, _FAR_BYTES)

    def blocks_per_sm(self, device: DeviceProperties) -> Column:
        """Blocks that an SM holds at once; 0 where a block cannot run."""
        return max_blocks_per_sm(self.threads, np.clip(self.registers, 0, _FAR), self.smem_bytes, device)

    def occupancy(self, device: DeviceProperties) -> NDArray[np.float64]:
        """Resident warps over the most that an SM can hold."""
        warps = -(-self.threads // device.warp_size)
        return self.blocks_per_sm(device) * warps / device.max_warps_per_sm


@dataclass(frozen=True, slots=True)
class Limit:
    """A named limit: which rows fit, and one line about the first row where it does not."""

    name: str
    fits: Callable[[Demand, DeviceProperties, KernelSpec], Mask]
    explain: Callable[[Demand, DeviceProperties, KernelSpec], str]


def broken_limit(demand: Demand, device: DeviceProperties, spec: KernelSpec) -> str:
    """Explain the first limit that a single configuration breaks; "" where it breaks none."""
    for limit in LIMITS:
        if not limit.fits(demand, device, spec)[0]:
            return f"{limit.name}: {limit.explain(demand, device, spec)}"
    return ""


def _threads_fit(demand: Demand, device: DeviceProperties, spec: KernelSpec) -> Mask:
    return demand.threads <= device.max_threads_per_block


def _explain_threads(demand: Demand, device: DeviceProperties, spec: KernelSpec) -> str:
    return f"{_by(demand.block)} threads in a block, {device.name} allows {device.max_threads_per_block:,}"


def _block_fits(demand: Demand, device: DeviceProperties, spec: KernelSpec) -> Mask:
    return _within(demand.block, device.max_block_dim)


def _explain_block(demand: Demand, device: DeviceProperties, spec: KernelSpec) -> str:
    return f"a block of {_by(demand.block)} threads, {device.name} allows 1 to {_by(device.max_block_dim)}"


def _grid_fits(demand: Demand, device: DeviceProperties, spec: KernelSpec) -> Mask:
    return _within(demand.grid, device.max_grid_dim)


def _explain_grid(demand: Demand, device: DeviceProperties, spec: KernelSpec) -> str:
    return f"a grid of {_by(demand.grid)} blocks, {device.name} allows 1 to {_by(device.max_grid_dim)}"


def _registers_fit(demand: Demand, device: DeviceProperties, spec: KernelSpec) -> Mask:
    by_block: Column = device.registers_per_block // np.maximum(demand.threads, 1)
    return (demand.registers <= by_block) & (demand.registers <= device.max_registers_per_thread)


def _explain_registers(demand: Demand, device: DeviceProperties, spec: KernelSpec) -> str:
    return (
        f"at least {_text(demand.registers)} registers a thread for {_text(demand.threads)} threads, {device.name} "
        f"allows {device.max_registers_per_thread:,} a thread and {device.registers_per_block:,} a block"
    )


def _smem_fits(demand: Demand, device: DeviceProperties, spec: KernelSpec) -> Mask:
    not_negative = (demand.static_smem_bytes >= 0) & (demand.dynamic_smem_bytes >= 0)
    static_fits = demand.static_smem_bytes <= device.smem_per_block_bytes
    return not_negative & static_fits & (demand.smem_bytes <= device.smem_per_block_optin_bytes)


def _explain_smem(demand: Demand, device: DeviceProperties, spec: KernelSpec) -> str:
    return (
        f"{_text(demand.static_smem_bytes)} bytes static and {_text(demand.dynamic_smem_bytes)} dynamic, "
        f"{device.name} allows {device.smem_per_block_bytes:,} static, {device.smem_per_block_optin_bytes:,} together"
    )


def _occupancy_fits(demand: Demand, device: DeviceProperties, spec: KernelSpec) -> Mask:
    share = demand.occupancy(device)
    return (share > 0) & (share >= spec.limits.min_occupancy)


def _explain_occupancy(demand: Demand, device: DeviceProperties, spec: KernelSpec) -> str:
    registers = np.clip(demand.registers, 0, _FAR)
    found = occupancy(_first(demand.threads), _first(registers), _first(demand.smem_bytes), device)
    binding = ", ".join(found.limited_by)
    if found.blocks_per_sm == 0:
        return (
            f"no block fits on an SM of {device.name}: {_text(demand.threads)} threads, at least "
            f"{_text(demand.registers)} registers a thread, {_text(demand.smem_bytes)} bytes of shared memory; limited "
            f"by {binding}"
        )
    return f"{found.occupancy:.3f} is under min_occupancy = {spec.limits.min_occupancy:g}; limited by {binding}"


LIMITS = (
    Limit("threads_per_block", _threads_fit, _explain_threads),
    Limit("block_dims", _block_fits, _explain_block),
    Limit("grid_dims", _grid_fits, _explain_grid),
    Limit("registers", _registers_fit, _explain_registers),
    Limit("shared_memory", _smem_fits, _explain_smem),
    Limit("occupancy", _occupancy_fits, _explain_occupancy),
)
"""Every limit, in the order applied."""


def _within(dimensions: tuple[Column, ...], most: tuple[int, ...]) -> Mask:
    pairs = zip(dimensions, most, strict=False)
    return reduce(np.logical_and, [(dimension >= 1) & (dimension <= limit) for dimension, limit in pairs])


def _by(dimensions: tuple[Column, ...] | tuple[int, ...]) -> str:
    return " x ".join(_text(dimension) for dimension in dimensions)


def _text(value: Column | int) -> str:
    return f"{_first(value):,}"


def _first(value: Column | int) -> int:
    return int(np.ravel(value)[0])
