"""An estimate of the time of every configuration of a space, before anything is compiled or measured.

All it uses is the search-space file and the device. From the grid at the problem's sizes, and at sizes changed one at
a time, follow the tile of a block along each size, how often each array is read, and the share of partial tiles; from
the block and its shared memory the blocks that an SM holds. The time of a call is then that of the busiest SM: its
blocks in rounds of as many as are resident, each round as long as its operations and its traffic take at the throughput
that the warps of that round reach, and at least as long as the device's memory needs for all bytes.

The constants are those of the hardware or round numbers, not fitted to a kernel; docs/search.md states how well the
order of the estimates agrees with measurements of several kernels and GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

import msgspec
import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from autotile.core.device import DeviceProperties
from autotile.core.dtypes import DTYPES
from autotile.core.model import Config, Problem, Value
from autotile.errors import SpecError
from autotile.kernel.expressions import Expression
from autotile.kernel.launch import fixed_names
from autotile.kernel.spec import STEP, KernelSpec, Parameter, Step
from autotile.space.limits import max_blocks_per_sm
from autotile.space.search_space import SearchSpace

Column = NDArray[np.float64]

CONFIDENT_FACTOR = 2.0
"""Factor between two estimates from which the order of the times is taken for certain. Over kernels whose file states
the operations and the registers, none of 1,276 recorded configurations was slower than the one of the least estimate
where its own was twice as long, nor any of 130 defaults at sizes of their own; at 1.5 times, 0.4 % were."""
_LARGE_SIZE = 2**20
"""Size at which a grid shows its tile; larger than any tile."""
_UNLIMITED_SMS = 2**40
"""Number of SMs at which no persistent kernel limits its grid."""
_MIN_ITEMS = 0.5
"""Outputs per thread below which a kernel reduces its input, and a thread's work is counted in input elements."""

_ISSUE = 3.0
"""Instructions per operation beyond that itself, for one output per thread; they fall with the root of the outputs,
as operands in registers are used again."""
_SATURATION = 16.0
"""Warps, times the root of the outputs per thread, at which an SM reaches half of its throughput."""
_L2_BYTES_PER_CYCLE = 32.0
"""Bytes per cycle that an SM reads from L2, about half of the 64 that its port allows."""
_NARROW_TRAFFIC = 0.5
_NARROW_ISSUE = 0.25
"""Exponents of the cost of warps that access less than 32 contiguous elements."""
_BLOCK_CYCLES = 1500.0
"""Cycles of a round of blocks that nothing hides: first loads, last stores and the start of the blocks."""
_LARGE_BLOCK = 768.0
_LARGE_BLOCK_COST = 0.15
"""Threads above which a block's barriers cost, and the exponent of that cost."""
_MIN_REGISTERS = 28.0
_REGISTERS_PER_OUTPUT = 2.0
_FURTHER_REGISTERS = 16.0
"""Registers of a thread that declares none: addresses and counters, and those for each output. Where a minimum is
declared, the first are partly in it, and some are added."""
_TENSOR_RATE = {1: 16.0, 2: 8.0}
"""Operations per fp32 operation of the CUDA cores, by the bytes of an element: types of two bytes and fewer use tensor
cores, at half of their peak."""
_MAX_SMEM_BYTES = 2.0**40
"""Above every limit of shared memory."""
_LAUNCH_US = 2.0
"""Time of an empty launch in microseconds."""
_SMOOTH = 2.0
_SMOOTH_BYTES = 3.0
"""Exponents of the sums that stand for the larger of two times which overlap."""
_HINTS: Mapping[str, tuple[tuple[str, ...], float]] = {
    "vector": (("VEC", "VW", "WIDTH"), 0.08),
    "unroll": (("UNROLL",), 0.02),
    "stages": (("STAGES", "DEPTH"), 0.02),
}
"""Parameters that no launch shows, by parts of their names: the relative gain of each doubling."""

_USUAL_CLOCK_MHZ = 1500.0
_USUAL_BYTES_PER_S = 1e12
"""Rates of a device that does not report them."""


