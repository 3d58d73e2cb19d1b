"""Occupancy: what a launch demands of a device, the resident blocks per SM, and the resources that limit them.

The number of blocks is the minimum over four resources: threads, registers, shared memory and block slots of the SM.
The calculation is that of ``cuOccupancyMaxActiveBlocksPerMultiprocessor`` with the largest shared memory carveout, as
defined by NVIDIA's ``cuda_occupancy.h`` (CUDA 13) for compute capability 5 and later, and by section 4.2 of the CUDA C
Programming Guide 4.2 for compute capability 1. docs/occupancy.md has worked examples.

Named barriers beyond the first and thread block clusters are not considered: the driver may allow fewer blocks for
kernels that use them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial, reduce
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autotile.core.device import DeviceProperties
from autotile.core.frozen import cached_property, dataclass
from autotile.core.model import Occupancy, Value
from autotile.kernel.argument_kind import Column, Evaluate, Mask, clipped
from autotile.kernel.arguments import MemoryDemand
from autotile.kernel.descriptors import TensorMapDemand
from autotile.kernel.expressions import Expression
from autotile.kernel.launch import MAX_LAUNCHES
from autotile.kernel.spec import STEP, KernelSpec, Step

Blocks = NDArray[np.int64]

UNLIMITED = 2**31 - 1
"""Blocks allowed by a resource that a block does not use."""

CLIP = 2**20
"""Above every limit of a block; factors are clipped to it so that their products fit in 64 bits."""

_CLIP_BYTES = 2**40
"""Above every limit of shared memory."""


@lru_cache(maxsize=4096)
def occupancy(threads: int, registers: int, smem_bytes: int, device: DeviceProperties) -> Occupancy:
    """Calculate the occupancy of a kernel at one block size.

    Parameters
    ----------
    threads
        Threads per block.
    registers
        Registers per thread, as reported by the compiler.
    smem_bytes
        Static and dynamic shared memory per block, in bytes, without the part reserved by the system.
    device
        Limits of the device.

    Returns
    -------
    Occupancy
        0 blocks if a block exceeds a hard limit (threads or registers per block, registers per thread, opt-in shared
        memory per block), limited by that resource.
    """
    limits = {name: int(blocks) for name, blocks in block_limits(threads, registers, smem_bytes, device).items()}
    blocks_per_sm = min(limits.values())
    warps_per_sm = blocks_per_sm * -(-threads // device.warp_size)
    return Occupancy(
        blocks_per_sm=blocks_per_sm,
        warps_per_sm=warps_per_sm,
        occupancy=warps_per_sm / device.max_warps_per_sm,
        limited_by=tuple(name for name, blocks in limits.items() if blocks == blocks_per_sm),
        limits=limits,
    )


def max_blocks_per_sm(
    threads: ArrayLike, registers: ArrayLike, smem_bytes: ArrayLike, device: DeviceProperties
) -> Blocks:
    """Calculate ``blocks_per_sm`` of `occupancy` over arrays.

    Parameters
    ----------
    threads, registers, smem_bytes
        Integers as for `occupancy`, of shapes that broadcast against each other.
    device
        Limits of the device.

    Returns
    -------
    numpy.ndarray
        ``int64``, of the broadcast shape; 0 where a block cannot run.
    """
    return np.asarray(reduce(np.minimum, block_limits(threads, registers, smem_bytes, device).values()))


def block_limits(
    threads: ArrayLike, registers: ArrayLike, smem_bytes: ArrayLike, device: DeviceProperties
) -> dict[str, Blocks]:
    """Calculate the blocks per SM that each resource allows.

    Parameters
    ----------
    threads, registers, smem_bytes, device
        See `max_blocks_per_sm`.

    Returns
    -------
    dict
        ``threads``, ``registers``, ``shared_memory`` and ``blocks``: ``int64`` arrays that broadcast against each
        other; `UNLIMITED` where a block does not use the resource.
    """
    thread_column, register_column, smem_column = (
        np.asarray(column, dtype=np.int64) for column in (threads, registers, smem_bytes)
    )
    warps = _divide_up(thread_column, device.warp_size)
    by_registers = _by_block_registers if device.compute_capability.startswith("1.") else _by_warp_registers
    return {
        "threads": _by_threads(thread_column, warps, device),
        "registers": by_registers(warps, register_column, device),
        "shared_memory": _by_shared_memory(smem_column, device),
        "blocks": np.asarray(device.max_blocks_per_sm, dtype=np.int64),
    }


def _by_threads(threads: Blocks, warps: Blocks, device: DeviceProperties) -> Blocks:
    possible = (threads >= 1) & (threads <= device.max_threads_per_block)
    return _blocks(device.max_warps_per_sm, warps, possible)


def _by_warp_registers(warps: Blocks, registers: Blocks, device: DeviceProperties) -> Blocks:
    """Allocate registers to warps, from ``warp_unit`` partitions of the register file.

    A partition cannot use the remainder of another, so the warps of an SM are a multiple of ``warp_unit``. Only the
    launch check rounds up the warps of the block itself, as it assumes equal allocation from all partitions.
    """
    per_warp = _round_up(registers * device.warp_size, device.register_unit)
    possible = (
        (registers >= 0)
        & (registers <= device.max_registers_per_thread)
        & (per_warp * _round_up(warps, device.warp_unit) <= device.registers_per_block)
    )
    resident_warps = _round_down(device.registers_per_sm // np.maximum(per_warp, 1), device.warp_unit)
    return np.where(registers == 0, UNLIMITED, _blocks(resident_warps, warps, possible))


def _by_block_registers(warps: Blocks, registers: Blocks, device: DeviceProperties) -> Blocks:
    """Allocate registers to blocks, for warps rounded up to ``warp_unit`` (compute capability 1)."""
    per_block = _round_up(
        _round_up(warps, device.warp_unit) * device.warp_size * registers,
        device.register_unit,
    )
    possible = (
        (registers >= 0) & (registers <= device.max_registers_per_thread) & (per_block <= device.registers_per_block)
    )
    return _blocks(device.registers_per_sm, per_block, possible)


def _by_shared_memory(smem_bytes: Blocks, device: DeviceProperties) -> Blocks:
    per_block = _round_up(smem_bytes + device.smem_reserved_per_block_bytes, device.smem_unit_bytes)
    possible = (smem_bytes >= 0) & (smem_bytes <= device.smem_per_block_optin_bytes)
    return _blocks(device.smem_per_sm_bytes, per_block, possible)


def _blocks(available: int | Blocks, needed: Blocks, possible: NDArray[np.bool_]) -> Blocks:
    """Return the blocks that fit in ``available`` if each needs ``needed``; 0 where a block is not ``possible``."""
    shared = np.where(needed > 0, available // np.maximum(needed, 1), UNLIMITED)
    return np.where(possible, shared, 0)


def _divide_up(value: Blocks, unit: int) -> Blocks:
    return -(-value // unit)


def _round_up(value: Blocks, unit: int) -> Blocks:
    return _divide_up(value, unit) * unit


def _round_down(value: Blocks, unit: int) -> Blocks:
    return value // unit * unit


class EvaluateWhere(Protocol):
    """Evaluates an expression for some rows of a table of configurations."""

    def __call__(self, expression: Expression, extra: Mapping[str, Value], rows: Mask) -> Column:
        """Return an int64 column, 1 in other rows; for a single configuration, an int.

        Parameters
        ----------
        expression
            Expression over parameters, sizes, flags, ``device.*`` and the names in ``extra``.
        extra
            Values of further names.
        rows
            Rows in which it is evaluated, shape (rows,); or a bool for all or none.
        """


@dataclass(frozen=True)
class LaunchDemand:
    """Resources that one launch needs: int64 columns with one row per configuration, or ints for a single one.

    A column with a single element applies to every configuration.
    """

    step: Step
    """What is launched."""
    runs: Mask
    """Whether the configuration makes this launch."""
    evaluate: Evaluate
    """Returns the value of an expression for this launch."""

    @property
    def entry(self) -> str:
        """Name of the function."""
        return self.step.entry

    @property
    def is_cooperative(self) -> bool:
        """Whether all blocks must be resident at once."""
        return self.step.launch.is_cooperative

    @cached_property
    def block(self) -> tuple[Column, ...]:
        """Threads of a block along each axis."""
        return tuple(map(self.evaluate, self.step.launch.block))

    @cached_property
    def grid(self) -> tuple[Column, ...]:
        """Blocks along each axis."""
        return tuple(map(self.evaluate, self.step.launch.grid))

    @cached_property
    def cluster(self) -> tuple[Column, ...]:
        """Blocks per cluster along each axis; empty if the function has no clusters."""
        return tuple(map(self.evaluate, self.step.launch.cluster))

    @cached_property
    def static_smem_bytes(self) -> Column:
        """Static shared memory per block, in bytes."""
        return self._optional(self.step.launch.static_smem_bytes)

    @cached_property
    def dynamic_smem_bytes(self) -> Column:
        """Dynamic shared memory per block, in bytes."""
        return self._optional(self.step.launch.dynamic_smem_bytes)

    @cached_property
    def registers(self) -> Column:
        """Minimum registers per thread; 0 if not declared."""
        return self._optional(self.step.launch.min_registers)

    def _optional(self, expression: Expression | None) -> Column:
        return self.evaluate(expression) if expression is not None else 0 * self.block[0]

    @cached_property
    def threads(self) -> Column:
        """Threads per block."""
        return reduce(operator.mul, [clipped(dimension, 0, CLIP) for dimension in self.block])

    @cached_property
    def smem_bytes(self) -> Column:
        """Static and dynamic shared memory per block, in bytes."""
        return clipped(self.static_smem_bytes, 0, _CLIP_BYTES) + clipped(self.dynamic_smem_bytes, 0, _CLIP_BYTES)

    def blocks_per_sm(self, device: DeviceProperties) -> Column:
        """Return the resident blocks per SM; 0 where a block cannot run."""
        return max_blocks_per_sm(self.threads, clipped(self.registers, 0, CLIP), self.smem_bytes, device)

    def occupancy(self, device: DeviceProperties) -> Any:
        """Return the resident warps as a fraction of the SM's maximum."""
        warps = -(-self.threads // device.warp_size)
        return self.blocks_per_sm(device) * warps / device.max_warps_per_sm


@dataclass(frozen=True)
class Demand:
    """Demands of configurations: int64 columns with one row per configuration, or one element for all.

    Of a single configuration, they are scalars.
    """

    spec: KernelSpec
    sizes: Mapping[str, int]
    dtype: str
    """The problem."""
    evaluate: EvaluateWhere
    """Function that evaluates an expression."""

    @cached_property
    def launch_count(self) -> Column:
        """Launches of a call."""
        return reduce(operator.add, self._counts)

    @cached_property
    def launches(self) -> tuple[LaunchDemand, ...]:
        """One of each step; all launches of a step whose expressions depend on ``step``."""
        is_possible = self.launch_count <= MAX_LAUNCHES
        return tuple(
            LaunchDemand(step, runs, partial(self._of_launch, number, runs))
            for step, count in zip(self.spec.steps, self._counts, strict=True)
            for number, runs in _distinct_launches(step, count * is_possible)
        )

    def _of_launch(self, number: int, runs: Mask, expression: Expression) -> Column:
        return self.evaluate(expression, {STEP: number}, runs)

    @cached_property
    def memory(self) -> tuple[MemoryDemand, ...]:
        """Device memory of buffers and workspaces."""
        return self._of_arguments(lambda argument: argument.memory_demand)

    @cached_property
    def tensor_maps(self) -> tuple[TensorMapDemand, ...]:
        """Tensor maps."""
        return self._of_arguments(lambda argument: argument.tensor_map_demand)

    @cached_property
    def memory_bytes(self) -> Any:
        """Device memory of all arguments; float64, as products of absurd sizes exceed 64 bits."""
        return reduce(operator.add, [demand.size_bytes for demand in self.memory], 0.0)

    def _of_arguments(self, method: Callable[[Any], Callable[..., Any]]) -> tuple[Any, ...]:
        def plain(expression: Expression) -> Column:
            return self.evaluate(expression, {}, True)

        found = [method(argument)(self.dtype, self.sizes, plain) for argument in self.spec.arguments]
        return tuple(filter(None, found))

    @cached_property
    def _counts(self) -> list[Column]:
        """The number of launches of each step, clipped to 0 and just above the limit."""
        return [_repetitions(step, self.evaluate) for step in self.spec.steps]


def _repetitions(step: Step, evaluate: EvaluateWhere) -> Column:
    runs = True if step.when is None else evaluate(step.when, {}, True) != 0
    count = 1 if step.times is None else evaluate(step.times, {}, runs)
    return clipped(count, 0, MAX_LAUNCHES + 1) * runs


def _distinct_launches(step: Step, count: Column) -> Iterator[tuple[int, Mask]]:
    """Yield the number of each launch of a step that can differ from those before it, and the rows that make it."""
    launch = step.launch
    parts = (*launch.block, *launch.grid, *launch.cluster, launch.dynamic_smem_bytes, launch.static_smem_bytes)
    varies = any(part is not None and STEP in part.names for part in (*parts, launch.min_registers))
    for number in range(int(np.max(count, initial=0)) if varies else 1):
        yield number, number < count


def demand_of(spec: KernelSpec, names: Mapping[str, Value], sizes: Mapping[str, int], dtype: str) -> Demand:
    """Return the demand of a single configuration, given the value of every name."""

    def evaluate(expression: Expression, extra: Mapping[str, Value], rows: bool) -> int:
        if not rows:
            return 1
        return int(expression.value(names if expression.names.isdisjoint(extra) else {**extra, **names}))

    return Demand(spec, sizes, dtype, evaluate)
