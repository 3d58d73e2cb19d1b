"""The gates before and after compiling: the demands of a launch against the limits of the device.

Every limit is one function over columns of configurations, so that one rule both narrows a space and, on a single row,
explains why a configuration does not fit. Sources: "Technical Specifications per Compute Capability" in the CUDA C++
Programming Guide for threads, dimensions, registers and shared memory; `autotile.ground.occupancy` for residency.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, reduce

import numpy as np
from numpy.typing import NDArray

from autotile.core.device import DeviceProperties
from autotile.core.frozen import dataclass
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

_FAR = 2**20
"""Beyond every limit of a block; factors are cut off here so that their products stay within 64 bits."""

_FAR_BYTES = 2**40
"""Beyond every limit of shared memory."""

_MAX_CLUSTER_BLOCKS = 8
"""Blocks of a cluster that every device with clusters takes: CUDA C++ Programming Guide, thread block clusters."""


@dataclass(frozen=True)
class Demand:
    """What configurations ask of a device: columns of whole numbers (int64), one row a configuration.

    A column of a single element holds for every configuration.
    """

    block: tuple[Column, ...]
    grid: tuple[Column, ...]
    cluster: tuple[Column, ...]
    """Blocks of a cluster; empty where there are none."""
    static_smem_bytes: Column
    dynamic_smem_bytes: Column
    registers: Column
    """Least registers a thread; 0 where the file says nothing."""
    memory: tuple[MemoryDemand, ...]
    """Device memory of each argument that occupies any."""
    tensor_maps: tuple[TensorMapDemand, ...]

    @classmethod
    def of(
        cls, spec: KernelSpec, sizes: Mapping[str, int], dtype: str, evaluate: Callable[[Expression], Column]
    ) -> Demand:
        """Evaluate a kernel's launch and arguments.

        Parameters
        ----------
        spec, sizes, dtype
            The problem.
        evaluate
            How an expression is evaluated for every row.
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
        """Threads in a block."""
        return reduce(np.multiply, [np.clip(dimension, 0, _FAR) for dimension in self.block])

    @cached_property
    def memory_bytes(self) -> NDArray[np.float64]:
        """Device memory of all arguments; float64, as products of absurd sizes exceed 64 bits."""
        return reduce(np.add, [demand.size_bytes for demand in self.memory], np.zeros(1))

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
    applies: Callable[[KernelSpec], bool] = lambda spec: True
    """Whether the kernel has what the limit is about."""
    cure: str = "add smaller values"
    """What to do where no configuration fits."""


def limits_of(spec: KernelSpec) -> tuple[Limit, ...]:
    """The limits that a kernel may break, in the order applied."""
    return tuple(limit for limit in LIMITS if limit.applies(spec))


def broken_limit(demand: Demand, device: DeviceProperties, spec: KernelSpec) -> str:
    """Explain the first limit that a single configuration breaks; "" where it breaks none."""
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


def _memory_fits(demand: Demand, device: DeviceProperties, spec: KernelSpec) -> Mask:
    possible = [extent >= 0 for memory in demand.memory if memory.is_workspace for extent in memory.shape]
    return reduce(np.logical_and, possible, demand.memory_bytes <= device.memory_bytes)


def _explain_memory(demand: Demand, device: DeviceProperties, spec: KernelSpec) -> str:
    workspaces = [memory for memory in demand.memory if memory.is_workspace]
    for workspace in workspaces:
        if any(_first(extent) < 0 for extent in workspace.shape):
            return f"the workspace {workspace.name} would have the shape {_by(workspace.shape)}"
    needed, present = demand.memory_bytes[0] / 2**30, device.memory_bytes / 2**30
    what = "arrays and workspaces" if workspaces else "arrays"
    return f"its {what} take {needed:,.1f} GiB, {device.name} has {present:,.1f} GiB"


def _cluster_fits(demand: Demand, device: DeviceProperties, spec: KernelSpec) -> Mask:
    blocks = reduce(np.multiply, [np.clip(dimension, 0, _FAR) for dimension in demand.cluster])
    fits = (blocks >= 1) & (blocks <= _most_in_cluster(device))
    grid = [*demand.grid, *[np.ones_like(blocks)] * len(demand.cluster)]
    whole = [blocks_along % np.maximum(side, 1) == 0 for blocks_along, side in zip(grid, demand.cluster, strict=False)]
    return reduce(np.logical_and, whole, fits)


def _explain_cluster(demand: Demand, device: DeviceProperties, spec: KernelSpec) -> str:
    if _most_in_cluster(device) == 1:
        return f"clusters of {_by(demand.cluster)} blocks, but {device.name} has none: they came with 9.0"
    return (
        f"clusters of {_by(demand.cluster)} blocks in a grid of {_by(demand.grid)} blocks, expected 1 to "
        f"{_MAX_CLUSTER_BLOCKS} that divide the grid along each dimension"
    )


def _most_in_cluster(device: DeviceProperties) -> int:
    return 1 if is_below(device.compute_capability, CLUSTER_CAPABILITY) else _MAX_CLUSTER_BLOCKS


