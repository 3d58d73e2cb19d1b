"""Demands of configurations on a device, as columns with one row per configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial, reduce
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from autotile.core.device import DeviceProperties
from autotile.core.frozen import cached_property, dataclass
from autotile.core.model import Value
from autotile.kernel.argument_kind import Evaluate
from autotile.kernel.arguments import MemoryDemand
from autotile.kernel.descriptors import TensorMapDemand
from autotile.kernel.expressions import Expression
from autotile.kernel.launch import MAX_LAUNCHES
from autotile.kernel.spec import STEP, KernelSpec, Step
from autotile.space.occupancy import max_blocks_per_sm

Column = NDArray[np.int64]
Mask = NDArray[np.bool_]


class EvaluateWhere(Protocol):
    """Evaluates an expression for some rows of a table of configurations."""

    def __call__(self, expression: Expression, extra: Mapping[str, Value], rows: Mask) -> Column:
        """Return an int64 column, 1 in other rows.

        Parameters
        ----------
        expression
            Expression over parameters, sizes, flags, ``device.*`` and the names in ``extra``.
        extra
            Values of further names.
        rows
            Rows in which it is evaluated, shape (rows,), or shape (1,) for all or none.
        """


CLIP = 2**20
"""Above every limit of a block; factors are clipped to it so that their products fit in 64 bits."""

_CLIP_BYTES = 2**40
"""Above every limit of shared memory."""


@dataclass(frozen=True)
class LaunchDemand:
    """Resources that one launch needs: int64 columns with one row per configuration.

    A column with a single element applies to every configuration.
    """

    entry: str
    """Name of the function."""
    runs: Mask
    """Whether the configuration makes this launch."""
    block: tuple[Column, ...]
    grid: tuple[Column, ...]
    cluster: tuple[Column, ...]
    """Blocks per cluster; empty if the function has no clusters."""
    static_smem_bytes: Column
    dynamic_smem_bytes: Column
    registers: Column
    """Minimum registers per thread; 0 if not declared."""
    is_cooperative: bool = False
    """Whether all blocks must be resident at once."""

    @classmethod
    def of(cls, step: Step, runs: Mask, evaluate: Evaluate) -> LaunchDemand:
        """Evaluate a launch of a step."""
        launch = step.launch
        block = tuple(evaluate(expression) for expression in launch.block)

        def optional(expression: Expression | None) -> Column:
            return evaluate(expression) if expression is not None else np.zeros_like(block[0])

        return cls(
            entry=step.entry,
            runs=runs,
            block=block,
            grid=tuple(evaluate(expression) for expression in launch.grid),
            cluster=tuple(evaluate(expression) for expression in launch.cluster),
            static_smem_bytes=optional(launch.static_smem_bytes),
            dynamic_smem_bytes=optional(launch.dynamic_smem_bytes),
            registers=optional(launch.min_registers),
            is_cooperative=launch.is_cooperative,
        )

    @cached_property
    def threads(self) -> Column:
        """Threads per block."""
        return reduce(np.multiply, [np.clip(dimension, 0, CLIP) for dimension in self.block])

    @cached_property
    def smem_bytes(self) -> Column:
        """Static and dynamic shared memory per block, in bytes."""
        return np.clip(self.static_smem_bytes, 0, _CLIP_BYTES) + np.clip(self.dynamic_smem_bytes, 0, _CLIP_BYTES)

    def blocks_per_sm(self, device: DeviceProperties) -> Column:
        """Return the resident blocks per SM; 0 where a block cannot run."""
        return max_blocks_per_sm(self.threads, np.clip(self.registers, 0, CLIP), self.smem_bytes, device)

    def occupancy(self, device: DeviceProperties) -> NDArray[np.float64]:
        """Return the resident warps as a fraction of the SM's maximum."""
        warps = -(-self.threads // device.warp_size)
        return self.blocks_per_sm(device) * warps / device.max_warps_per_sm


@dataclass(frozen=True)
class Demand:
    """Demands of configurations: int64 columns with one row per configuration, or one element for all."""

    launch_count: Column
    """Launches of a call."""
    launches: tuple[LaunchDemand, ...]
    """One of each step; all launches of a step whose expressions depend on ``step``."""
    memory: tuple[MemoryDemand, ...]
    """Device memory of buffers and workspaces."""
    tensor_maps: tuple[TensorMapDemand, ...]

    @classmethod
    def of(cls, spec: KernelSpec, sizes: Mapping[str, int], dtype: str, evaluate: EvaluateWhere) -> Demand:
        """Evaluate the launches and the arguments of a kernel.

        Parameters
        ----------
        spec, sizes, dtype
            The problem.
        evaluate
            Function that evaluates an expression.
        """
        counts = [_repetitions(step, evaluate) for step in spec.steps]
        launch_count = reduce(np.add, counts)
        plain = partial(evaluate, extra={}, rows=_ALL)
        memory = [argument.memory_demand(dtype, sizes, plain) for argument in spec.arguments]
        tensor_maps = [argument.tensor_map_demand(dtype, sizes, plain) for argument in spec.arguments]
        return cls(
            launch_count=launch_count,
            launches=tuple(
                LaunchDemand.of(step, runs, partial(evaluate, extra={STEP: number}, rows=runs))
                for step, count in zip(spec.steps, counts, strict=True)
                for number, runs in _distinct_launches(step, np.where(launch_count <= MAX_LAUNCHES, count, 0))
            ),
            memory=tuple(filter(None, memory)),
            tensor_maps=tuple(filter(None, tensor_maps)),
        )

    @cached_property
    def memory_bytes(self) -> NDArray[np.float64]:
        """Device memory of all arguments; float64, as products of absurd sizes exceed 64 bits."""
        return reduce(np.add, [demand.size_bytes for demand in self.memory], np.zeros(1))


_ALL = np.ones(1, np.bool_)


def _repetitions(step: Step, evaluate: EvaluateWhere) -> Column:
    """Return the number of launches of a step, clipped to 0 and just above the limit."""
    runs = _ALL if step.when is None else evaluate(step.when, extra={}, rows=_ALL) != 0
    count = np.ones(1, np.int64) if step.times is None else evaluate(step.times, extra={}, rows=runs)
    clipped: Column = np.where(runs, np.clip(count, 0, MAX_LAUNCHES + 1), 0)
    return clipped


def _distinct_launches(step: Step, count: Column) -> Iterator[tuple[int, Mask]]:
    """Yield the number of each launch of a step that can differ from those before it, and the rows that make it."""
    launch = step.launch
    parts = (*launch.block, *launch.grid, *launch.cluster, launch.dynamic_smem_bytes, launch.static_smem_bytes)
    varies = any(part is not None and STEP in part.names for part in (*parts, launch.min_registers))
    for number in range(int(count.max(initial=0)) if varies else 1):
        yield number, number < count


def demand_of(spec: KernelSpec, names: Mapping[str, Value], sizes: Mapping[str, int], dtype: str) -> Demand:
    """Return the demand of a single configuration, given the value of every name."""

    def evaluate(expression: Expression, extra: Mapping[str, Value], rows: Mask) -> Column:
        return np.array([int(expression.evaluate({**extra, **names})) if rows[0] else 1])

    return Demand.of(spec, sizes, dtype, evaluate)
