"""Launch geometry, workspaces and tensor maps of one configuration.

Limits: ``cuTensorMapEncodeTiled`` in the CUDA driver API reference, for maps without interleaving.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from itertools import accumulate
from operator import mul

import numpy as np
from numpy.typing import NDArray

from autotile.core.device import EXPRESSION_NAMES, DeviceProperties
from autotile.core.dtypes import DTYPES
from autotile.core.frozen import dataclass
from autotile.core.model import Config, LaunchGeometry, Value
from autotile.errors import ConfigError, ProblemError
from autotile.kernel.expressions import Expression
from autotile.kernel.spec import KernelSpec, TensorMapArgument, WorkspaceArgument


def fixed_names(spec: KernelSpec, sizes: Mapping[str, int], device: DeviceProperties) -> dict[str, Value]:
    """Give the value of every name that no parameter decides: the sizes and ``device.*``.

    Raises
    ------
    ProblemError
        A size of the kernel is missing.
    """
    for name in spec.sizes:
        if name not in sizes:
            raise ProblemError(
                f"{spec.name}: the size {name} is missing; give {name}=..., a whole number of at least 1"
            )
    return {**sizes, **{f"device.{name}": getattr(device, name) for name in EXPRESSION_NAMES}}


def known_names(
    spec: KernelSpec, config: Config, sizes: Mapping[str, int], device: DeviceProperties
) -> dict[str, Value]:
    """Give the value of every name that an expression may use: sizes, flags, parameters and ``device.*``.

    Raises
    ------
    ProblemError
        A size of the kernel is missing.
    """
    return {**fixed_names(spec, sizes, device), **config}


def launch_geometry(
    spec: KernelSpec, config: Config, sizes: Mapping[str, int], device: DeviceProperties
) -> LaunchGeometry:
    """Evaluate a configuration's block, grid and dynamic shared memory.

    Dimensions that the file does not give are 1. Nothing is compared with the device's limits here.

    Raises
    ------
    ConfigError
        A dimension is below 1 or the shared memory below 0.
    SpecError
        An expression divides by zero or leaves 64 bits.
    """
    names = known_names(spec, config, sizes, device)
    geometry = LaunchGeometry(
        grid=_dimensions(spec.launch.grid, names),
        block=_dimensions(spec.launch.block, names),
        dynamic_smem_bytes=value_or_zero(spec.launch.dynamic_smem_bytes, names),
    )
    if min(*geometry.grid, *geometry.block) < 1 or geometry.dynamic_smem_bytes < 0:
        raise ConfigError(
            f"{spec.name}: the configuration gives the grid {geometry.grid}, the block {geometry.block} and "
            f"{geometry.dynamic_smem_bytes} bytes of dynamic shared memory; add a rule that excludes it"
        )
    return geometry


def value_or_zero(expression: Expression | None, names: Mapping[str, Value]) -> int:
    """Evaluate an optional expression to a whole number; absent means 0."""
    return int(expression.evaluate(names)) if expression is not None else 0


def _dimensions(expressions: Sequence[Expression], names: Mapping[str, Value]) -> tuple[int, int, int]:
    x, y, z = ([int(expression.evaluate(names)) for expression in expressions] + [1, 1])[:3]
    return x, y, z


Column = NDArray[np.int64]
Mask = NDArray[np.bool_]

MAX_RANK = 5
MAX_BOX = 256
MAX_ELEMENT_STRIDE = 8
MAX_EXTENT = 2**32
MAX_STRIDE_BYTES = 2**40
UNIT_BYTES = 16
"""Addresses, rows and the innermost side of a box come in multiples of this."""
SWIZZLES = (0, 32, 64, 128)
L2_PROMOTIONS = (0, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A tensor map but for its address: axes from the outermost to the innermost, extents and box in elements."""

    name: str
    buffer: str
    dtype: str
    shape: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle_bytes: int
    l2_promotion_bytes: int

    @classmethod
    def of(cls, argument: TensorMapArgument, spec: KernelSpec, dtype: str, names: Mapping[str, Value]) -> TensorMap:
        """Evaluate an argument for a problem's dtype and a value of every size, flag and parameter."""

        def value(expression: Expression) -> int:
            return int(expression.evaluate(names))

        sizes = {name: int(names[name]) for name in spec.sizes}
        buffer = spec.buffer(argument.buffer)
        return cls(
            argument.name,
            argument.buffer,
            buffer.element_type(dtype, sizes),
            buffer.extents(sizes),
            tuple(map(value, argument.box)),
            tuple(map(value, argument.element_strides)),
            value(argument.swizzle_bytes),
            value(argument.l2_promotion_bytes),
        )

    @property
    def is_absent(self) -> bool:
        """Whether the configuration has no use for the map: a side of its box is 0."""
        return 0 in self.box

    @property
    def strides_bytes(self) -> tuple[int, ...]:
        """Bytes from one element to the next along each axis but the innermost."""
        return strides_bytes(self.shape, DTYPES[self.dtype].size_bytes)