class TimeEstimate(msgspec.Struct, frozen=True):
    """Estimated times and what they follow from: float64 columns, one row per configuration, shape (rows,)."""

    time_us: Column
    """Time of a call in microseconds. Times of one problem may be compared; their common scale is rough."""
    bound_us: Column
    """Least time of any configuration: the operations or the bytes at the device's peak, and a launch."""
    threads: Column
    registers: Column
    """Threads per block; registers per thread, declared or assumed."""
    blocks: Column
    blocks_per_sm: Column
    """Blocks, those of a persistent kernel without the limit of its grid; blocks resident on an SM."""
    items: Column
    """Outputs that a thread computes, or inputs that it reduces."""
    is_declared: bool
    """Whether the file states the work and the registers; without them the order of the estimates is a guess."""


def estimate_times(
    spec: KernelSpec, problem: Problem, device: DeviceProperties, space: SearchSpace
) -> TimeEstimate | None:
    """Estimate the time of every row of a space.

    Of several steps, the one with the most threads is estimated, and each further launch adds its latency. The space
    may be a part of the valid configurations. The result is None if the file does not say enough: its launch is
    computed by a function or cannot be evaluated, or does not differ between several configurations.
    """
    found = _estimate(spec, problem, device, space)
    is_told_apart = found is not None and (len(space) == 1 or float(np.ptp(found.time_us)) > 0)
    return found if is_told_apart else None


def estimate_configs(
    spec: KernelSpec, problem: Problem, device: DeviceProperties, configs: Sequence[Config]
) -> TimeEstimate | None:
    """Estimate the times of some configurations as `estimate_times` does, in their order; their times may be equal."""
    return _estimate(spec, problem, device, SearchSpace.of(spec, configs))


