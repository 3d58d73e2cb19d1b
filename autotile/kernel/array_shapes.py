"""Shapes of the results of array operations, computed without the arrays, and the limits on them.

Each rule takes what its operation takes, with the shapes of the arrays in their place, and returns the shape of the
result. It raises `ValueError` where NumPy would.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

Shape = tuple[int, ...]

MAX_ELEMENTS = 2**32
"""Maximum number of elements of an array of an expression: 32 GiB of float64."""
MAX_OPERATIONS = 2**44
"""Maximum number of multiplications of a product: minutes on a device."""
MAX_AXES = 16
MAX_TAPS = 2**14
"""Maximum number of elements of a filter."""


class ShapeOnly:
    """Stand-in for an array of which only the shape is known; expressions of it are evaluated to shapes.

    Parameters
    ----------
    shape
        Shape of the array.
    operands
        Arrays that it is computed from.

    Attributes
    ----------
    largest
        Number of elements of the largest array among it and all that it is computed from.
    """

    __slots__ = ("largest", "shape")

    def __init__(self, shape: Shape, *operands: Any) -> None:
        self.shape = shape
        largest = [operand.largest for operand in operands if isinstance(operand, ShapeOnly)]
        self.largest: int = max(math.prod(shape), *largest, 0)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)


def check_size(shape: Shape) -> None:
    """Raise `ValueError` if an array is larger than expressions may compute."""
    if len(shape) > MAX_AXES:
        raise ValueError(f"the result would have {len(shape)} axes, at most {MAX_AXES} are accepted")
    if shape and min(shape) < 0:
        raise ValueError(f"the result would have the shape {shape}")
    if math.prod(shape) > MAX_ELEMENTS:
        raise ValueError(f"the result would have the shape {shape}, more than {MAX_ELEMENTS:,} elements")


def check_host_size(shape: Shape) -> None:
    """Raise `ValueError` if an array would take more than half of the machine's memory, at 8 bytes an element."""
    if math.prod(shape) > _HOST_BYTES // 16:
        raise ValueError(f"the result would have the shape {shape}, more than half of this machine's memory")


_HOST_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def elementwise(*operands: Shape) -> Shape:
    """Return the shape to which operands broadcast."""
    return np.broadcast_shapes(*operands)


def same(operand: Shape, *_: Any) -> Shape:
    """Return the shape of the first operand."""
    return operand


def axes_of(shape: Shape, axis: Any) -> tuple[int, ...]:
    """Return an axis, or several, as nonnegative numbers; all axes for None."""
    if axis is None:
        return tuple(range(len(shape)))
    found = []
    for one in axis if isinstance(axis, tuple) else (axis,):
        if not -len(shape) <= one < len(shape):
            raise ValueError(f"axis {one} is out of bounds for an array of {len(shape)} axes")
        found.append(one % len(shape))
    if len(set(found)) < len(found):
        raise ValueError(f"an axis is repeated in {axis}")
    return tuple(found)


def reduced(shape: Shape, axis: Any = None, keepdims: bool = False) -> Shape:
    """Return the shape after a reduction over an axis, several, or all."""
    gone = axes_of(shape, axis)
    if any(shape[axis] == 0 for axis in gone):
        raise ValueError("a reduction over an axis of extent 0")
    return tuple(1 if i in gone else extent for i, extent in enumerate(shape) if keepdims or i not in gone)


def along(shape: Shape, axis: Any = None, *_: Any) -> Shape:
    """Return the shape of a scan, a sort or a reversal along an axis; without an axis, that of the flattened array."""
    if axis is None:
        return (math.prod(shape),)
    axes_of(shape, axis)
    return shape


def rolled(shape: Shape, shift: Any, axis: Any = None) -> Shape:
    """Return the shape, which a rotation does not change."""
    axes_of(shape, axis)
    if isinstance(shift, tuple) and (not isinstance(axis, tuple) or len(axis) != len(shift)):
        raise ValueError(f"{len(shift)} shifts take as many axes")
    return shape


def flipped(shape: Shape, axis: Any = None) -> Shape:
    """Return the shape, which a reversal does not change."""
    axes_of(shape, axis)
    return shape


def shifted(shape: Shape, offsets: tuple[int, ...]) -> Shape:
    """Return the shape, which a shift does not change; it takes one offset for each axis."""
    if len(offsets) != len(shape):
        raise ValueError(f"shift of a {len(shape)}-dimensional array takes {len(shape)} offsets, got {len(offsets)}")
    return shape