def strides_bytes(shape: tuple[int, ...], element_bytes: int) -> tuple[int, ...]:
    """Bytes between neighbours along each axis of a row-major array but the innermost."""
    return tuple(accumulate(reversed(shape[1:]), mul, initial=element_bytes))[:0:-1]


@dataclass(frozen=True, slots=True)
class TensorMapDemand:
    """One tensor map over columns of configurations, as in `autotile.space.limits.Demand`."""

    name: str
    buffer: str
    shape: tuple[int, ...]
    element_bytes: int
    box: tuple[Column, ...]
    element_strides: tuple[Column, ...]
    swizzle_bytes: Column
    l2_promotion_bytes: Column

    @classmethod
    def of(
        cls,
        argument: TensorMapArgument,
        spec: KernelSpec,
        dtype: str,
        sizes: Mapping[str, int],
        evaluate: Callable[[Expression], Column],
    ) -> TensorMapDemand:
        """Evaluate an argument, given how an expression is evaluated for every row."""
        buffer = spec.buffer(argument.buffer)
        return cls(
            argument.name,
            argument.buffer,
            buffer.extents(sizes),
            DTYPES[buffer.element_type(dtype, sizes)].size_bytes,
            tuple(map(evaluate, argument.box)),
            tuple(map(evaluate, argument.element_strides)),
            evaluate(argument.swizzle_bytes),
            evaluate(argument.l2_promotion_bytes),
        )

    def fits(self) -> Mask:
        """Rows in which the hardware takes the map, or there is none."""
        return self._absent() | reduce(np.logical_and, [holds for holds, _ in self._conditions()])

    def explain(self) -> str:
        """What is wrong with the first row; "" where nothing is."""
        if np.ravel(self._absent())[0]:
            return ""
        faults = (fault for holds, fault in self._conditions() if not np.ravel(holds)[0])
        return next((f"the tensor map {self.name} of {self.buffer} {fault}" for fault in faults), "")

    def _absent(self) -> Mask:
        return reduce(np.logical_or, [side == 0 for side in self.box])

    def _conditions(self) -> list[tuple[Mask, str]]:
        """What must hold, each with what is said of the first row where it does not."""
        inner_bytes = np.clip(self.box[-1], 0, MAX_BOX + 1) * self.element_bytes
        box, steps = _by(self.box), _by(self.element_strides)
        swizzle, promotion, inner = _first(self.swizzle_bytes), _first(self.l2_promotion_bytes), _first(inner_bytes)
        return [
            *self._layout_conditions(),
            (_all_within(self.box, MAX_BOX), f"has a box of {box} elements, expected 1 to {MAX_BOX} along each axis"),
            (
                inner_bytes % UNIT_BYTES == 0,
                f"has a box of {inner} bytes along the innermost axis, expected a multiple of {UNIT_BYTES}",
            ),
            (np.isin(self.swizzle_bytes, SWIZZLES), f"has swizzle_bytes = {swizzle}, expected one of {_or(SWIZZLES)}"),
            (
                (self.swizzle_bytes == 0) | (inner_bytes <= self.swizzle_bytes),
                f"has a box of {inner} bytes along the innermost axis, more than its swizzle_bytes = {swizzle}",
            ),
            (
                _all_within(self.element_strides, MAX_ELEMENT_STRIDE) & (self.element_strides[-1] == 1),
                f"has element strides of {steps}, expected 1 to {MAX_ELEMENT_STRIDE}, and 1 along the innermost axis",
            ),
            (
                np.isin(self.l2_promotion_bytes, L2_PROMOTIONS),
                f"has l2_promotion_bytes = {promotion}, expected one of {_or(L2_PROMOTIONS)}",
            ),
        ]

    def _layout_conditions(self) -> list[tuple[Mask, str]]:
        """What the problem alone decides."""
        strides = strides_bytes(self.shape, self.element_bytes)
        uneven = next((stride for stride in strides if stride % UNIT_BYTES), 0)
        shape = " x ".join(f"{extent:,}" for extent in self.shape)
        everywhere = np.ones_like(self.swizzle_bytes, np.bool_)
        return [
            (
                everywhere & (uneven == 0),
                f"has rows {uneven:,} bytes apart in the shape {shape}, expected a multiple of {UNIT_BYTES}",
            ),
            (
                everywhere & (max(self.shape) <= MAX_EXTENT and max(strides, default=0) < MAX_STRIDE_BYTES),
                f"has the shape {shape}, which is beyond what a map can address",
            ),
        ]


