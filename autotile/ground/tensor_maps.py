"""Tensor maps: how a configuration describes a buffer to the tensor memory accelerator, and what the hardware takes.

Limits: ``cuTensorMapEncodeTiled`` in the CUDA driver API reference, for maps without interleaving.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from itertools import accumulate
from operator import mul

import numpy as np
from numpy.typing import NDArray

from autotile.ground.dtypes import DTYPES
from autotile.ground.expressions import Expression
from autotile.ground.frozen import dataclass
from autotile.ground.model import Value
from autotile.ground.spec import KernelSpec, TensorMapArgument

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
    """One tensor map over columns of configurations, as in `autotile.ground.limits.Demand`."""

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