@np.errstate(all="ignore")
def _estimate(spec: KernelSpec, problem: Problem, device: DeviceProperties, space: SearchSpace) -> TimeEstimate | None:
    if spec.computed or not len(space):
        return None
    try:
        of = _Launches(spec, problem, device, space)
    except SpecError:
        return None
    clock_mhz = device.clock_mhz or _USUAL_CLOCK_MHZ
    warps = np.ceil(of.threads / device.warp_size)
    assumed = _MIN_REGISTERS + _REGISTERS_PER_OUTPUT * np.maximum(of.items, 1.0)
    wanted = np.where(of.min_registers > 0, of.min_registers + _FURTHER_REGISTERS, assumed)
    allocated = np.ceil(warps / device.warp_unit) * device.warp_unit * device.warp_size
    most = np.minimum(device.max_registers_per_thread, device.registers_per_block // allocated // 8 * 8)
    most = np.maximum(most, 8.0)
    registers, spilled = np.minimum(wanted, most), np.maximum(wanted / most, 1.0)
    held = max_blocks_per_sm(of.threads, np.ceil(registers), np.minimum(of.smem_bytes, _MAX_SMEM_BYTES), device)
    resident: Column = np.maximum(held, 1).astype(np.float64)
    narrow = device.warp_size / of.width
    rate = 2.0 * device.fp32_lanes_per_sm * _TENSOR_RATE.get(of.element_bytes, 1.0)
    issued = (1 + _ISSUE / np.sqrt(of.items)) * (warps * device.warp_size / of.threads) * spilled
    issued = issued * narrow**_NARROW_ISSUE * (1 + (of.threads / _LARGE_BLOCK) ** 4) ** (_LARGE_BLOCK_COST / 4)
    compute = of.operations * of.padding / of.blocks / rate * issued
    traffic = of.traffic_bytes / of.blocks / _L2_BYTES_PER_CYCLE * narrow**_NARROW_TRAFFIC
    parallel = warps * np.sqrt(np.clip(of.items, 1.0, 64.0))

    work = _smooth_maximum(compute, traffic, _SMOOTH)
    count = np.ceil(of.blocks / device.sm_count)
    rounds = np.floor(count / resident)
    rest = count - rounds * resident
    busy = rounds * (_round(work, resident, parallel) + _BLOCK_CYCLES)
    busy += np.where(rest > 0, _round(work, np.maximum(rest, 1.0), parallel) + _BLOCK_CYCLES, 0.0)
    busy_us = busy / clock_mhz
    bytes_per_us = (device.memory_bandwidth_bytes_per_s or _USUAL_BYTES_PER_S) / 1e6
    memory_us = of.memory_bytes / bytes_per_us
    time_us = _smooth_maximum(busy_us, memory_us, _SMOOTH_BYTES) / of.hinted_speed + _LAUNCH_US * of.launches
    if not np.isfinite(time_us).all():
        return None
    return TimeEstimate(
        time_us=time_us,
        bound_us=np.maximum(of.operations / (rate * device.sm_count * clock_mhz), memory_us) + _LAUNCH_US,
        threads=of.threads,
        registers=registers,
        blocks=of.blocks,
        blocks_per_sm=resident,
        items=of.items,
        is_declared=of.is_declared,
    )


def _round(work: Column, blocks: Column, parallel: Column) -> Column:
    """Return the cycles of blocks that run at once: their work over the throughput that their warps reach."""
    return blocks * work * (1 + _SATURATION / (blocks * parallel))


def _smooth_maximum(first: Column, second: Column, power: float) -> Column:
    return np.asarray((first**power + second**power) ** (1 / power))


class _Launches:
    """The main step of every configuration, in numbers: columns of shape (rows,).

    ``blocks`` are without the limit of a persistent kernel. ``padding`` is the number of elements of all tiles over
    those of the problem; ``items`` as in `TimeEstimate`, at least 0.25. Of the bytes, ``memory_bytes`` are those from
    memory, each once, and ``traffic_bytes`` those between L2 and the SMs. ``hinted_speed`` is a relative speed, by
    parameters that no launch shows.
    """

    def __init__(self, spec: KernelSpec, problem: Problem, device: DeviceProperties, space: SearchSpace) -> None:
        self._spec = spec
        self._problem = problem
        self._space = space
        self._device = device
        self._ones = {name: 1 for name in spec.sizes if name not in spec.flags}
        self._fixed = {STEP: 0, **fixed_names(spec, problem, device)}
        total = [self._product([*step.launch.block, *step.launch.grid]).sum() for step in spec.main_steps]
        self._main: Step = spec.main_steps[int(np.argmax(total))]
        launch = self._main.launch
        self.threads = self._product(launch.block)
        self.blocks = self._blocks(space)
        self.smem_bytes = self._optional(launch.static_smem_bytes) + self._optional(launch.dynamic_smem_bytes)
        self.min_registers = self._optional(launch.min_registers)
        launches = np.zeros(len(space))
        for step in spec.steps:
            times = self._optional(step.times, 1.0)
            launches += np.where(self._optional(step.when, 1.0) != 0, times, 0.0)
        self.launches = np.maximum(launches, 1.0)
        self._measure_tiles()
        self._count_bytes()
        self.is_declared = spec.work.flops is not None and launch.min_registers is not None
        shown = {name for each in (*launch.block, *launch.grid) for name in each.names}
        logarithm = np.zeros(len(space))
        for parts, gain in _HINTS.values():
            hidden = [
                (index, parameter)
                for index, parameter in enumerate(space.parameters)
                if _is_number(parameter)
                and parameter.name not in shown
                and any(part in parameter.name.upper() for part in parts)
            ]
            for index, parameter in hidden:
                doublings = np.log2(np.maximum(np.array(parameter.values, np.float64), 0.5))
                logarithm += gain / len(hidden) * (doublings - doublings.max())[space.codes[:, index]]
        self.hinted_speed = np.exp(logarithm)

    def _measure_tiles(self) -> None:
        """Find the extent of a block's tile along each size, and what follows from it."""
        space, sizes = self._space, self._problem.sizes
        one = self._blocks(space, **self._ones)
        self._along: dict[str, Column] = {}
        extents: dict[str, Column] = {}
        self.padding = np.ones(len(space))
        for name in self._ones:
            self._along[name] = np.maximum(self.blocks / self._blocks(space, **{name: 1}), 1.0)
            extents[name] = self._extent(space, name, one)
            covered = self._along[name] * extents[name] / sizes[name]
            self.padding *= np.where(np.isfinite(covered), np.maximum(covered, 1.0), 1.0)
        tiles = reduce(np.multiply, self._along.values(), np.ones(len(space)))
        self._replicas = np.maximum(self.blocks / tiles, 1.0)
        written = [self._product(each.shape) for each in self._spec.buffers if each.is_written]
        self._outputs = reduce(np.add, written, np.zeros(len(space)))
        self.items = self._outputs * self.padding / tiles / self.threads
        if 2 * np.count_nonzero(self.items < _MIN_ITEMS) > len(space):  # a first median would import masked arrays
            read = [self._product(each.shape) for each in self._spec.buffers if each.is_read]
            inputs = reduce(np.maximum, read, self._outputs)
            self.items = inputs / (self.blocks * self.threads)
        self.items = np.maximum(self.items, 0.25)
        self.width = self._width(extents)

    def _extent(self, space: SearchSpace, name: str, one: Column) -> Column:
        """Return the elements of a block's tile along a size; infinite where the grid does not depend on it."""
        many = self._blocks(space, **{**self._ones, name: _LARGE_SIZE}) / one
        return np.where(many > 1, _LARGE_SIZE / np.maximum(many, 1.0), np.inf)

    def _width(self, extents: Mapping[str, Column]) -> Column:
        """Return the contiguous elements of the output that a warp accesses.

        The innermost size is one of the last extent of an output. A block of several dimensions lies with its x axis
        along that size unless the tile grows along another size only when the block grows in x.
        """
        warp = float(self._device.warp_size)
        last = [name for each in self._spec.buffers if each.is_written for name in each.shape[-1].names]
        inner = next((name for name in last if name in extents), None)
        if inner is None:
            return np.full(len(self._space), warp)
        block = self._main.launch.block
        block_x = self._product(block[:1])
        flat = np.clip(extents[inner], 1.0, warp)
        space = self._space
        along_inner, along_other = np.zeros((2, len(self._space)), np.bool_)
        for parameter in space.parameters if len(block) > 1 else ():
            if parameter.name in block[0].names and _is_number(parameter):
                doubled = tuple(2 * value for value in parameter.values if not isinstance(value, str))
                changed = (each._replace(values=doubled) if each is parameter else each for each in space.parameters)
                wider = structs.replace(space, parameters=tuple(changed))
                one = self._blocks(wider, **self._ones)
                for name, extent in extents.items():
                    grows = self._extent(wider, name, one) > 1.5 * extent
                    if name == inner:
                        along_inner |= grows
                    else:
                        along_other |= grows
        lies_across = along_other & ~along_inner
        lanes = np.where(lies_across, np.maximum(warp / block_x, 1.0), np.minimum(block_x, warp))
        return np.where(block_x == self.threads, flat, lanes)

    def _count_bytes(self) -> None:
        """Count the operations, and the bytes that the SMs and the memory move."""
        spec, count = self._spec, len(self._space)
        arrays = np.zeros(count)
        self.traffic_bytes = np.zeros(count)
        elements_read = np.zeros(count)
        element_bytes: list[int] = []
        for buffer in spec.buffers:
            size = DTYPES[buffer.element_type(self._problem.dtype, self._problem.sizes)].size_bytes
            elements = self._product(buffer.shape)
            arrays += elements * size
            if buffer.is_written:
                self.traffic_bytes += elements * size * self._replicas
            elif not buffer.constant:
                element_bytes.append(size)
                named = {name for extent in buffer.shape for name in extent.names}
                again = [along for name, along in self._along.items() if name not in named]
                self.traffic_bytes += elements * size * reduce(np.multiply, again, np.ones(count))
                elements_read += elements
        scratch = np.zeros(count)
        for workspace in spec.workspaces:
            size = DTYPES[workspace.element_type(self._problem.dtype, self._problem.sizes)].size_bytes
            extents = [np.maximum(self._column(extent), 0.0) for extent in workspace.shape]
            scratch += size * reduce(np.multiply, extents)
        self.traffic_bytes += scratch
        self.memory_bytes = self._optional(spec.work.bytes, arrays) + 2 * scratch
        self.operations = self._optional(spec.work.flops, 2 * (elements_read + self._outputs))
        self.element_bytes = max(element_bytes, default=4)

    def _blocks(self, space: SearchSpace, **sizes: int) -> Column:
        """Return the blocks of the main step at other sizes, on a device whose SMs limit no grid."""
        names = {**self._fixed, "device.sm_count": _UNLIMITED_SMS, **sizes}
        return self._product(self._main.launch.grid, names, space)

    def _optional(self, expression: Expression | None, otherwise: Column | float = 0.0) -> Column:
        return np.full(len(self._space), otherwise) if expression is None else self._column(expression)

    def _product(
        self, extents: Sequence[Expression], names: Mapping[str, Value] | None = None, space: SearchSpace | None = None
    ) -> Column:
        return reduce(np.multiply, (np.maximum(self._column(each, names, space), 1.0) for each in extents))

    def _column(
        self, expression: Expression, names: Mapping[str, Value] | None = None, space: SearchSpace | None = None
    ) -> Column:
        return np.asarray((space or self._space).evaluate(expression, names or self._fixed), np.float64)


def _is_number(parameter: Parameter) -> bool:
    return not any(isinstance(value, str | bool) for value in parameter.values)