def _all_within(columns: tuple[Column, ...], most: int) -> Mask:
    return reduce(np.logical_and, [(column >= 1) & (column <= most) for column in columns])


def _by(columns: tuple[Column, ...]) -> str:
    return " x ".join(str(_first(column)) for column in columns)


def _first(column: Column) -> int:
    return int(np.ravel(column)[0])


def _or(values: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, values[:-1]))} or {values[-1]}"


@dataclass(frozen=True, slots=True)
class Workspace:
    """A workspace of known shape and element type."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    zeroed: bool

    @property
    def size_bytes(self) -> int:
        """Bytes that it takes; 0 where a null pointer is passed."""
        return math.prod(self.shape) * DTYPES[self.dtype].size_bytes

    @classmethod
    def of(cls, argument: WorkspaceArgument, spec: KernelSpec, dtype: str, names: Mapping[str, Value]) -> Workspace:
        """Evaluate an argument.

        Raises
        ------
        ConfigError
            An extent is negative.
        """
        shape = tuple(int(extent.evaluate(names)) for extent in argument.shape)
        if min(shape) < 0:
            raise ConfigError(
                f"{spec.name}: the workspace {argument.name} would have the shape {shape}; add a rule that excludes it"
            )
        sizes = {name: int(names[name]) for name in spec.sizes}
        return cls(argument.name, argument.dtype.of(dtype, sizes), shape, argument.zeroed)


@dataclass(frozen=True, slots=True)
class LaunchData:
    """Workspaces and tensor maps of one configuration, in the order of the arguments; equal where they are the same."""

    workspaces: tuple[Workspace, ...]
    tensor_maps: tuple[TensorMap, ...]

    @classmethod
    def of(cls, spec: KernelSpec, dtype: str, names: Mapping[str, Value]) -> LaunchData:
        """Evaluate a kernel's arguments.

        Parameters
        ----------
        spec, dtype
            The kernel and the problem's element type.
        names
            A value for every size, flag, parameter and ``device.*``: see `autotile.kernel.launch.known_names`.

        Raises
        ------
        ConfigError
            A workspace has a negative extent.
        """
        return cls(
            tuple(Workspace.of(argument, spec, dtype, names) for argument in spec.workspaces),
            tuple(TensorMap.of(argument, spec, dtype, names) for argument in spec.tensor_maps),
        )
