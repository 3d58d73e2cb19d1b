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
from contextlib import suppress
from functools import reduce

import msgspec
import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from autotile.core.device import DeviceProperties
from autotile.core.dtypes import DTYPES
from autotile.core.model import Config, Problem, Sizes, Values
from autotile.errors import SpecError
from autotile.kernel.arguments import ArrayArgument
from autotile.kernel.expressions import Expression
from autotile.kernel.launch import fixed_names
from autotile.kernel.spec import STEP, KernelSpec, Launch, Parameter
from autotile.space.limits import max_blocks_per_sm
from autotile.space.search_space import SearchSpace

Column = NDArray[np.float64]

CONFIDENT_FACTOR = 2.0
"""Factor between two estimates from which the order of the times is taken for certain. Over kernels whose file states
the operations and the registers, none of 1,276 recorded configurations was slower than the one of the least estimate
where its own was twice as long, nor any of 130 defaults at sizes of their own; at 1.5 times, 0.4 % were."""
_LARGE_SIZE = 2**20
"""Size at which a grid shows its tile; larger than any tile."""
_MANY_SMS = (2**40, 2**41)
"""Numbers of SMs at which no persistent kernel limits its grid."""
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
    with suppress(SpecError):
        found = _estimated(spec, problem, device, space)
        if found is not None and (len(space) == 1 or float(np.ptp(found.time_us)) > 0):
            return found
    return None


def estimate_configs(
    spec: KernelSpec, problem: Problem, device: DeviceProperties, configs: Sequence[Config]
) -> TimeEstimate | None:
    """Estimate the times of some configurations as `estimate_times` does, in their order; their times may be equal."""
    with suppress(SpecError):
        return _estimated(spec, problem, device, SearchSpace.of(spec, configs))
    return None