def product(a: Shape, b: Shape) -> Shape:
    """Return the shape of ``a @ b``; a vector is a row on the left and a column on the right."""
    if not a or not b:
        raise ValueError("a matrix product does not take scalars; use *")
    rows, columns = a[-2:-1], b[-1:] if len(b) > 1 else ()
    if a[-1] != b[-2 if len(b) > 1 else -1]:
        raise ValueError(f"{a[-1]} columns against {b[-2 if len(b) > 1 else -1]} rows")
    shape = (*np.broadcast_shapes(a[:-2], b[:-2]), *rows, *columns)
    if math.prod(shape) * a[-1] > MAX_OPERATIONS:
        raise ValueError(f"the product takes more than {MAX_OPERATIONS:,} multiplications")
    return shape


def transposed(shape: Shape) -> Shape:
    """Return the shape with the last two axes swapped."""
    return (*shape[:-2], shape[-1], shape[-2]) if len(shape) > 1 else shape


def permuted(shape: Shape, axes: tuple[int, ...]) -> Shape:
    """Return the shape with its axes in another order."""
    order = axes_of(shape, axes)
    if len(order) != len(shape):
        raise ValueError(f"{len(order)} axes for an array of {len(shape)}")
    return tuple(shape[axis] for axis in order)


def reshaped(shape: Shape, extents: tuple[int, ...]) -> Shape:
    """Return the new shape, in which one extent may be -1."""
    total, known = math.prod(shape), math.prod(extent for extent in extents if extent != -1)
    if extents.count(-1) > 1 or any(extent < -1 for extent in extents):
        raise ValueError(f"{extents} is not a shape; one extent may be -1")
    if -1 in extents and known and total % known == 0:
        return tuple(total // known if extent == -1 else extent for extent in extents)
    if -1 in extents or known != total:
        raise ValueError(f"an array of {total} elements has no shape {extents}")
    return extents


def raveled(shape: Shape) -> Shape:
    """Return the shape of the flattened array."""
    return (math.prod(shape),)


def broadcasted(shape: Shape, extents: tuple[int, ...]) -> Shape:
    """Return the shape to which an array is broadcast."""
    if np.broadcast_shapes(shape, extents) != extents:
        raise ValueError(f"an array of shape {shape} cannot be broadcast to {extents}")
    return extents


def repeated(shape: Shape, repeats: int, axis: int | None = None) -> Shape:
    """Return the shape after each element is repeated along an axis."""
    flat = raveled(shape) if axis is None else shape
    (along_axis,) = axes_of(flat, 0 if axis is None else axis)
    return tuple(extent * repeats if i == along_axis else extent for i, extent in enumerate(flat))


def tiled(shape: Shape, counts: tuple[int, ...]) -> Shape:
    """Return the shape after an array is repeated along its axes."""
    rank = max(len(shape), len(counts))
    padded = (1,) * (rank - len(shape)) + shape
    return tuple(e * n for e, n in zip(padded, (1,) * (rank - len(counts)) + counts, strict=True))


def concatenated(shapes: Sequence[Shape], axis: int = 0) -> Shape:
    """Return the shape of arrays put one after the other along an axis."""
    first = shapes[0]
    if not first:
        raise ValueError("scalars cannot be concatenated; use stack")
    (along_axis,) = axes_of(first, axis)
    for shape in shapes[1:]:
        if len(shape) != len(first) or any(
            a != b for i, (a, b) in enumerate(zip(shape, first, strict=True)) if i != along_axis
        ):
            raise ValueError(f"arrays of shape {first} and {shape} do not fit along axis {axis}")
    total = sum(shape[along_axis] for shape in shapes)
    return tuple(total if i == along_axis else extent for i, extent in enumerate(first))


def stacked(shapes: Sequence[Shape], axis: int = 0) -> Shape:
    """Return the shape of arrays put together along a new axis."""
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"arrays of different shapes: {', '.join(map(str, shapes))}")
    shape = list(shapes[0])
    if not -len(shape) - 1 <= axis <= len(shape):
        raise ValueError(f"axis {axis} is out of bounds for an array of {len(shape) + 1} axes")
    shape.insert(axis if axis >= 0 else len(shape) + 1 + axis, len(shapes))
    return tuple(shape)