def _tensor_maps_fit(demand: Demand, device: DeviceProperties, spec: KernelSpec) -> Mask:
    return reduce(np.logical_and, [tensor_map.fits() for tensor_map in demand.tensor_maps])


def _explain_tensor_maps(demand: Demand, device: DeviceProperties, spec: KernelSpec) -> str:
    return next(filter(None, (tensor_map.explain() for tensor_map in demand.tensor_maps)), "")


LIMITS = (
    Limit("memory", _memory_fits, _explain_memory, cure="choose smaller sizes"),
    Limit(
        "tensor_maps",
        _tensor_maps_fit,
        _explain_tensor_maps,
        applies=lambda spec: bool(spec.tensor_maps),
        cure="choose sizes whose rows are whole 16 bytes, other values, or a kernel without tensor maps",
    ),
    Limit("threads_per_block", _threads_fit, _explain_threads),
    Limit("block_dims", _block_fits, _explain_block),
    Limit("grid_dims", _grid_fits, _explain_grid),
    Limit(
        "cluster",
        _cluster_fits,
        _explain_cluster,
        applies=lambda spec: bool(spec.launch.cluster),
        cure="choose other values or sizes",
    ),
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


def check_config(
    spec: KernelSpec, config: Config, sizes: Mapping[str, int], device: DeviceProperties, dtype: str | None = None
) -> str:
    """Say in one line why a configuration is not feasible; "" where it is.

    Parameters
    ----------
    spec, sizes, device, dtype
        As for `autotile.space.search_space.feasible_space`.
    config
        A value for each parameter.

    Raises
    ------
    SpecError
        An expression has no value for this configuration.
    ProblemError
        A size is missing.
    """
    stranger = unsupported_reason(spec, device) or _not_in_domains(spec, config)
    if stranger:
        return stranger
    names = known_names(spec, config, sizes, device)
    for rule in spec.rules:
        if not rule.expression.evaluate(names):
            figures = ", ".join(f"{name} = {names[name]}" for name in sorted(rule.expression.names))
            return f"the rule {rule.name!r} is broken: {rule.expression.text}, where {figures}"
    return broken_limit(demand_of(spec, names, sizes, dtype or spec.dtypes[0]), device, spec)


def meets_heuristics(spec: KernelSpec, config: Config, sizes: Mapping[str, int], device: DeviceProperties) -> bool:
    """Whether a search would try a feasible configuration: it meets the rules for the search alone.

    Raises
    ------
    SpecError, ProblemError
        As for `check_config`.
    """
    names = known_names(spec, config, sizes, device)
    return all(rule.expression.evaluate(names) for rule in spec.heuristics)


def demand_of(spec: KernelSpec, names: Mapping[str, Value], sizes: Mapping[str, int], dtype: str) -> Demand:
    """What a single configuration asks of a device, given the value of every name."""
    return Demand.of(spec, sizes, dtype, lambda expression: np.array([int(expression.evaluate(names))]))


def _not_in_domains(spec: KernelSpec, config: Config) -> str:
    known = {parameter.name: parameter.values for parameter in spec.parameters}
    for name in config:
        if name not in known:
            return f"{name} is not a parameter of {spec.name}{nearest(name, known)}"
    for name, values in known.items():
        if name not in config:
            return f"the parameter {name} is missing"
        value = config[name]
        if not any(value == other and isinstance(value, str) == isinstance(other, str) for other in values):
            return f"{name} = {value} is not among its values {', '.join(map(str, values))}"
    return ""


def compiled_occupancy(geometry: LaunchGeometry, resources: Resources, device: DeviceProperties) -> Occupancy:
    """Occupancy that the compiled resources give."""
    smem_bytes = resources.static_smem_bytes + geometry.dynamic_smem_bytes
    return occupancy(geometry.threads, resources.registers, smem_bytes, device)


def resource_violation(
    limits: Limits, geometry: LaunchGeometry, resources: Resources, found: Occupancy, device: DeviceProperties
) -> str:
    """Why a compiled candidate must not be launched, in one line; empty when it may.

    Parameters
    ----------
    limits
        What the author accepts.
    geometry, resources, found
        Of the candidate; ``found`` is its `compiled_occupancy`.
    device
        The device that would run it.
    """
    if found.blocks_per_sm == 0:
        smem_bytes = resources.static_smem_bytes + geometry.dynamic_smem_bytes
        return (
            f"no block fits on an SM of {device.name}: {geometry.threads} threads, {resources.registers} registers a "
            f"thread, {smem_bytes} bytes of shared memory; limited by {', '.join(found.limited_by)}"
        )
    if limits.max_spill_bytes is not None and resources.spill_bytes > limits.max_spill_bytes:
        return f"spills {resources.spill_bytes} bytes, over max_spill_bytes = {limits.max_spill_bytes}"
    if found.occupancy < limits.min_occupancy:
        return (
            f"occupancy {found.occupancy:.3f} is under min_occupancy = {limits.min_occupancy:g}; "
            f"limited by {', '.join(found.limited_by)}"
        )
    return ""
