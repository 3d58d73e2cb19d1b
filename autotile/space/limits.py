"""The gates before and after compilation: the demands of a launch against the limits of the device.

Each limit is a function over columns of configurations, which filters a space and, applied to a single row, explains
why a configuration is not feasible. Sources: "Technical Specifications per Compute Capability" in the CUDA C++
Programming Guide for threads, dimensions, registers and shared memory; `autotile.space.occupancy` for occupancy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from autotile.core.device import DeviceProperties
from autotile.core.frozen import cached_property, dataclass
from autotile.core.model import Config, LaunchGeometry, Occupancy, Resources, Value
from autotile.errors import nearest
from autotile.kernel.arguments import MemoryDemand
from autotile.kernel.expressions import Expression
from autotile.kernel.launch import known_names
from autotile.kernel.problem import CLUSTER_CAPABILITY, is_below, unsupported_reason
from autotile.kernel.spec import KernelSpec, Limits
from autotile.kernel.tensor_maps import TensorMapDemand
from autotile.space.occupancy import max_blocks_per_sm, occupancy

Column = NDArray[np.int64]
Mask = NDArray[np.bool_]

_CLIP = 2**20
"""Above every limit of a block; factors are clipped to it so that their products fit in 64 bits."""

_CLIP_BYTES = 2**40
"""Above every limit of shared memory."""

_MAX_CLUSTER_BLOCKS = 8
"""Portable maximum of blocks per cluster: CUDA C++ Programming Guide, thread block clusters."""


@dataclass(frozen=True)
class Demand:
    """Resources that configurations need: int64 columns with one row per configuration.

    A column with a single element applies to every configuration.
    """

    block: tuple[Column, ...]
    grid: tuple[Column, ...]
    cluster: tuple[Column, ...]
    """Blocks per cluster; empty if the kernel has no clusters."""
    static_smem_bytes: Column
    dynamic_smem_bytes: Column
    registers: Column
    """Minimum registers per thread; 0 if not declared."""
    memory: tuple[MemoryDemand, ...]
    """Device memory of buffers and workspaces."""
    tensor_maps: tuple[TensorMapDemand, ...]

    @classmethod
    def of(
        cls, spec: KernelSpec, sizes: Mapping[str, int], dtype: str, evaluate: Callable[[Expression], Column]
    ) -> Demand:
        """Evaluate the launch and the arguments of a kernel.

        Parameters
        ----------
        spec, sizes, dtype
            The problem.
        evaluate
            Function that evaluates an expression for every row.
        """
        launch = spec.launch
        block = tuple(evaluate(expression) for expression in launch.block)

        def optional(expression: Expression | None) -> Column:
            return evaluate(expression) if expression is not None else np.zeros_like(block[0])

        memory = [argument.memory_demand(dtype, sizes, evaluate) for argument in spec.arguments]
        tensor_maps = [argument.tensor_map_demand(dtype, sizes, evaluate) for argument in spec.arguments]
        return cls(
            block=block,
            grid=tuple(evaluate(expression) for expression in launch.grid),
            cluster=tuple(evaluate(expression) for expression in launch.cluster),
            static_smem_bytes=optional(launch.static_smem_bytes),
            dynamic_smem_bytes=optional(launch.dynamic_smem_bytes),
            registers=optional(launch.min_registers),
            memory=tuple(filter(None, memory)),
            tensor_maps=tuple(filter(None, tensor_maps)),
        )

    @cached_property
    def threads(self) -> Column:
        """Threads per block."""
        return reduce(np.multiply, [np.clip(dimension, 0, _CLIP) for dimension in self.block])

    @cached_property
    def memory_bytes(self) -> NDArray[np.float64]:
        """Device memory of all arguments; float64, as products of absurd sizes exceed 64 bits."""
        return reduce(np.add, [demand.size_bytes for demand in self.memory], np.zeros(1))

    @cached_property
    def smem_bytes(self) -> Column:
        """Static and dynamic shared memory per block, in bytes."""
        return np.clip(self.static_smem_bytes, 0, _CLIP_BYTES) + np.clip(self.dynamic_smem_bytes, 0, _CLIP_BYTES)

    def blocks_per_sm(self, device: DeviceProperties) -> Column:
        """Return the resident blocks per SM; 0 where a block cannot run."""
        return max_blocks_per_sm(self.threads, np.clip(self.registers, 0, _CLIP), self.smem_bytes, device)

    def occupancy(self, device: DeviceProperties) -> NDArray[np.float64]:
        """Return the resident warps as a fraction of the SM's maximum."""
        warps = -(-self.threads // device.warp_size)
        return self.blocks_per_sm(device) * warps / device.max_warps_per_sm


@dataclass(frozen=True, slots=True)
class Limit:
    """A named limit: the rows that meet it, and an explanation for a first row that does not, in one line."""

    name: str
    fits: Callable[[Demand, DeviceProperties, KernelSpec], Mask]
    explain: Callable[[Demand, DeviceProperties, KernelSpec], str]
    applies: Callable[[KernelSpec], bool] = lambda spec: True
    """Whether the limit applies to a kernel."""
    hint: str = "add smaller values"
    """Remedy if no configuration meets it."""


def limits_of(spec: KernelSpec) -> tuple[Limit, ...]:
    """Return the limits that apply to a kernel, in the order applied."""
    return tuple(limit for limit in LIMITS if limit.applies(spec))


def limit_violation(demand: Demand, device: DeviceProperties, spec: KernelSpec) -> str:
    """Return an explanation of the first limit that a single configuration violates; "" if it violates none."""
    for limit in limits_of(spec):
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
        f"at least {_text(demand.registers)} registers per thread for {_text(demand.threads)} threads, {device.name} "
        f"allows {device.max_registers_per_thread:,} per thread and {device.registers_per_block:,} per block"
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
    found = demand.occupancy(device)
    return (found > 0) & (found >= spec.limits.min_occupancy)


def _explain_occupancy(demand: Demand, device: DeviceProperties, spec: KernelSpec) -> str:
    registers = np.clip(demand.registers, 0, _CLIP)
    found = occupancy(_first(demand.threads), _first(registers), _first(demand.smem_bytes), device)
    binding = ", ".join(found.limited_by)
    if found.blocks_per_sm == 0:
        return (
            f"no block fits on an SM of {device.name}: {_text(demand.threads)} threads, at least "
            f"{_text(demand.registers)} registers per thread, {_text(demand.smem_bytes)} bytes of shared memory; "
            f"limited by {binding}"
        )
    return f"{found.occupancy:.3f} is under min_occupancy = {spec.limits.min_occupancy:g}; limited by {binding}"


def _memory_fits(demand: Demand, device: DeviceProperties, spec: KernelSpec) -> Mask:
    possible = [extent >= 0 for memory in demand.memory if memory.is_workspace for extent in memory.shape]
    return reduce(np.logical_and, possible, demand.memory_bytes <= device.memory_bytes)


def _explain_memory(demand: Demand, device: DeviceProperties, spec: KernelSpec) -> str:
    workspaces = [memory for memory in demand.memory if memory.is_workspace]
    for workspace in workspaces:
        if any(_first(extent) < 0 for extent in workspace.shape):
            return f"the workspace {workspace.name} would have the shape {_by(workspace.shape)}"
    needed, available = demand.memory_bytes[0] / 2**30, device.memory_bytes / 2**30
    what = "arrays and workspaces" if workspaces else "arrays"
    return f"its {what} take {needed:,.1f} GiB, {device.name} has {available:,.1f} GiB"


def _cluster_fits(demand: Demand, device: DeviceProperties, spec: KernelSpec) -> Mask:
    blocks = reduce(np.multiply, [np.clip(dimension, 0, _CLIP) for dimension in demand.cluster])
    fits = (blocks >= 1) & (blocks <= _max_cluster_blocks(device))
    grid = [*demand.grid, *[np.ones_like(blocks)] * len(demand.cluster)]
    whole = [blocks_along % np.maximum(side, 1) == 0 for blocks_along, side in zip(grid, demand.cluster, strict=False)]
    return reduce(np.logical_and, whole, fits)


def _explain_cluster(demand: Demand, device: DeviceProperties, spec: KernelSpec) -> str:
    if _max_cluster_blocks(device) == 1:
        return f"clusters of {_by(demand.cluster)} blocks, but {device.name} has none: they need compute capability 9.0"
    return (
        f"clusters of {_by(demand.cluster)} blocks in a grid of {_by(demand.grid)} blocks, expected 1 to "
        f"{_MAX_CLUSTER_BLOCKS} that divide the grid along each dimension"
    )


def _max_cluster_blocks(device: DeviceProperties) -> int:
    return 1 if is_below(device.compute_capability, CLUSTER_CAPABILITY) else _MAX_CLUSTER_BLOCKS


def _tensor_maps_fit(demand: Demand, device: DeviceProperties, spec: KernelSpec) -> Mask:
    return reduce(np.logical_and, [tensor_map.fits() for tensor_map in demand.tensor_maps])


def _explain_tensor_maps(demand: Demand, device: DeviceProperties, spec: KernelSpec) -> str:
    return next(filter(None, (tensor_map.explain() for tensor_map in demand.tensor_maps)), "")


LIMITS = (
    Limit("memory", _memory_fits, _explain_memory, hint="choose smaller sizes"),
    Limit(
        "tensor_maps",
        _tensor_maps_fit,
        _explain_tensor_maps,
        applies=lambda spec: bool(spec.tensor_maps),
        hint="choose sizes whose rows are multiples of 16 bytes, other values, or a kernel without tensor maps",
    ),
    Limit("threads_per_block", _threads_fit, _explain_threads),
    Limit("block_dims", _block_fits, _explain_block),
    Limit("grid_dims", _grid_fits, _explain_grid),
    Limit(
        "cluster",
        _cluster_fits,
        _explain_cluster,
        applies=lambda spec: bool(spec.launch.cluster),
        hint="choose other values or sizes",
    ),
    Limit("registers", _registers_fit, _explain_registers),
    Limit("shared_memory", _smem_fits, _explain_smem),
    Limit("occupancy", _occupancy_fits, _explain_occupancy),
)
"""All limits, in the order applied."""


def _within(dimensions: tuple[Column, ...], maxima: tuple[int, ...]) -> Mask:
    pairs = zip(dimensions, maxima, strict=False)
    return reduce(np.logical_and, [(dimension >= 1) & (dimension <= limit) for dimension, limit in pairs])


def _by(dimensions: tuple[Column, ...] | tuple[int, ...]) -> str:
    return " x ".join(_text(dimension) for dimension in dimensions)


def _text(value: Column | int) -> str:
    return f"{_first(value):,}"


def _first(value: Column | int) -> int:
    return int(np.ravel(value)[0])


def check_config(
    spec: KernelSpec, config: Config, sizes: Mapping[str, int], device: DeviceProperties, dtype: str | None = None
) -> str:
    """Return why a configuration is not feasible, as one line; "" if it is.

    Parameters
    ----------
    spec, sizes, device, dtype
        See `autotile.space.search_space.feasible_space`.
    config
        Value of each parameter.

    Raises
    ------
    SpecError
        An expression has no value for this configuration.
    ProblemError
        A size is missing.
    """
    reason = unsupported_reason(spec, device) or _domain_violation(spec, config)
    if reason:
        return reason
    names = known_names(spec, config, sizes, device)
    for rule in spec.rules:
        if not rule.expression.evaluate(names):
            values = ", ".join(f"{name} = {names[name]}" for name in sorted(rule.expression.names))
            return f"the {rule} is broken: {rule.expression.text}, where {values}"
    return limit_violation(demand_of(spec, names, sizes, dtype or spec.dtypes[0]), device, spec)


def meets_heuristics(spec: KernelSpec, config: Config, sizes: Mapping[str, int], device: DeviceProperties) -> bool:
    """Return whether a configuration meets the heuristics, so that a search tries it if it is feasible.

    Raises
    ------
    SpecError, ProblemError
        As in `check_config`.
    """
    names = known_names(spec, config, sizes, device)
    return all(rule.expression.evaluate(names) for rule in spec.heuristics)


def demand_of(spec: KernelSpec, names: Mapping[str, Value], sizes: Mapping[str, int], dtype: str) -> Demand:
    """Return the demand of a single configuration, given the value of every name."""
    return Demand.of(spec, sizes, dtype, lambda expression: np.array([int(expression.evaluate(names))]))


def _domain_violation(spec: KernelSpec, config: Config) -> str:
    known = {parameter.name: parameter.values for parameter in spec.parameters}
    computed = {each.name for each in spec.computed}
    for name in config:
        if name not in known and name not in computed:
            return f"{name} is not a parameter of {spec.name}{nearest(name, known)}"
    for name, values in known.items():
        if name not in config:
            return f"the parameter {name} is missing"
        value = config[name]
        if not any(value == other and isinstance(value, str) == isinstance(other, str) for other in values):
            return f"{name} = {value} is not among its values {', '.join(map(str, values))}"
    return ""


def compiled_occupancy(geometry: LaunchGeometry, resources: Resources, device: DeviceProperties) -> Occupancy:
    """Calculate the occupancy from the compiled resources."""
    smem_bytes = resources.static_smem_bytes + geometry.dynamic_smem_bytes
    return occupancy(geometry.threads, resources.registers, smem_bytes, device)


def resource_violation(
    limits: Limits, geometry: LaunchGeometry, resources: Resources, found: Occupancy, device: DeviceProperties
) -> str:
    """Return why a compiled candidate must not be launched, as one line; "" if it may.

    Parameters
    ----------
    limits
        Limits that the author sets.
    geometry, resources, found
        Geometry, resources and `compiled_occupancy` of the candidate.
    device
        Device that would run it.
    """
    if found.blocks_per_sm == 0:
        smem_bytes = resources.static_smem_bytes + geometry.dynamic_smem_bytes
        return (
            f"no block fits on an SM of {device.name}: {geometry.threads} threads, {resources.registers} registers "
            f"per thread, {smem_bytes} bytes of shared memory; limited by {', '.join(found.limited_by)}"
        )
    if limits.max_spill_bytes is not None and resources.spill_bytes > limits.max_spill_bytes:
        return f"spills {resources.spill_bytes} bytes, over max_spill_bytes = {limits.max_spill_bytes}"
    if found.occupancy < limits.min_occupancy:
        return (
            f"occupancy {found.occupancy:.3f} is under min_occupancy = {limits.min_occupancy:g}; "
            f"limited by {', '.join(found.limited_by)}"
        )
    return ""