def pad_widths(shape: Shape, widths: Any) -> tuple[tuple[int, int], ...]:
    """Return the numbers of elements added before and after each axis: of one number, a pair, or a pair for each."""
    if isinstance(widths, int):
        widths = ((widths, widths),) * len(shape)
    elif len(widths) == 2 and all(isinstance(width, int) for width in widths):
        widths = (widths,) * len(shape)
    widths = tuple((width, width) if isinstance(width, int) else width for width in widths)
    if len(widths) != len(shape) or any(len(pair) != 2 or min(pair) < 0 for pair in widths):
        raise ValueError(f"padding of an array of {len(shape)} axes takes a pair of widths from 0 for each axis")
    return tuple((before, after) for before, after in widths)


def padded(shape: Shape, widths: Any, *_: Any) -> Shape:
    """Return the shape after padding."""
    pairs = zip(shape, pad_widths(shape, widths), strict=True)
    return tuple(before + extent + after for extent, (before, after) in pairs)


def correlated(x: Shape, weights: Shape) -> Shape:
    """Return the shape of a correlation without padding, over all axes of the filter, the last ones of the array."""
    if len(weights) > len(x) or not weights:
        raise ValueError(f"a filter of {len(weights)} axes on an array of {len(x)}")
    kept = len(x) - len(weights)
    shape = (*x[:kept], *_windows(x[kept:], weights))
    _check_filter(shape, weights, math.prod(weights))
    return shape


def convolved_channels(x: Shape, weights: Shape) -> Shape:
    """Return the shape of ``conv2d``: (B, C, H, W) and (O, C, KH, KW) give (B, O, H - KH + 1, W - KW + 1)."""
    if len(x) != 4 or len(weights) != 4 or x[1] != weights[1]:
        raise ValueError("conv2d takes arrays of the shapes (B, C, H, W) and (O, C, KH, KW)")
    shape = (x[0], weights[0], *_windows(x[2:], weights[2:]))
    _check_filter(shape, weights[2:], math.prod(weights[1:]))
    return shape


def _check_filter(shape: Shape, taps: Shape, terms: int) -> None:
    if math.prod(taps) > MAX_TAPS:
        raise ValueError(f"the filter has more than {MAX_TAPS:,} elements")
    if math.prod(shape) * terms > MAX_OPERATIONS:
        raise ValueError(f"the filter takes more than {MAX_OPERATIONS:,} multiplications")


def windows(x: Shape, extents: tuple[int, ...]) -> Shape:
    """Return the shape of all windows of the last axes: their positions, then their elements."""
    if len(extents) > len(x) or not extents or min(extents) < 1:
        raise ValueError(f"windows of the shape {extents} of an array of {len(x)} axes")
    kept = len(x) - len(extents)
    return (*x[:kept], *_windows(x[kept:], extents), *extents)


def _windows(x: Shape, extents: Shape) -> Shape:
    found = tuple(extent - window + 1 for extent, window in zip(x, extents, strict=True))
    if min(found) < 1:
        raise ValueError(f"windows of the shape {extents} in an array of shape {x}; pad the array")
    return found


def outer(a: Shape, b: Shape) -> Shape:
    """Return the shape of the outer product of two flattened arrays."""
    return math.prod(a), math.prod(b)


def taken(shape: Shape, indices: Shape, axis: int | None = None) -> Shape:
    """Return the shape of the elements at indices along an axis."""
    flat = raveled(shape) if axis is None else shape
    (along_axis,) = axes_of(flat, 0 if axis is None else axis)
    return (*flat[:along_axis], *indices, *flat[along_axis + 1 :])


def filled(shape: Any, value: Shape) -> Shape:
    """Return the shape of an array of one value."""
    if value:
        raise ValueError(f"full takes a number, got an array of shape {value}; use broadcast_to")
    return shape if isinstance(shape, tuple) else (shape,)


def diagonal(shape: Shape) -> Shape:
    """Return the shape of the diagonals of the last two axes."""
    if len(shape) < 2:
        raise ValueError("a diagonal takes two axes")
    return (*shape[:-2], min(shape[-2:]))


def triangle(shape: Shape, k: int) -> Shape:
    """Return the shape, which setting a triangle to zero does not change."""
    if len(shape) < 2:
        raise ValueError("a triangle takes two axes")
    return shape


def spaced(low: Shape, high: Shape, n: int) -> Shape:
    """Return the shape of equally spaced numbers."""
    if low or high:
        raise ValueError("linspace takes two numbers")
    return (n,)


def counted(x: Shape, length: int, *_: Any) -> Shape:
    """Return the shape of counts."""
    if len(x) != 1:
        raise ValueError(f"expected a vector, got the shape {x}; use ravel")
    return (length,)


