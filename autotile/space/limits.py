"""The gates before and after compilation: the demands of a launch against the limits of the device.

Each limit is a function over columns of configurations, which filters a space and, applied to a single row, explains
why a configuration is not feasible. Sources: "Technical Specifications per Compute Capability" in the CUDA C++
Programming Guide for threads, dimensions, registers and shared memory; ``cuda_occupancy.h`` for occupancy.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial, reduce
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from autotile.core.device import DeviceProperties
from autotile.core.dtypes import DTYPES
from autotile.core.forks import cached_property
from autotile.core.model import (
    CompiledFunction,
    Config,
    LaunchGeometry,
    Occupancy,
    Outcome,
    Problem,
    Resources,
    Trial,
    Values,
)
from autotile.core.text import plural
from autotile.errors import nearest
from autotile.kernel.arguments import (
    ArrayArgument,
    Column,
    Evaluate,
    Mask,
    TensorMap,
    bound_fault,
    clipped,
    encoded,
    extents_text,
    round_up,
)
from autotile.kernel.expressions import Expression
from autotile.kernel.launch import MAX_LAUNCHES, LaunchPlan, fixed_names, known_names
from autotile.kernel.problem import CLUSTER_CAPABILITY, is_below, unsupported_reason
from autotile.kernel.spec import STEP, KernelSpec, Step, computed_values

Blocks = NDArray[np.int64]

UNLIMITED = 2**31 - 1
"""Blocks allowed by a resource that a block does not use."""

CLIP = 2**20
"""Above every limit of a block; factors are clipped to it so that their products fit in 64 bits."""

_CLIP_BYTES = 2**40
"""Above every limit of shared memory."""


@lru_cache(maxsize=4096)
def occupancy(threads: int, registers: int, smem_bytes: int, device: DeviceProperties) -> Occupancy:
    """Calculate the occupancy of a kernel, given its threads per block and registers per thread.

    The shared memory is that per block, static and dynamic, without the part reserved by the system. There are 0 blocks
    if a block exceeds a hard limit (threads or registers per block, registers per thread, opt-in shared memory per
    block); the occupancy is then limited by that resource.
    """
    block = clipped(threads, -1, CLIP), clipped(registers, -1, CLIP), clipped(smem_bytes, -1, _CLIP_BYTES)
    limits = {name: int(blocks) for name, blocks in block_limits(*block, device).items()}
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
    """Calculate ``blocks_per_sm`` of `occupancy` over integers of shapes that broadcast: int64, of that shape.

    It is 0 where a block cannot run.
    """
    return np.asarray(reduce(np.minimum, block_limits(threads, registers, smem_bytes, device).values()))


def block_limits(
    threads: ArrayLike, registers: ArrayLike, smem_bytes: ArrayLike, device: DeviceProperties
) -> dict[str, Blocks]:
    """Calculate the blocks per SM that each resource allows; parameters as for `max_blocks_per_sm`.

    They are int64 arrays that broadcast against each other; `UNLIMITED` where a block does not use the resource.
    """
    thread_column, register_column, smem_column = (
        np.asarray(column, dtype=np.int64) for column in (threads, registers, smem_bytes)
    )
    warps = -(-thread_column // device.warp_size)
    can_hold = (thread_column >= 1) & (thread_column <= device.max_threads_per_block)
    smem_per_block = round_up(smem_column + device.smem_reserved_per_block_bytes, device.smem_unit_bytes)
    smem_fits = (smem_column >= 0) & (smem_column <= device.smem_per_block_optin_bytes)
    return {
        "threads": _blocks(device.max_warps_per_sm, warps, can_hold),
        "registers": _by_registers(warps, register_column, device),
        "shared_memory": _blocks(device.smem_per_sm_bytes, smem_per_block, smem_fits),
        "blocks": np.asarray(device.max_blocks_per_sm, dtype=np.int64),
    }


def _by_registers(warps: Blocks, registers: Blocks, device: DeviceProperties) -> Blocks:
    """Allocate registers to warps, from ``warp_unit`` partitions of the register file.

    A partition cannot use the remainder of another, so the warps of an SM are a multiple of ``warp_unit``. Only the
    launch check rounds up the warps of the block itself, as it assumes equal allocation from all partitions. Compute
    capability 1 allocates registers to blocks, for warps rounded up to ``warp_unit``.
    """
    possible = (registers >= 0) & (registers <= device.max_registers_per_thread)
    allocated_warps = round_up(warps, device.warp_unit)
    if device.compute_capability.startswith("1."):
        per_block = round_up(allocated_warps * device.warp_size * registers, device.register_unit)
        return _blocks(device.registers_per_sm, per_block, possible & (per_block <= device.registers_per_block))
    per_warp = round_up(registers * device.warp_size, device.register_unit)
    possible = possible & (per_warp * allocated_warps <= device.registers_per_block)
    resident_warps = device.registers_per_sm // np.maximum(per_warp, 1) // device.warp_unit * device.warp_unit
    return np.where(registers == 0, UNLIMITED, _blocks(resident_warps, warps, possible))


def _blocks(available: int | Blocks, needed: Blocks, possible: NDArray[np.bool_]) -> Blocks:
    """Return the blocks that fit in ``available`` if each needs ``needed``; 0 where a block is not ``possible``."""
    shared = np.where(needed > 0, available // np.maximum(needed, 1), UNLIMITED)
    return np.where(possible, shared, 0)


EvaluateWhere = Callable[[Values, Mask, Expression], Column]
"""Evaluates an expression over parameters, sizes, flags, ``device.*`` and further names, whose values are given, in
selected rows, shape (rows,); a bool selects all or none. The result is an int64 column, 1 in other rows; for a single
configuration, an int."""


class LaunchDemand(msgspec.Struct, frozen=True, dict=True):
    """Resources that one launch needs: int64 columns with one row per configuration, or ints for a single one.

    A column with a single element applies to every configuration.
    """

    spec: KernelSpec
    step: Step
    """The ``__global__`` function."""
    runs: Mask
    """Whether the configuration makes this launch."""
    evaluate: Evaluate
    """Returns the value of an expression for this launch."""

    block = cached_property(lambda self: tuple(map(self.evaluate, self.step.launch.block)))
    """Threads of a block along each axis."""
    grid = cached_property(lambda self: tuple(map(self.evaluate, self.step.launch.grid)))
    """Blocks along each axis."""
    cluster = cached_property(lambda self: tuple(map(self.evaluate, self.step.launch.cluster)))
    """Blocks per cluster along each axis; empty if the function has no clusters."""
    static_smem_bytes = cached_property(lambda self: self._optional(self.step.launch.static_smem_bytes))
    """Static shared memory per block, in bytes."""
    dynamic_smem_bytes = cached_property(lambda self: self._optional(self.step.launch.dynamic_smem_bytes))
    """Dynamic shared memory per block, in bytes."""
    registers = cached_property(lambda self: self._optional(self.step.launch.min_registers))
    """Minimum registers per thread; 0 if not declared."""
    threads = cached_property(lambda self: _product(self.block))
    """Threads per block."""

    def _optional(self, expression: Expression | None) -> Column:
        return self.evaluate(expression) if expression is not None else 0 * self.block[0]

    @cached_property
    def smem_bytes(self) -> Column:
        """Static and dynamic shared memory per block, in bytes."""
        return clipped(self.static_smem_bytes, 0, _CLIP_BYTES) + clipped(self.dynamic_smem_bytes, 0, _CLIP_BYTES)

    def blocks_per_sm(self, device: DeviceProperties) -> Column:
        """Return the resident blocks per SM; 0 where a block cannot run."""
        return max_blocks_per_sm(self.threads, clipped(self.registers, 0, CLIP), self.smem_bytes, device)


class Demand(msgspec.Struct, frozen=True, dict=True):
    """Demands of configurations: int64 columns with one row per configuration, or one element for all.

    Of a single configuration, they are scalars.
    """

    spec: KernelSpec
    problem: Problem
    evaluate: EvaluateWhere

    launch_count = cached_property(lambda self: reduce(operator.add, self._counts))
    """Launches of a call."""

    @cached_property
    def launches(self) -> tuple[LaunchDemand, ...]:
        """One of each step; all launches of a step whose expressions depend on ``step``."""
        found = []
        for step, count in zip(self.spec.steps, self._counts, strict=True):
            launch = step.launch
            parts = (*launch.block, *launch.grid, *launch.cluster)
            parts += tuple(filter(None, (launch.dynamic_smem_bytes, launch.static_smem_bytes, launch.min_registers)))
            varies = any(STEP in part.names for part in parts)
            for number, runs in self._runs(count, varies=varies):
                found.append(LaunchDemand(self.spec, step, runs, partial(self.evaluate, {STEP: number}, runs)))
        return tuple(found)

    @cached_property
    def arrays(self) -> tuple[tuple[ArrayArgument, tuple[Column, ...]], ...]:
        """Buffers and workspaces with their extents; those of a workspace may be 0."""
        arrays = (each for each in self.spec.arguments if isinstance(each, ArrayArgument))
        return tuple((array, tuple(self.evaluate({}, True, each) for each in array.shape)) for array in arrays)

    @cached_property
    def tensor_maps(self) -> tuple[TensorMap, ...]:
        """Tensor maps."""
        maps = self.spec.tensor_maps
        at = self.problem.dtype, self.problem.sizes
        return tuple(one.tensor_map(*at, partial(self.evaluate, {}, True)) for one in maps)

    @cached_property
    def scalars(self) -> list[tuple[str, str, Column, Mask]]:
        """Name, type and value of each scalar that depends on more than the problem, and what makes that launch."""
        found = []
        for step, count in zip(self.spec.steps, self._counts, strict=True):
            for scalar in self.spec.bound_scalars:
                argument = scalar.name.partition(".")[0]  # a struct, of its members
                if scalar.is_per_launch and scalar.binding is not None and argument in step.arguments:
                    dtype, varies = scalar.element_type(self.problem.dtype), STEP in scalar.binding.names
                    for number, runs in self._runs(count, varies=varies):
                        found.append((scalar.name, dtype, self.evaluate({STEP: number}, runs, scalar.binding), runs))
        return found

    @cached_property
    def memory_bytes(self) -> Any:
        """Device memory of all arguments; float64, as products of absurd extents exceed 64 bits."""
        total: Any = 0.0
        for array, shape in self.arrays:
            element_bytes = DTYPES[array.element_type(self.problem.dtype, self.problem.sizes)].size_bytes
            extents = [max(extent, 0) if isinstance(extent, int) else np.maximum(extent, 0.0) for extent in shape]
            total = total + reduce(operator.mul, extents, float(element_bytes))
        return total

    def _runs(self, count: Column, *, varies: bool) -> Iterator[tuple[int, Mask]]:
        """Yield the launches of a step by number, one for all if they do not vary, with what makes each."""
        possible = count * (self.launch_count <= MAX_LAUNCHES)
        for number in range(int(np.max(possible, initial=0)) if varies else 1):
            yield number, number < possible

    @cached_property
    def _counts(self) -> list[Column]:
        """The number of launches of each step, clipped to 0 and just above the limit."""
        counts = []
        for step in self.spec.steps:
            runs = True if step.when is None else self.evaluate({}, True, step.when) != 0
            count = 1 if step.times is None else self.evaluate({}, runs, step.times)
            counts.append(clipped(count, 0, MAX_LAUNCHES + 1) * runs)
        return counts


def demand_of(spec: KernelSpec, names: Values, problem: Problem) -> Demand:
    """Return the demand of a single configuration, given the value of every name."""

    def evaluate(extra: Values, rows: bool, expression: Expression) -> int:
        if not rows:
            return 1
        return int(expression.value(names if expression.names.isdisjoint(extra) else {**extra, **names}))

    return Demand(spec, problem, evaluate)


_MAX_CLUSTER_BLOCKS = 8
"""Portable maximum of blocks per cluster: CUDA C++ Programming Guide, thread block clusters."""


class Limit(msgspec.Struct, frozen=True):
    """A named limit: the rows that meet it, and why a single configuration does not, in one line."""

    name: str
    fits: Callable[[Demand, DeviceProperties], Mask]
    explain: Callable[[Demand, DeviceProperties], str]
    expressions: Callable[[KernelSpec], Iterable[Expression]]
    """Expressions that determine whether it is met."""
    applies: Callable[[KernelSpec], bool] = lambda spec: True
    """Whether the limit applies to a kernel."""
    hint: str = "add smaller values"
    """Remedy if no configuration meets it."""


def limits_of(spec: KernelSpec) -> tuple[Limit, ...]:
    """Return the limits that apply to a kernel, in the order applied."""
    return tuple(limit for limit in LIMITS if limit.applies(spec))


def limit_violation(demand: Demand, device: DeviceProperties) -> str:
    """Return an explanation of the first limit that a single configuration violates; "" if it violates none."""
    for limit in limits_of(demand.spec):
        if not limit.fits(demand, device):
            return f"{limit.name}: {limit.explain(demand, device)}"
    return ""


def _product(dimensions: Iterable[Column]) -> Column:
    """Return a product of extents, clipped so that it fits in 64 bits."""
    return reduce(operator.mul, [clipped(dimension, 0, CLIP) for dimension in dimensions])


def _occupancy_fits(demand: LaunchDemand, device: DeviceProperties) -> Mask:
    warps = -(-demand.threads // device.warp_size)
    found: Any = demand.blocks_per_sm(device) * warps / device.max_warps_per_sm
    return (found > 0) & (found >= demand.spec.min_occupancy)


def _explain_occupancy(demand: LaunchDemand, device: DeviceProperties) -> str:
    registers = clipped(demand.registers, 0, CLIP)
    found = occupancy(demand.threads, registers, demand.smem_bytes, device)
    if found.blocks_per_sm:
        return _low_occupancy("", found, demand.spec)
    needs = f"{plural(demand.threads, 'thread')}, at least {plural(demand.registers, 'register')} per thread"
    return _no_block_fits(f"{needs}, {demand.smem_bytes:,} bytes of shared memory", found, device)


def _no_block_fits(needs: str, found: Occupancy, device: DeviceProperties) -> str:
    return f"no block fits on an SM of {device.name}: {needs}; limited by {', '.join(found.limited_by)}"


def _low_occupancy(noun: str, found: Occupancy, spec: KernelSpec) -> str:
    minimum = f"min_occupancy = {spec.min_occupancy:g}"
    return f"{noun}{found.occupancy:.3f} is under {minimum}; limited by {', '.join(found.limited_by)}"


def _too_many_blocks(blocks: int, resident: int, device: DeviceProperties) -> str:
    return f"a cooperative launch of {plural(blocks, 'block')}, of which {device.name} holds {resident:,} at a time"


def _explain_memory(demand: Demand, device: DeviceProperties) -> str:
    for array, shape in demand.arrays:
        if any(extent < int(array.is_given) for extent in shape):
            what = "array" if array.is_given else "workspace"
            return f"the {what} {array.name} would have the shape {extents_text(shape)}"
    needed, available = demand.memory_bytes / 2**30, device.memory_bytes / 2**30
    what = "arrays" if all(array.is_given for array, _ in demand.arrays) else "arrays and workspaces"
    return f"its {what} take {needed:,.1f} GiB, {device.name} has {available:,.1f} GiB"


def _cluster_fits(demand: LaunchDemand, device: DeviceProperties) -> Mask:
    if not demand.cluster:
        return True
    blocks = _product(demand.cluster)
    fits = (blocks >= 1) & (blocks <= _max_cluster_blocks(device))
    grid = [*demand.grid, *[1] * len(demand.cluster)]
    whole = [along % clipped(side, 1, CLIP) == 0 for along, side in zip(grid, demand.cluster, strict=False)]
    return reduce(operator.and_, whole, fits)


def _max_cluster_blocks(device: DeviceProperties) -> int:
    return 1 if is_below(device.compute_capability, CLUSTER_CAPABILITY) else _MAX_CLUSTER_BLOCKS


def _launch_limit(
    name: str,
    fits: Callable[[LaunchDemand, DeviceProperties], Mask],
    explain: Callable[[LaunchDemand, DeviceProperties], str],
    *,
    parts: Sequence[str],
    **options: Any,
) -> Limit:
    """Return a limit that every launch of a configuration must meet; it depends on the named parts of a launch.

    ``options`` are further fields of the limit.
    """

    def explain_first(demand: Demand, device: DeviceProperties) -> str:
        for launch in demand.launches:
            if launch.runs and not fits(launch, device):
                of = f"{launch.step.entry}: " if len(demand.spec.steps) > 1 else ""
                return of + explain(launch, device)
        return ""

    def expressions(spec: KernelSpec) -> Iterator[Expression]:
        yield from _conditions_of_steps(spec)
        for step in spec.steps:
            for part in parts:
                given = getattr(step.launch, part)
                yield from given if isinstance(given, tuple) else filter(None, [given])

    return Limit(
        name,
        lambda demand, device: reduce(  # False <= anything: what is not launched meets it
            operator.and_, [launch.runs <= fits(launch, device) for launch in demand.launches], True
        ),
        explain_first,
        expressions,
        **options,
    )


def _dimensions_limit(part: str, unit: str) -> Limit:
    """Return the limit of the extents of a ``block`` or a ``grid`` along each axis."""

    def fits(demand: LaunchDemand, device: DeviceProperties) -> Mask:
        pairs = zip(getattr(demand, part), getattr(device, f"max_{part}_dim"), strict=False)
        return reduce(operator.and_, [(extent >= 1) & (extent <= most) for extent, most in pairs])

    def explain(demand: LaunchDemand, device: DeviceProperties) -> str:
        found, allowed = extents_text(getattr(demand, part)), extents_text(getattr(device, f"max_{part}_dim"))
        return f"a {part} of {found} {unit}, {device.name} allows 1 to {allowed}"

    return _launch_limit(f"{part}_dims", fits, explain, parts=(part,))


def _conditions_of_steps(spec: KernelSpec) -> Iterator[Expression]:
    return (part for step in spec.steps for part in (step.when, step.times) if part is not None)


def _of_arguments(spec: KernelSpec) -> Iterator[Expression]:
    return (part for argument in spec.arguments for part in argument.expressions)


_SMEM = ("block", "static_smem_bytes", "dynamic_smem_bytes")
_RESIDENT = (*_SMEM, "min_registers")


LIMITS = (
    Limit(
        "memory",
        lambda demand, device: reduce(
            operator.and_,
            [extent >= int(array.is_given) for array, shape in demand.arrays for extent in shape],
            demand.memory_bytes <= device.memory_bytes,
        ),
        _explain_memory,
        _of_arguments,
        hint="choose smaller sizes",
    ),
    Limit(
        "tensor_maps",
        lambda demand, device: reduce(operator.and_, [one.fits() for one in demand.tensor_maps]),
        lambda demand, device: next(filter(None, (one.explain() for one in demand.tensor_maps)), ""),
        _of_arguments,
        applies=lambda spec: bool(spec.tensor_maps),
        hint="choose sizes whose rows are multiples of 16 bytes, other values, or a kernel without tensor maps",
    ),
    Limit(
        "launches",
        lambda demand, device: (demand.launch_count >= 1) & (demand.launch_count <= MAX_LAUNCHES),
        lambda demand, device: (
            "no step is launched" if demand.launch_count < 1 else f"more than {MAX_LAUNCHES:,} launches"
        ),
        _conditions_of_steps,
        applies=lambda spec: not all(step.is_always_once for step in spec.steps),
        hint="change the conditions of the steps or their times",
    ),
    Limit(
        "scalars",
        lambda demand, device: reduce(
            operator.and_,
            [runs <= encoded(np.atleast_1d(value), DTYPES[dtype])[1] for _, dtype, value, runs in demand.scalars],
        ),
        lambda demand, device: next(
            filter(None, (bound_fault(name, value, dtype) for name, dtype, value, runs in demand.scalars if runs)), ""
        ),
        lambda spec: (*_conditions_of_steps(spec), *_of_arguments(spec)),
        applies=lambda spec: any(scalar.is_per_launch for scalar in spec.bound_scalars),
        hint="choose smaller sizes, or declare a larger type",
    ),
    _launch_limit(
        "threads_per_block",
        lambda demand, device: demand.threads <= device.max_threads_per_block,
        lambda demand, device: (
            f"{extents_text(demand.block)} threads in a block, {device.name} allows {device.max_threads_per_block:,}"
        ),
        parts=("block",),
    ),
    _dimensions_limit("block", "threads"),
    _dimensions_limit("grid", "blocks"),
    _launch_limit(
        "cluster",
        _cluster_fits,
        lambda demand, device: (
            f"clusters of {extents_text(demand.cluster)} blocks"
            + (
                f", but {device.name} has none: they need compute capability 9.0"
                if _max_cluster_blocks(device) == 1
                else f" in a grid of {extents_text(demand.grid)} blocks, expected 1 to {_MAX_CLUSTER_BLOCKS} that "
                "divide the grid along each dimension"
            )
        ),
        parts=("grid", "cluster"),
        applies=lambda spec: any(step.launch.cluster for step in spec.steps),
        hint="choose other values or sizes",
    ),
    _launch_limit(
        "registers",
        lambda demand, device: (
            (demand.registers <= device.registers_per_block // clipped(demand.threads, 1, CLIP**3))
            & (demand.registers <= device.max_registers_per_thread)
        ),
        lambda demand, device: (
            f"at least {plural(demand.registers, 'register')} per thread for {plural(demand.threads, 'thread')}, "
            f"{device.name} allows {device.max_registers_per_thread:,} per thread and "
            f"{device.registers_per_block:,} per block"
        ),
        parts=("block", "min_registers"),
    ),
    _launch_limit(
        "shared_memory",
        lambda demand, device: (
            (demand.static_smem_bytes >= 0)
            & (demand.dynamic_smem_bytes >= 0)
            & (demand.static_smem_bytes <= device.smem_per_block_bytes)
            & (demand.smem_bytes <= device.smem_per_block_optin_bytes)
        ),
        lambda demand, device: (
            f"{demand.static_smem_bytes:,} bytes static and {demand.dynamic_smem_bytes:,} "
            f"dynamic, {device.name} allows {device.smem_per_block_bytes:,} static, "
            f"{device.smem_per_block_optin_bytes:,} together"
        ),
        parts=_SMEM,
    ),
    _launch_limit("occupancy", _occupancy_fits, _explain_occupancy, parts=_RESIDENT),
    _launch_limit(
        "cooperative",
        lambda demand, device: (
            not demand.step.launch.is_cooperative
            or _product(demand.grid) <= demand.blocks_per_sm(device) * device.sm_count
        ),
        lambda demand, device: _too_many_blocks(
            _product(demand.grid), demand.blocks_per_sm(device) * device.sm_count, device
        ),
        parts=("grid", *_RESIDENT),
        applies=lambda spec: any(step.launch.is_cooperative for step in spec.steps),
        hint="let each block do more, and compute the grid from device.sm_count",
    ),
)
"""All limits, in the order applied."""


def unfit_scalar(spec: KernelSpec, dtype: str, names: Values) -> str:
    """Return why a scalar that the problem binds does not fit in its type, as one line; "" if all fit."""
    faults = (
        bound_fault(scalar.name, int(scalar.binding.value(names)), scalar.element_type(dtype))
        for scalar in spec.bound_scalars
        if scalar.binding is not None and not scalar.is_per_launch
    )
    return next(filter(None, faults), "")


def check_config(spec: KernelSpec, config: Config, problem: Problem, device: DeviceProperties) -> str:
    """Return why a configuration is not feasible, as one line; "" if it is."""
    if reason := unsupported_reason(spec, device):
        return reason
    fixed = fixed_names(spec, problem, device)
    if reason := unfit_scalar(spec, problem.dtype, fixed):
        return reason
    known = {parameter.name: parameter.values for parameter in spec.parameters}
    computed = {each.name for each in spec.computed}
    for name in config:
        if name not in known and name not in computed:
            return f"{name} is not a parameter of {spec.name}{nearest(name, known)}"
    for name, values in known.items():
        if name not in config:
            return f"the parameter {name} is missing"
        if config[name] not in values:
            return f"{name} = {config[name]} is not among its values {', '.join(map(str, values))}"
    names = {**fixed, **config, **computed_values(spec.computed, config)}
    for rule in spec.rules:
        if not rule.expression.value(names):
            shown = ", ".join(f"{name} = {names[name]}" for name in sorted(rule.expression.names))
            return f"the {rule} is broken: {rule.expression.text}, where {shown}"
    return limit_violation(demand_of(spec, names, problem), device)


def meets_heuristics(spec: KernelSpec, config: Config, problem: Problem, device: DeviceProperties) -> bool:
    """Return True if a configuration meets the heuristics, so that a search tries it if it is feasible."""
    names = known_names(spec, config, problem, device)
    return all(rule.expression.value(names) for rule in spec.heuristics)


def compiled_occupancy(geometry: LaunchGeometry, resources: Resources, device: DeviceProperties) -> Occupancy:
    """Calculate the occupancy from the compiled resources."""
    smem_bytes = resources.static_smem_bytes + geometry.dynamic_smem_bytes
    return occupancy(geometry.threads, resources.registers, smem_bytes, device)


class CompiledStep(NamedTuple):
    """A step of a configuration after compilation."""

    entry: str
    geometry: LaunchGeometry
    """That of its launch with the most shared memory."""
    resources: Resources
    occupancy: Occupancy
    fault: str
    """Reason why it must not be launched, as one line; "" if it may."""


def compiled_steps(
    spec: KernelSpec, plan: LaunchPlan, functions: Mapping[str, CompiledFunction], device: DeviceProperties
) -> list[CompiledStep]:
    """Return each step that a configuration launches, the main one first; ``functions`` are by the entries."""
    launches = {**plan.steps, plan.main.step: plan.main}
    found = []
    for step in sorted(launches, key=lambda step: step != plan.main.step):
        entry, geometry = spec.steps[step].entry, launches[step].geometry
        function, declared = functions[entry], launches[step].cluster
        used, cluster = function.resources, function.cluster
        occupancy = compiled_occupancy(geometry, used, device)
        fault = resource_violation(spec, geometry, used, device)
        if not fault and function.max_threads is not None and geometry.threads > function.max_threads:
            fault = f"a block of {geometry.threads} threads, but its __launch_bounds__ are {function.max_threads}"
        if not fault and cluster is not None and declared not in (None, cluster):
            fault = f"clusters of {declared} blocks are declared, but its __cluster_dims__ are {cluster}"
        elif not fault and cluster is not None and any(map(operator.mod, geometry.grid, cluster)):
            fault = f"a grid of {geometry.grid} blocks, which its __cluster_dims__ of {cluster} do not divide"
        resident = occupancy.blocks_per_sm * device.sm_count
        if not fault and launches[step].is_cooperative and geometry.blocks > resident:
            fault = _too_many_blocks(geometry.blocks, resident, device)
        of = f"{entry}: " if fault and len(spec.steps) > 1 else ""
        found.append(CompiledStep(entry, geometry, used, occupancy, of + fault))
    return found


def resource_violation(
    spec: KernelSpec, geometry: LaunchGeometry, resources: Resources, device: DeviceProperties
) -> str:
    """Return why a compiled candidate must not be launched, as one line; "" if it may."""
    found = compiled_occupancy(geometry, resources, device)
    if found.blocks_per_sm == 0:
        smem_bytes = resources.static_smem_bytes + geometry.dynamic_smem_bytes
        needs = f"{geometry.threads} threads, {resources.registers} registers per thread"
        return _no_block_fits(f"{needs}, {smem_bytes} bytes of shared memory", found, device)
    if spec.max_spill_bytes is not None and resources.spill_bytes > spec.max_spill_bytes:
        return f"spills {resources.spill_bytes} bytes, over max_spill_bytes = {spec.max_spill_bytes}"
    return _low_occupancy("occupancy ", found, spec) if found.occupancy < spec.min_occupancy else ""


def passes_otherwise(spec: KernelSpec, trial: Trial) -> bool:
    """Return True if the limits of the file have changed since a trial, and decide otherwise about it."""
    if trial.outcome is Outcome.RESOURCE_EXCEEDED:
        now = {"max_spill_bytes": str(spec.max_spill_bytes), "min_occupancy": f"{spec.min_occupancy:g}"}
        stated = re.findall(rf"\b({'|'.join(now)}) = ([\w.-]+)", trial.reason)  # of `resource_violation`
        return any(now[name] != value for name, value in stated)
    spilled = trial.resources.spill_bytes if trial.resources is not None else 0
    reached = trial.occupancy.occupancy if trial.occupancy is not None else 1.0
    spills = spec.max_spill_bytes is not None and spilled > spec.max_spill_bytes
    return trial.outcome.has_time and (spills or reached < spec.min_occupancy)