@np.errstate(all="ignore")
def _estimated(spec: KernelSpec, problem: Problem, device: DeviceProperties, space: SearchSpace) -> TimeEstimate | None:
    """Return columns of shape (rows,), all of the main step; a `SpecError` if an expression has no value."""
    if spec.computed or not len(space):
        return None
    count, fixed = len(space), {STEP: 0, **fixed_names(spec, problem, device)}
    ones = dict.fromkeys(spec.proper_sizes, 1)

    def column(of: Expression, names: Values = fixed, rows: SearchSpace = space) -> Column:
        return np.asarray(rows.evaluate(of, names), np.float64)

    def optional(of: Expression | None, otherwise: Column | float = 0.0) -> Column:
        return np.full(count, otherwise) if of is None else column(of)

    def product(extents: Sequence[Expression], names: Values = fixed, rows: SearchSpace = space) -> Column:
        return reduce(np.multiply, (np.maximum(column(each, names, rows), 1.0) for each in extents))

    total = [product([*step.launch.block, *step.launch.grid]).sum() for step in spec.main_steps]
    launch = spec.main_steps[int(np.argmax(total))].launch

    sms = "device.sm_count"
    own, large, larger = (product(launch.grid, {**fixed, sms: n}) for n in (device.sm_count, *_MANY_SMS))
    strides = large < larger  # no size limits the grid: each block takes its share of the problem

    def blocks_at(sizes: Sizes, rows: SearchSpace = space) -> Column:
        """Return the blocks at other sizes, on a device whose SMs limit no grid, as that of a persistent kernel."""
        return np.where(strides, own, product(launch.grid, {**fixed, sms: _MANY_SMS[0], **sizes}, rows))

    def tiles_of(rows: SearchSpace) -> dict[str, Column]:
        """Return the elements of a block's tile along each size; infinite where the grid does not depend on it."""
        one = blocks_at(ones, rows)
        many = {name: blocks_at({**ones, name: _LARGE_SIZE}, rows) / one for name in ones}
        return {name: np.where(each > 1, _LARGE_SIZE / np.maximum(each, 1.0), np.inf) for name, each in many.items()}

    def size_bytes(array: ArrayArgument) -> int:
        return DTYPES[array.element_type(problem.dtype, problem.sizes)].size_bytes

    # The tiles of a block, and their elements over those of the problem.
    threads, blocks, tiles = product(launch.block), blocks_at({}), tiles_of(space)
    along = {name: np.maximum(blocks / blocks_at({name: 1}), 1.0) for name in ones}
    covered = (along[name] * tiles[name] / problem.sizes[name] for name in ones)
    padding = reduce(
        np.multiply, (np.where(np.isfinite(each), np.maximum(each, 1.0), 1.0) for each in covered), np.ones(count)
    )
    needed = np.where(strides, own, reduce(np.multiply, along.values(), np.ones(count)))
    written = [product(each.shape) for each in spec.buffers if each.is_written]
    outputs = reduce(np.add, written, np.zeros(count))
    items = outputs * padding / needed / threads
    if 2 * np.count_nonzero(items < _MIN_ITEMS) > count:  # a first median would import masked arrays
        read = [product(each.shape) for each in spec.buffers if each.is_read]
        items = reduce(np.maximum, read, outputs) / (blocks * threads)
    items = np.maximum(items, 0.25)

    # The contiguous elements of the output that a warp accesses. The innermost size is one of the last extent of an
    # output. A block of several dimensions lies with its x axis along that size unless the tile grows along another
    # size only when the block grows in x.
    width = np.full(count, float(device.warp_size))
    last = [name for each in spec.buffers if each.is_written for name in each.shape[-1].names]
    if (inner := next((name for name in last if name in tiles), None)) is not None:
        block_x = product(launch.block[:1])
        along_inner, along_other = np.zeros((2, count), np.bool_)
        for parameter in space.parameters if len(launch.block) > 1 else ():
            if parameter.name in launch.block[0].names and _is_number(parameter):
                doubled = tuple(2 * value for value in parameter.values if not isinstance(value, str))
                changed = (each._replace(values=doubled) if each is parameter else each for each in space.parameters)
                wider = structs.replace(space, parameters=tuple(changed))
                for name, tile in tiles_of(wider).items():
                    grown = along_inner if name == inner else along_other
                    grown |= tile > 1.5 * tiles[name]
        lies_across = along_other & ~along_inner
        lanes = np.where(lies_across, np.maximum(width / block_x, 1.0), np.minimum(block_x, width))
        width = np.where(block_x == threads, np.clip(tiles[inner], 1.0, width), lanes)

    # The operations, and the bytes that the SMs move from L2 and that the memory moves, these once each.
    arrays, traffic_bytes, elements_read, scratch = np.zeros((4, count))
    element_bytes: list[int] = []
    for buffer in spec.buffers:
        elements, size = product(buffer.shape), size_bytes(buffer)
        arrays += elements * size
        if buffer.is_written:
            traffic_bytes += elements * size * np.maximum(blocks / needed, 1.0)
        elif not buffer.constant:
            element_bytes.append(size)
            named = {name for extent in buffer.shape for name in extent.names}
            again = [each for name, each in along.items() if name not in named]
            traffic_bytes += elements * size * reduce(np.multiply, again, np.ones(count))
            elements_read += elements
    for workspace in spec.workspaces:
        extents = [np.maximum(column(extent), 0.0) for extent in workspace.shape]
        scratch += size_bytes(workspace) * reduce(np.multiply, extents)
    traffic_bytes += scratch
    memory_bytes = optional(spec.work.bytes, arrays) + 2 * scratch
    operations = optional(spec.work.flops, 2 * (elements_read + outputs))

    # The cycles of the busiest SM, whose blocks run in rounds of as many as are resident.
    clock_mhz = device.clock_mhz or _USUAL_CLOCK_MHZ
    warps = np.ceil(threads / device.warp_size)
    minimum = optional(launch.min_registers)
    assumed = _MIN_REGISTERS + _REGISTERS_PER_OUTPUT * np.maximum(items, 1.0)
    wanted = np.where(minimum > 0, minimum + _FURTHER_REGISTERS, assumed)
    allocated = np.ceil(warps / device.warp_unit) * device.warp_unit * device.warp_size
    most = np.minimum(device.max_registers_per_thread, device.registers_per_block // allocated // 8 * 8)
    most = np.maximum(most, 8.0)
    registers, spilled = np.minimum(wanted, most), np.maximum(wanted / most, 1.0)
    smem_bytes = optional(launch.static_smem_bytes) + optional(launch.dynamic_smem_bytes)
    held = max_blocks_per_sm(threads, np.ceil(registers), np.minimum(smem_bytes, _MAX_SMEM_BYTES), device)
    resident: Column = np.maximum(held, 1).astype(np.float64)
    narrow = device.warp_size / width
    rate = 2.0 * device.fp32_lanes_per_sm * _TENSOR_RATE.get(max(element_bytes, default=4), 1.0)
    issued = (1 + _ISSUE / np.sqrt(items)) * (warps * device.warp_size / threads) * spilled
    issued = issued * narrow**_NARROW_ISSUE * (1 + (threads / _LARGE_BLOCK) ** 4) ** (_LARGE_BLOCK_COST / 4)
    compute = operations * padding / blocks / rate * issued
    traffic = traffic_bytes / blocks / _L2_BYTES_PER_CYCLE * narrow**_NARROW_TRAFFIC
    parallel = warps * np.sqrt(np.clip(items, 1.0, 64.0))
    work = _smooth_maximum(compute, traffic, _SMOOTH)
    of_sm = np.ceil(blocks / device.sm_count)
    rounds = np.floor(of_sm / resident)
    rest = of_sm - rounds * resident
    busy = rounds * (_round(work, resident, parallel) + _BLOCK_CYCLES)
    busy += np.where(rest > 0, _round(work, np.maximum(rest, 1.0), parallel) + _BLOCK_CYCLES, 0.0)

    launches = np.zeros(count)
    for step in spec.steps:
        launches += np.where(optional(step.when, 1.0) != 0, optional(step.times, 1.0), 0.0)
    bytes_per_us = (device.memory_bandwidth_bytes_per_s or _USUAL_BYTES_PER_S) / 1e6
    memory_us = memory_bytes / bytes_per_us
    time_us = _smooth_maximum(busy / clock_mhz, memory_us, _SMOOTH_BYTES) / _hinted_speed(space, launch)
    time_us += _LAUNCH_US * np.maximum(launches, 1.0)
    if not np.isfinite(time_us).all():
        return None
    return TimeEstimate(
        time_us=time_us,
        bound_us=np.maximum(operations / (rate * device.sm_count * clock_mhz), memory_us) + _LAUNCH_US,
        threads=threads,
        registers=registers,
        blocks=blocks,
        blocks_per_sm=resident,
        items=items,
        is_declared=spec.work.flops is not None and launch.min_registers is not None,
    )


def _round(work: Column, blocks: Column, parallel: Column) -> Column:
    """Return the cycles of blocks that run at once: their work over the throughput that their warps reach."""
    return blocks * work * (1 + _SATURATION / (blocks * parallel))


def _smooth_maximum(first: Column, second: Column, power: float) -> Column:
    return np.asarray((first**power + second**power) ** (1 / power))


def _hinted_speed(space: SearchSpace, launch: Launch) -> Column:
    """Return a relative speed by parameters that no launch shows."""
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
    return np.exp(logarithm)


def _is_number(parameter: Parameter) -> bool:
    return not any(isinstance(value, str | bool) for value in parameter.values)