def histogram(x: Shape, length: int, *_: Any) -> Shape:
    """Return the shape of a histogram."""
    return (length,)


def segments(values: Shape, offsets: Shape) -> Shape:
    """Return the shape of sums over segments of the first axis."""
    if not values or len(offsets) != 1 or offsets[0] < 1:
        raise ValueError("segment_sum takes values, and a vector of one offset more than there are segments")
    return (offsets[0] - 1, *values[1:])


def scattered(base: Shape, indices: Shape, values: Shape) -> Shape:
    """Return the shape of an array to which values are added."""
    if not base or broadcasted(values, (*indices, *base[1:])) is None:
        raise ValueError("scatter_add takes an array, indices of its first axis, and values for them")
    return base


def searched(sorted_values: Shape, values: Shape, *_: Any) -> Shape:
    """Return the shape of the positions of values."""
    if len(sorted_values) != 1:
        raise ValueError(f"searchsorted takes a sorted vector, got the shape {sorted_values}")
    return values


def contracted(subscripts: str, shapes: Sequence[Shape]) -> Shape:
    """Return the shape of an ``einsum`` with explicit subscripts."""
    inputs, output = subscript_parts(subscripts, len(shapes))
    extents: dict[str, int] = {}
    for labels, shape in zip(inputs, shapes, strict=True):
        if len(labels) != len(shape):
            raise ValueError(f"{labels!r} for an array of {len(shape)} axes")
        for label, extent in zip(labels, shape, strict=True):
            if extents.setdefault(label, extent) != extent:
                raise ValueError(f"the axis {label!r} has the extents {extents[label]} and {extent}")
    if not set(output) <= extents.keys() or len(set(output)) < len(output):
        raise ValueError(f"the result {output!r} does not name axes of the operands, each once")
    if math.prod(extents.values()) > MAX_OPERATIONS:
        raise ValueError(f"the contraction takes more than {MAX_OPERATIONS:,} multiplications")
    return tuple(extents[label] for label in output)


def subscript_parts(subscripts: str, operands: int) -> tuple[list[str], str]:
    """Return the axes of each operand of an ``einsum``, and those of the result."""
    left, arrow, output = subscripts.replace(" ", "").partition("->")
    inputs = left.split(",")
    letters = left.replace(",", "") + output
    if not arrow or len(inputs) != operands or not (letters.isascii() and (letters.isalpha() or not letters)):
        raise ValueError(f"einsum takes subscripts such as 'ij,jk->ik', one group for each of {operands} arrays")
    return inputs, output


def indexed(shape: Shape, index: Sequence[Any]) -> Shape:
    """Return the shape of ``x[index]``.

    Parameters
    ----------
    shape
        Shape of ``x``.
    index
        A whole number, a slice, None, Ellipsis, or the shape of an array of indices (a tuple), for each axis.
    """
    parts = list(index) if any(part is ... for part in index) else [*index, ...]
    taken_axes = sum(part is not None and part is not ... for part in parts)
    if taken_axes > len(shape) or sum(part is ... for part in parts) > 1:
        raise ValueError(f"{taken_axes} indices for an array of {len(shape)} axes")
    places = [number for number, part in enumerate(parts) if isinstance(part, tuple)]
    if places and places != list(range(places[0], places[0] + len(places))):
        raise ValueError("arrays of indices must stand side by side; index in two steps")
    if places and any(isinstance(part, int) for part in parts):
        raise ValueError("a whole number beside arrays of indices; index in two steps")
    result: list[int] = []
    axis = 0
    for number, part in enumerate(parts):
        extents = shape[axis : axis + len(shape) - taken_axes] if part is ... else shape[axis : axis + 1]
        if isinstance(part, tuple):
            result += np.broadcast_shapes(*(parts[place] for place in places)) if number == places[0] else ()
        else:
            result += _kept(part, extents)
        axis += len(extents) if part is not None else 0
    return tuple(result)


def _kept(part: Any, extents: Shape) -> Sequence[int]:
    """Return the extents that remain of the axes to which a part of an index applies."""
    if part is ...:
        return extents
    if part is None:
        return (1,)
    if isinstance(part, slice):
        return (len(range(*part.indices(extents[0]))),)
    if not -extents[0] <= part < extents[0]:
        raise ValueError(f"the index {part} is out of bounds for an axis of {extents[0]}")
    return ()
