"""Array expressions: the expected outputs of a kernel, and the contents of its inputs.

A closed language like that of `autotile.kernel.expressions`, over whole arrays: the parser accepts only the listed
parts of a syntax tree, and nothing is executed as Python. The shape of every intermediate array is computed, and
bounded, before the array is. A function states its signature, the shape of its result, and its computation, which takes
the array library, NumPy or CuPy, and operands whose shapes have been checked.
"""

from __future__ import annotations

import ast
import math
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotile.errors import listing, nearest
from autotile.kernel import array_shapes as shapes
from autotile.kernel.array_shapes import Shape, ShapeOnly
from autotile.kernel.expressions import (
    UNKNOWN_LOCATION,
    ExpressionError,
    ExpressionParser,
    ExpressionText,
    Kind,
    Location,
    canonical_text,
    one_line,
)
from autotile.kernel.whole_numbers import EvaluationError

Rule = Callable[..., Shape]
Compute = Callable[..., Any]


class ArrayFunction(NamedTuple):
    """A function of the language.

    Attributes
    ----------
    signature
        Names of the operands, as in ``"x axis=None"``. `OPTION_TYPES` holds the types of those that are no arrays;
        ``*shape`` collects the remaining whole numbers.
    shape
        Shape of the result, from the operands with shapes in place of arrays.
    compute
        The result, from the array library and the operands.
    """

    signature: str
    shape: Rule
    compute: Compute

    def usage(self, name: str) -> str:
        """Return a call, for messages."""
        return f"{name}({self.signature.replace(' ', ', ')})"


OPTION_TYPES: Mapping[str, str] = {
    **dict.fromkeys(("axis", "axes", "shift", "offsets", "shape", "counts", "widths"), "whole numbers"),
    **dict.fromkeys(("length", "repeats", "n", "m", "k", "start", "stop", "step"), "whole number"),
    **dict.fromkeys(("mode", "side", "subscripts"), "text"),
    "keepdims": "boolean",
    "arrays": "arrays",
}
"""Types of the operands that are no arrays."""


def numeric(x: Any) -> Any:
    """Return truth values as 0 and 1, so that sums and products of them are those of numbers."""
    kind = getattr(getattr(x, "dtype", None), "kind", "")
    if kind == "b":
        return x.astype(np.int64)
    return int(x) if isinstance(x, bool) else x


def truth(x: Any) -> Any:
    """Return numbers as truth values: whether they are not 0."""
    return x if getattr(getattr(x, "dtype", None), "kind", "") == "b" or isinstance(x, bool) else x != 0


def has_kind(x: Any, kinds: str) -> bool:
    """Return whether an operand's values are of one of NumPy's kinds: b, i, u, f, c."""
    return np.result_type(getattr(x, "dtype", type(x))).kind in kinds


def arithmetic(name: str, of_whole: Callable[[int, int], int]) -> Compute:
    """Return an operation on arrays; of two whole numbers the result is exact, or a real number if it is large."""

    def compute(xp: ModuleType, a: Any, b: Any) -> Any:
        a, b = numeric(a), numeric(b)
        if isinstance(a, int) and isinstance(b, int):
            return bounded(of_whole(a, b))
        return getattr(xp, name)(a, b)

    return compute


def power(xp: ModuleType, x: Any, exponent: Any) -> Any:
    """``x ** exponent``; whole numbers stay whole where the exponents are literals that are not negative."""
    x, exponent = numeric(x), numeric(exponent)
    if has_kind(x, "iu") and not (isinstance(exponent, int) and exponent >= 0):
        x = xp.asarray(x).astype(np.float64) if np.ndim(x) else float(x)
    if isinstance(x, int) and isinstance(exponent, int):
        return bounded(x**exponent) if exponent <= shapes.MAX_AXES * 64 else float(x) ** exponent
    with np.errstate(all="ignore"):
        return xp.power(x, exponent)


def bounded(value: int) -> int | float:
    """Return a whole number that fits in 64 bits, or a real one."""
    return value if -(2**63) <= value < 2**64 else float(value)


def whole(x: Any, what: str) -> Any:
    """Return an operand that must hold whole numbers."""
    if has_kind(x, "iu"):
        return x
    if np.ndim(x) == 0 and isinstance(x, int | float) and float(x).is_integer():
        return int(x)
    raise ValueError(f"{what} takes whole numbers; convert with int(x)")


def _unary(name: str) -> ArrayFunction:
    return ArrayFunction("x", shapes.same, lambda xp, x: getattr(xp, name)(numeric(x)))


def _binary(name: str) -> ArrayFunction:
    return ArrayFunction("a b", shapes.elementwise, lambda xp, a, b: getattr(xp, name)(numeric(a), numeric(b)))


def _special(name: str) -> ArrayFunction:
    return ArrayFunction("x", shapes.same, lambda xp, x: getattr(_special_functions(xp), name)(_real(xp, x)))


def _special_functions(xp: ModuleType) -> Any:
    found: Any = import_module("scipy.special" if xp is np else "cupyx.scipy.special")  # rare, and slow to import
    return found


def _real(xp: ModuleType, x: Any) -> Any:
    return xp.asarray(numeric(x)).astype(np.float64, copy=False)


def _reduction(name: str, convert: Callable[[Any], Any] = numeric) -> ArrayFunction:
    def compute(xp: ModuleType, x: Any, axis: Any, keepdims: bool) -> Any:
        return getattr(xp, name)(convert(xp.asarray(x)), axis=axis, keepdims=keepdims)

    return ArrayFunction("x axis=None keepdims=False", shapes.reduced, compute)


def _scan(name: str) -> ArrayFunction:
    return ArrayFunction(
        "x axis=None", shapes.along, lambda xp, x, axis: getattr(xp, name)(numeric(xp.asarray(x)), axis=axis)
    )


def _sort(xp: ModuleType, x: Any, axis: int) -> Any:
    return xp.sort(xp.asarray(x), axis=axis)


def _argsort(xp: ModuleType, x: Any, axis: int) -> Any:
    return xp.argsort(xp.asarray(x), axis=axis, kind="stable")


def shift(xp: ModuleType, x: Any, offsets: tuple[int, ...]) -> Any:
    """``result[i, j] = x[i + d0, j + d1]``, zero outside the array."""
    result = xp.zeros_like(x)
    kept = [max(0, size - abs(offset)) for size, offset in zip(x.shape, offsets, strict=True)]
    to = tuple(slice(max(0, -offset), max(0, -offset) + n) for offset, n in zip(offsets, kept, strict=True))
    at = tuple(slice(max(0, offset), max(0, offset) + n) for offset, n in zip(offsets, kept, strict=True))
    result[to] = x[at]
    return result


def _transpose(xp: ModuleType, x: Any) -> Any:
    """Swap the last two axes; a vector or scalar is returned unchanged."""
    return xp.swapaxes(x, -1, -2) if np.ndim(x) > 1 else x


def _where(xp: ModuleType, condition: Any, a: Any, b: Any) -> Any:
    return xp.where(xp.asarray(truth(condition)), a, b)


def _clip(xp: ModuleType, x: Any, low: Any, high: Any) -> Any:
    return xp.minimum(xp.maximum(numeric(x), numeric(low)), numeric(high))


def _pad(xp: ModuleType, x: Any, widths: Any, mode: str, value: Any) -> Any:
    x = xp.asarray(x)
    pairs = shapes.pad_widths(x.shape, widths)
    if mode == "constant":
        number = value.item() if hasattr(value, "item") else value  # CuPy takes no array of its own here
        return xp.pad(x, pairs, mode="constant", constant_values=number)
    if mode not in ("edge", "wrap", "reflect", "symmetric"):
        raise ValueError(f"the mode {mode!r} is not known; use 'constant', 'edge', 'wrap', 'reflect' or 'symmetric'")
    return xp.pad(x, pairs, mode=mode)


def _correlate(xp: ModuleType, x: Any, weights: Any) -> Any:
    """Sum one shifted array for each element of the filter, so that no array is larger than the operands."""
    x, weights = numeric(x), numeric(weights)
    extents = shapes.correlated(x.shape, weights.shape)[-weights.ndim :]
    result: Any = 0
    for offset in np.ndindex(*weights.shape):
        window = tuple(slice(d, d + extent) for d, extent in zip(offset, extents, strict=True))
        result = result + weights[offset] * x[(..., *window)]
    return result


def _conv2d(xp: ModuleType, x: Any, weights: Any) -> Any:
    _, _, height, width = shapes.convolved_channels(x.shape, weights.shape)
    result: Any = 0
    for i, j in np.ndindex(*weights.shape[2:]):
        window = x[:, :, i : i + height, j : j + width].reshape(x.shape[0], x.shape[1], -1)
        result = result + xp.matmul(weights[:, :, i, j], window)
    return result.reshape(x.shape[0], weights.shape[0], height, width)


def _windows(xp: ModuleType, x: Any, extents: tuple[int, ...]) -> Any:
    axes = tuple(range(-len(extents), 0))
    return xp.lib.stride_tricks.sliding_window_view(x, extents, axes)


def _einsum(xp: ModuleType, subscripts: str, arrays: tuple[Any, ...]) -> Any:
    """Contract operands pairwise, from left to right, so that the size of each intermediate result is known."""
    inputs, output = shapes.subscript_parts(subscripts, len(arrays))
    operands = [xp.asarray(numeric(x)) for x in arrays]
    while len(operands) > 2:
        later = set("".join(inputs[2:]) + output)
        pair = inputs[0] + inputs[1]
        kept = "".join(dict.fromkeys(label for label in pair if label in later))
        step = f"{inputs[0]},{inputs[1]}->{kept}"
        shapes.check_size(shapes.contracted(step, [x.shape for x in operands[:2]]))
        operands[:2] = [xp.einsum(step, *operands[:2], optimize=True)]
        inputs[:2] = [kept]
    return xp.einsum(f"{','.join(inputs)}->{output}", *operands, optimize=True)


def _bincount(xp: ModuleType, x: Any, length: int, weights: Any) -> Any:
    check_indices(xp, x, length)
    if weights is not None and np.shape(weights) != np.shape(x):
        raise ValueError(f"weights of shape {np.shape(weights)} for values of shape {np.shape(x)}")
    if not x.size:
        return xp.zeros(length, np.int64 if weights is None else np.float64)
    return xp.bincount(x.astype(np.int64), weights=weights, minlength=length)


def _histogram(xp: ModuleType, x: Any, length: int, low: Any, high: Any) -> Any:
    """Count values in equal parts of ``[low, high]``; the last part includes ``high``, others are not counted."""
    values = _real(xp, x).ravel()
    if not low < high or length < 1:
        raise ValueError(f"a histogram of {length} parts of [{low}, {high}]")
    part = xp.floor((values - low) / (high - low) * length)
    part = xp.where(values == high, length - 1, part)
    inside = (values >= low) & (values <= high)
    return xp.bincount(xp.where(inside, part, length).astype(np.int64), minlength=length + 1)[:length]


def _segment_sum(xp: ModuleType, values: Any, offsets: Any) -> Any:
    count = offsets.shape[0] - 1
    host = offsets if xp is np else offsets.get()
    if not has_kind(offsets, "iu") or host[0] < 0 or host[-1] > values.shape[0] or (np.diff(host) < 0).any():
        raise ValueError(f"offsets must be whole numbers that ascend from 0 to {values.shape[0]} at most")
    positions = xp.arange(int(host[0]), int(host[-1]))
    segment = xp.searchsorted(offsets[1:], positions, side="right")
    base = xp.zeros((count, *values.shape[1:]), numeric(values[:0]).dtype)
    return _add_at(xp, base, segment, numeric(values[int(host[0]) : int(host[-1])]))


def _scatter_add(xp: ModuleType, base: Any, indices: Any, values: Any) -> Any:
    indices = xp.asarray(indices)
    check_indices(xp, indices, base.shape[0])
    result = numeric(base)
    kind = np.result_type(result.dtype, getattr(numeric(values), "dtype", type(values)))
    shape = (*indices.shape, *base.shape[1:])
    return _add_at(xp, result.astype(kind), indices, xp.broadcast_to(xp.asarray(values, kind), shape))


def _add_at(xp: ModuleType, result: Any, indices: Any, values: Any) -> Any:
    """Add values to a new array in place; CuPy adds 64-bit integers as unsigned ones, which gives the same bits."""
    unsigned = result.dtype == np.int64 and xp is not np
    view, added = (result.view(np.uint64), values.astype(np.uint64)) if unsigned else (result, values)
    xp.add.at(view, indices, added)
    return result


def check_indices(xp: ModuleType, indices: Any, extent: int) -> None:
    """Raise `ValueError` unless indices are whole numbers from 0 to below an extent."""
    if not has_kind(indices, "iu"):
        raise ValueError("indices must be whole numbers; convert with int(x)")
    if np.size(indices):
        least, most = int(indices.min()), int(indices.max())
        if least < 0 or most >= extent:
            raise ValueError(f"indices from {least} to {most} for an axis of {extent}")


def _take(xp: ModuleType, x: Any, indices: Any, axis: int | None) -> Any:
    array = xp.asarray(x)
    check_indices(xp, xp.asarray(indices), array.size if axis is None else array.shape[axis])
    return xp.take(array, xp.asarray(indices), axis=axis)


def _searchsorted(xp: ModuleType, sorted_values: Any, values: Any, side: str) -> Any:
    if side not in ("left", "right"):
        raise ValueError(f"the side is {side!r}; use 'left' or 'right'")
    return xp.searchsorted(sorted_values, xp.asarray(values), side=side)


def _arange(xp: ModuleType, start: int, stop: int | None, step: int) -> Any:
    return xp.arange(0 if stop is None else start, start if stop is None else stop, step, dtype=np.int64)


def _arange_shape(start: int, stop: int | None, step: int) -> Shape:
    if step == 0:
        raise ValueError("the step is 0")
    return (len(range(0 if stop is None else start, start if stop is None else stop, step)),)


def _dot(xp: ModuleType, a: Any, b: Any) -> Any:
    return xp.matmul(numeric(a), numeric(b))


_FLOAT_NAMES = (
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "cbrt", "sin", "cos", "tan", "arcsin", "arccos"),
    *("arctan", "sinh", "cosh", "tanh", "arcsinh", "arccosh", "arctanh", "floor", "ceil", "trunc", "sign", "conj"),
    *("real", "imag", "square", "isfinite", "isnan", "isinf"),
)
_BINARY_NAMES = ("maximum", "minimum", "mod", "fmod", "floor_divide", "arctan2", "hypot", "copysign")

FUNCTIONS: Mapping[str, ArrayFunction] = {
    **{name: _unary(name) for name in _FLOAT_NAMES},
    **{name: _binary(name) for name in _BINARY_NAMES},
    **{name: _special(name) for name in ("erf", "erfc")},
    **{name: _reduction(name) for name in ("sum", "prod", "mean", "max", "min", "std", "var", "argmax", "argmin")},
    **{name: _reduction(name, truth) for name in ("any", "all")},
    **{name: _scan(name) for name in ("cumsum", "cumprod")},
    "abs": ArrayFunction("x", shapes.same, lambda xp, x: abs(numeric(x))),
    "round": ArrayFunction("x", shapes.same, lambda xp, x: xp.rint(numeric(x))),
    "rsqrt": ArrayFunction("x", shapes.same, lambda xp, x: 1.0 / xp.sqrt(numeric(x))),
    "angle": ArrayFunction("x", shapes.same, lambda xp, x: xp.angle(x)),
    "int": ArrayFunction("x", shapes.same, lambda xp, x: xp.asarray(x).astype(np.int64)),
    "float": ArrayFunction("x", shapes.same, lambda xp, x: xp.asarray(x).astype(np.float64)),
    "float32": ArrayFunction("x", shapes.same, lambda xp, x: xp.asarray(x).astype(np.float32).astype(np.float64)),
    "pow": ArrayFunction("x exponent", shapes.elementwise, power),
    "where": ArrayFunction("condition a b", shapes.elementwise, _where),
    "clip": ArrayFunction("x low high", shapes.elementwise, _clip),
    "sort": ArrayFunction("x axis=-1", shapes.along, _sort),
    "argsort": ArrayFunction("x axis=-1", shapes.along, _argsort),
    "flip": ArrayFunction("x axis=None", shapes.flipped, lambda xp, x, axis: xp.flip(x, axis)),
    "roll": ArrayFunction("x shift axis=None", shapes.rolled, lambda xp, x, shift, axis: xp.roll(x, shift, axis)),
    "shift": ArrayFunction("x *offsets", shapes.shifted, shift),
    "transpose": ArrayFunction("x", shapes.transposed, _transpose),
    "permute": ArrayFunction("x *axes", shapes.permuted, lambda xp, x, axes: xp.transpose(x, axes)),
    "reshape": ArrayFunction("x *shape", shapes.reshaped, lambda xp, x, shape: xp.reshape(x, shape)),
    "ravel": ArrayFunction("x", shapes.raveled, lambda xp, x: xp.ravel(x)),
    "broadcast_to": ArrayFunction("x *shape", shapes.broadcasted, lambda xp, x, shape: xp.broadcast_to(x, shape)),
    "repeat": ArrayFunction("x repeats axis=None", shapes.repeated, lambda xp, x, n, axis: xp.repeat(x, n, axis)),
    "tile": ArrayFunction("x *counts", shapes.tiled, lambda xp, x, counts: xp.tile(x, counts)),
    "concatenate": ArrayFunction(
        "arrays axis=0", shapes.concatenated, lambda xp, xs, axis: xp.concatenate([xp.asarray(x) for x in xs], axis)
    ),
    "stack": ArrayFunction(
        "arrays axis=0", shapes.stacked, lambda xp, xs, axis: xp.stack([xp.asarray(x) for x in xs], axis)
    ),
    "pad": ArrayFunction("x widths mode='constant' value=0", shapes.padded, _pad),
    "correlate": ArrayFunction("x weights", shapes.correlated, _correlate),
    "conv2d": ArrayFunction("x weights", shapes.convolved_channels, _conv2d),
    "sliding_window": ArrayFunction("x *shape", shapes.windows, _windows),
    "einsum": ArrayFunction("subscripts *arrays", shapes.contracted, _einsum),
    "dot": ArrayFunction("a b", shapes.product, _dot),
    "outer": ArrayFunction("a b", shapes.outer, lambda xp, a, b: xp.outer(numeric(a), numeric(b))),
    "diagonal": ArrayFunction("x", shapes.diagonal, lambda xp, x: xp.diagonal(x, 0, -2, -1)),
    "tril": ArrayFunction("x k=0", shapes.triangle, lambda xp, x, k: xp.tril(x, k)),
    "triu": ArrayFunction("x k=0", shapes.triangle, lambda xp, x, k: xp.triu(x, k)),
    "take": ArrayFunction("x indices axis=None", shapes.taken, _take),
    "bincount": ArrayFunction("x length weights=None", shapes.counted, _bincount),
    "histogram": ArrayFunction("x length low high", shapes.histogram, _histogram),
    "segment_sum": ArrayFunction("values bounds", shapes.segments, _segment_sum),
    "scatter_add": ArrayFunction("base indices values", shapes.scattered, _scatter_add),
    "searchsorted": ArrayFunction("ascending values side='left'", shapes.searched, _searchsorted),
    "arange": ArrayFunction("start stop=None step=1", _arange_shape, _arange),
    "zeros": ArrayFunction("*shape", lambda shape: shape, lambda xp, shape: xp.zeros(shape)),
    "ones": ArrayFunction("*shape", lambda shape: shape, lambda xp, shape: xp.ones(shape)),
    "full": ArrayFunction("shape value", shapes.filled, lambda xp, shape, value: xp.full(shape, value)),
    "eye": ArrayFunction("n", lambda n: (n, n), lambda xp, n: xp.eye(n)),
    "linspace": ArrayFunction(
        "low high n", lambda low, high, n: (n,), lambda xp, low, high, n: xp.linspace(low, high, n)
    ),
}
"""Functions of the language."""

ARRAY_FUNCTIONS = tuple(FUNCTIONS)


class Context(NamedTuple):
    """Arrays, sizes and functions that a closure is evaluated with."""

    env: Mapping[str, Any]
    library: ModuleType
    """NumPy or CuPy."""
    matmul: Callable[[Any, Any], Any]
    only_shapes: bool
    """Whether arrays are `ShapeOnly`."""


Closure = Callable[[Context], Any]

ARITHMETIC: Mapping[type[ast.operator], Callable[..., Any]] = {
    ast.Add: arithmetic("add", operator.add),
    ast.Sub: arithmetic("subtract", operator.sub),
    ast.Mult: arithmetic("multiply", operator.mul),
    ast.Div: lambda xp, a, b: xp.divide(numeric(a), numeric(b)),
    ast.FloorDiv: arithmetic("floor_divide", operator.floordiv),
    ast.Mod: arithmetic("mod", operator.mod),
    ast.Pow: power,
}


def _bits(name: str, symbol: str, of_whole: Callable[[int, int], int]) -> Callable[..., Any]:
    def compute(xp: ModuleType, a: Any, b: Any) -> Any:
        if has_kind(a, "b") and has_kind(b, "b"):
            return getattr(xp, name)(a, b)
        a, b = whole(numeric(a), symbol), whole(numeric(b), symbol)
        if isinstance(a, int) and isinstance(b, int):
            return bounded(of_whole(a, b))
        return getattr(xp, name)(a, b)

    return compute


BITS: Mapping[type[ast.operator], Callable[..., Any]] = {
    ast.BitAnd: _bits("bitwise_and", "&", operator.and_),
    ast.BitOr: _bits("bitwise_or", "|", operator.or_),
    ast.BitXor: _bits("bitwise_xor", "^", operator.xor),
    ast.LShift: _bits("left_shift", "<<", lambda a, b: a << min(max(b, 0), 64)),
    ast.RShift: _bits("right_shift", ">>", lambda a, b: a >> max(b, 0)),
}


def is_array(value: Any) -> bool:
    """Return whether a value is an array, or stands for one."""
    return isinstance(value, np.ndarray | ShapeOnly) or hasattr(value, "__cuda_array_interface__")


def operand(value: Any) -> Any:
    """Return an array with 64 bits an element: real numbers as float64, whole numbers exactly; a number as it is."""
    if isinstance(value, ShapeOnly):
        return value
    if not is_array(value):
        return plain(value)
    kind = value.dtype.kind
    wide = {"f": np.float64, "c": np.complex128, "i": np.int64, "b": np.bool_}.get(kind)
    if kind == "u":
        wide = np.uint64 if value.dtype.itemsize == 8 else np.int64
    return value.astype(wide, copy=False)


def plain(value: Any) -> Any:
    """Return a number of NumPy as one of Python; anything else as it is."""
    return value.item() if isinstance(value, np.generic) or (is_array(value) and value.ndim == 0) else value


def has_shape(value: Any) -> bool:
    """Return whether an operand is an array or a number, and no option."""
    return is_array(value) or (isinstance(value, int | float | complex | np.generic) and not isinstance(value, bool))


def shape_of(value: Any) -> shapes.Shape:
    """Return the shape of an array or a number."""
    return tuple(value.shape) if is_array(value) else ()


def _known(kind: str, value: Any) -> Any:
    """Return the form of an operand for a rule: the shape of an array, the shapes of several, or an option itself."""
    if kind == "arrays":
        return tuple(map(shape_of, value))
    return value if kind == "option" or value is None else shape_of(value)


def result_of(
    context: Context,
    rule: Callable[..., shapes.Shape],
    compute: Callable[..., Any],
    values: Sequence[Any],
    kinds: Sequence[str],
    *,
    divides: bool,
    takes_infinity: bool,
) -> Any:
    """Check the shape of a result, then compute it unless only shapes are known."""
    shape = rule(*map(_known, kinds, values))
    shapes.check_size(shape)
    operands: list[Any] = []
    for kind, value in zip(kinds, values, strict=True):
        operands += [value] if kind == "array" and value is not None else list(value) if kind == "arrays" else []
    if context.only_shapes and (shape or any(isinstance(operand, ShapeOnly) for operand in operands)):
        for operand in operands:
            if not is_array(operand) and not takes_infinity and not np.isfinite(operand):
                raise ValueError(f"an operand is {operand}, so the result is not finite")
        if divides and not is_array(operands[1]) and operands[1] == 0:
            raise ValueError("the divisor is zero")
        return ShapeOnly(shape, *operands)
    library = context.library if shape or any(map(is_array, operands)) else np
    if library is np:
        shapes.check_host_size(shape)
    result = compute(library, *values)
    if shape_of(result) != shape:
        raise ValueError(f"the result has the shape {shape_of(result)}, and not {shape} as expected")
    return result


def inverted(xp: ModuleType, x: Any) -> Any:
    """``~x``: the negation of truth values, or the complement of whole numbers."""
    return xp.logical_not(x) if has_kind(x, "b") else ~whole(x, "~")


def comparing(name: str) -> Callable[..., Any]:
    """Return a comparison of the array library."""
    return lambda xp, a, b: getattr(xp, name)(numeric(a), numeric(b))


def sliced(text: ExpressionText, tree: ast.expr, bounds: Sequence[int | None]) -> slice:
    """Return a slice of evaluated bounds."""
    if bounds[2] == 0:
        raise text.error(tree, "the step of a slice is 0")
    return slice(*bounds)


def elements_at(xp: ModuleType, x: Any, index: Sequence[Any]) -> Any:
    """Return ``x[index]``; indices in arrays may be negative, as in NumPy, and are checked, as CuPy does not."""
    x = xp.asarray(x)
    axis = 0
    taken = sum(part is not None and part is not ... for part in index)
    checked: list[Any] = []
    for part in index:
        if part is ...:
            axis += x.ndim - taken
        elif is_array(part):
            if part.dtype.kind == "b":
                raise ValueError("the shape of x[mask] depends on values; use where(mask, x, 0)")
            shifted = xp.where(part < 0, part + x.shape[axis], part)
            check_indices(xp, shifted, x.shape[axis])
            checked.append(shifted)
            axis += 1
            continue
        elif part is not None:
            axis += 1
        checked.append(part)
    return x[tuple(checked)]


_CONSTANTS = {"pi": math.pi, "inf": math.inf}

_COMPARISONS: Mapping[type[ast.cmpop], str] = {
    ast.Eq: "equal",
    ast.NotEq: "not_equal",
    ast.Lt: "less",
    ast.LtE: "less_equal",
    ast.Gt: "greater",
    ast.GtE: "greater_equal",
}

_FINITE_OF_INFINITE = ("maximum", "minimum", "where", "clip")
"""Functions whose result may be finite although an operand is infinite."""

_MAX_ITEMS = 64
"""Maximum number of arrays in a list, and of indices."""

_LANGUAGE = (
    "use names, numbers, + - * / // % ** @, & | ^ ~ << >>, comparisons, x[i, a:b], x.T, x if c else y and functions"
)


class ArrayParser:
    """Converts syntax trees to closures; raises `ExpressionError` for what is not in the language.

    Parameters
    ----------
    text
        Text of the tree, for messages.
    known
        Names of arrays and scalars.
    kinds
        Kind of each name that scalar expressions may use.
    functions
        Functions by name.

    Attributes
    ----------
    used
        Names used so far, without those that the text assigns.
    """

    def __init__(
        self,
        text: ExpressionText,
        known: tuple[str, ...],
        kinds: Mapping[str, Kind],
        functions: Mapping[str, ArrayFunction],
    ) -> None:
        self.text = text
        self.known = known
        self.kinds = kinds
        self.functions = functions
        self.used: set[str] = set()
        self._locals: set[str] = set()
        self._converters: Mapping[type[ast.expr], Callable[[Any], Closure]] = {
            ast.Constant: self._constant,
            ast.Name: self._name,
            ast.UnaryOp: self._unary,
            ast.BinOp: self._binary,
            ast.Compare: self._comparison,
            ast.IfExp: self._conditional,
            ast.Call: self._call,
            ast.Subscript: self._subscript,
            ast.Attribute: self._attribute,
        }

    def program(self) -> Closure:
        """Convert the text: assignments, and the expression of the result."""
        assigned, last = self.text.parse_statements()
        steps: list[tuple[str, Closure]] = []
        for name, tree in assigned:
            if name in self.known or name in self._locals or name in self.functions:
                raise self.text.error(tree, f"{name!r} already has a meaning; assign to another name")
            steps.append((name, self.closure(tree)))
            self._locals.add(name)
        result = self.closure(last)
        if not steps:
            return result

        def run(context: Context) -> Any:
            env = dict(context.env)
            context = context._replace(env=env)
            for name, step in steps:
                env[name] = step(context)
            return result(context)

        return run

    def closure(self, tree: ast.expr) -> Closure:
        """Convert an expression."""
        known = self._converters.get(type(tree))
        if known is not None:
            return known(tree)
        if isinstance(tree, ast.BoolOp):
            raise self.text.error(tree, "'and' and 'or' take single conditions; combine arrays with & and |")
        raise self.text.error(tree, f"{self.text.excerpt(tree)!r} is not accepted; {_LANGUAGE}")

    def _attribute(self, tree: ast.Attribute) -> Closure:
        if tree.attr != "T":
            raise self.text.error(tree, f"{self.text.excerpt(tree)!r} is not accepted; {_LANGUAGE}")
        reverse = self._computed(tree, lambda shape: shape[::-1], lambda xp, x: xp.transpose(x))
        return reverse(self.closure(tree.value))

    def _constant(self, tree: ast.Constant) -> Closure:
        value = tree.value
        if isinstance(value, bool) or not isinstance(value, int | float | complex):
            raise self.text.error(tree, f"{self.text.excerpt(tree)!r} is not a number; {_LANGUAGE}")
        try:
            value = bounded(value) if isinstance(value, int) else value
        except OverflowError:
            raise self.text.error(tree, "the number does not fit in float64") from None
        return lambda context: value

    def _name(self, tree: ast.Name) -> Closure:
        name = tree.id
        if name in self._locals:
            return lambda context: context.env[name]
        if name in self.known:
            self.used.add(name)
            return lambda context: operand(context.env[name])
        if name in _CONSTANTS:
            return lambda context: _CONSTANTS[name]
        hint = "; it is a function" if name in self.functions else nearest(name, self.known)
        raise self.text.error(tree, f"unknown name {name!r}{hint} (known: {listing(self.known)})")

    def _unary(self, tree: ast.UnaryOp) -> Closure:
        operand = self.closure(tree.operand)
        match tree.op:
            case ast.USub():
                return self._computed(tree, shapes.same, lambda xp, x: -numeric(x))(operand)
            case ast.UAdd():
                return operand
            case ast.Invert():
                return self._computed(tree, shapes.same, inverted)(operand)
            case _:
                raise self.text.error(tree, "'not' takes a single condition; use ~ for arrays")

    def _binary(self, tree: ast.BinOp) -> Closure:
        left, right = self.closure(tree.left), self.closure(tree.right)
        if isinstance(tree.op, ast.MatMult):
            return self._product(tree, left, right)
        compute = ARITHMETIC.get(type(tree.op)) or BITS.get(type(tree.op))
        if compute is None:
            raise self.text.error(tree, f"this operator is not accepted; {_LANGUAGE}")
        divides = isinstance(tree.op, ast.Div | ast.FloorDiv | ast.Mod)
        return self._computed(tree, shapes.elementwise, compute, divides=divides)(left, right)

    def _product(self, tree: ast.expr, left: Closure, right: Closure) -> Closure:
        def product(context: Context) -> Any:
            compute = self._computed(tree, shapes.product, lambda _, a, b: context.matmul(numeric(a), numeric(b)))
            return compute(left, right)(context)

        return product

    def _comparison(self, tree: ast.Compare) -> Closure:
        operands = [self.closure(operand) for operand in (tree.left, *tree.comparators)]
        links: list[Closure] = []
        for symbol, left, right in zip(tree.ops, operands, operands[1:], strict=False):
            name = _COMPARISONS.get(type(symbol))
            if name is None:
                raise self.text.error(tree, f"'in' and 'is' are not accepted; {_LANGUAGE}")
            compare = self._computed(tree, shapes.elementwise, comparing(name), takes_infinity=True)
            links.append(compare(left, right))
        result = links[0]
        for link in links[1:]:
            result = self._computed(tree, shapes.elementwise, lambda xp, a, b: xp.logical_and(a, b))(result, link)
        return result

    def _conditional(self, tree: ast.IfExp) -> Closure:
        """Convert ``x if c else y``, where ``c`` is a scalar expression."""
        parser = ExpressionParser(self.text, self.kinds)
        condition = self._scalar(tree.test, parser, parser.condition(tree.test))
        chosen, otherwise = self.closure(tree.body), self.closure(tree.orelse)
        return lambda context: (chosen if condition(context) else otherwise)(context)

    def _scalar(self, tree: ast.expr, parser: ExpressionParser, node: Any) -> Closure:
        """Return the value of a parsed scalar expression."""
        self.used |= parser.names

        def value(context: Context) -> Any:
            names = {name: _of_kind(plain(context.env[name]), self.kinds[name]) for name in parser.names}
            try:
                return node.evaluate(names, True)
            except EvaluationError as error:
                raise self.text.error(tree, error.problem) from None

        return value

    def _whole(self, tree: ast.expr) -> Closure:
        """Convert a whole number: a scalar expression."""
        parser = ExpressionParser(self.text, self.kinds)
        try:
            node = parser.node(tree)
        except ExpressionError as error:
            excerpt = self.text.excerpt(tree)
            problem = f"{excerpt!r} is not a whole number, or an expression of sizes: {error.problem}"
            raise ExpressionError(problem, error.column) from None
        if node.kind != "number":
            raise self.text.error(tree, f"{self.text.excerpt(tree)!r} is not a whole number")
        return self._scalar(tree, parser, node)

    def _wholes(self, tree: ast.expr) -> Closure:
        """Convert a whole number, None, or a tuple of whole numbers or of such tuples."""
        if isinstance(tree, ast.Constant) and tree.value is None:
            return lambda context: None
        if not isinstance(tree, ast.Tuple | ast.List):
            return self._whole(tree)
        items = [self._wholes(item) for item in tree.elts]
        return lambda context: tuple(item(context) for item in items)

    def _computed(
        self,
        tree: ast.expr,
        rule: Callable[..., shapes.Shape],
        compute: Callable[..., Any],
        *,
        kinds: Sequence[str] = (),
        divides: bool = False,
        takes_infinity: bool = False,
    ) -> Callable[..., Closure]:
        """Return a function of operands that gives their result.

        Parameters
        ----------
        tree
            Where errors are.
        rule, compute
            Shape of the result, and the result, as of `ArrayFunction`.
        kinds
            What each operand is: ``"array"``, which includes numbers, ``"arrays"`` or ``"option"``; by default arrays.
        divides
            Whether the last operand must not be a literal zero.
        takes_infinity
            Whether the result may be finite although an operand is infinite.
        """

        def of(*operands: Closure) -> Closure:
            def result(context: Context) -> Any:
                values = [operand(context) for operand in operands]
                try:
                    return result_of(
                        context,
                        rule,
                        compute,
                        values,
                        kinds or ("array",) * len(values),
                        divides=divides,
                        takes_infinity=takes_infinity,
                    )
                except (ValueError, TypeError, IndexError, ArithmeticError, MemoryError, AttributeError) as error:
                    if isinstance(error, MemoryError) and context.library is not np:
                        raise  # of the device's memory; the host's may suffice
                    found = " and ".join(str(shape_of(value)) for value in values if has_shape(value))
                    if rule in (shapes.elementwise, shapes.product):
                        raise self.text.error(tree, f"operands of shape {found} are not compatible: {error}") from None
                    raise self.text.error(tree, f"{error}{f' (of shape {found})' if found else ''}") from None

            return result

        return of

    def _subscript(self, tree: ast.Subscript) -> Closure:
        parts = tree.slice.elts if isinstance(tree.slice, ast.Tuple) else [tree.slice]
        if len(parts) > _MAX_ITEMS:
            raise self.text.error(tree, f"at most {_MAX_ITEMS} indices are accepted")
        indices = [self._index(part) for part in parts]
        array = self.closure(tree.value)

        def result(context: Context) -> Any:
            index = [part(context) for part in indices]
            compute = self._computed(
                tree,
                lambda shape: shapes.indexed(shape, [shape_of(part) if is_array(part) else part for part in index]),
                lambda xp, x: elements_at(xp, x, index),
            )
            return compute(array)(context)

        return result

    def _index(self, tree: ast.expr) -> Closure:
        match tree:
            case ast.Constant(value=None):
                return lambda context: None
            case ast.Constant(value=value) if value is ...:
                return lambda context: ...
            case ast.Slice(lower=lower, upper=upper, step=step):
                bounds = [self._whole(bound) if bound is not None else None for bound in (lower, upper, step)]
                return lambda context: sliced(self.text, tree, [bound(context) if bound else None for bound in bounds])
            case _:
                is_scalar = all(not isinstance(n, ast.Name) or n.id in self.kinds for n in ast.walk(tree))
                return self._whole(tree) if is_scalar else self.closure(tree)

    def _call(self, tree: ast.Call) -> Closure:
        name = tree.func.id if isinstance(tree.func, ast.Name) else ""
        if name not in self.functions:
            called = self.text.excerpt(tree.func)
            hint = f"{nearest(called, self.functions)} (functions: {', '.join(self.functions)})"
            raise self.text.error(tree, f"{called!r} cannot be called{hint}")
        function = self.functions[name]
        arguments = self._arguments(tree, name, function)
        operands = [self._argument(name, option, argument) for option, argument in arguments]

        kinds = [_operand_kind(option) for option, _ in arguments]
        takes_infinity = name in _FINITE_OF_INFINITE
        return self._computed(tree, function.shape, function.compute, kinds=kinds, takes_infinity=takes_infinity)(
            *operands
        )

    def _arguments(self, tree: ast.Call, name: str, function: ArrayFunction) -> list[tuple[str, Any]]:
        """Return each operand of the signature with its syntax tree, or with the literal of its default."""
        refusal = self.text.error(tree, f"{name} is called as {function.usage(name)}")
        if any(isinstance(argument, ast.Starred) for argument in tree.args) or len(tree.args) > _MAX_ITEMS:
            raise refusal
        given: dict[str, Any] = {}
        positional = list(tree.args)
        signature = [part.partition("=") for part in function.signature.split()]
        for option, _, _ in signature:
            if option.startswith("*"):
                rest = positional[0].elts if len(positional) == 1 and isinstance(positional[0], _LISTS) else positional
                if not rest:
                    raise refusal
                given[option] = list(rest)
                positional = []
            elif positional:
                given[option] = positional.pop(0)
        for keyword in tree.keywords:
            if keyword.arg not in [option for option, _, _ in signature] or keyword.arg in given:
                raise refusal
            given[keyword.arg] = keyword.value
        arguments: list[tuple[str, Any]] = []
        for option, has_default, default in signature:
            if option not in given and not has_default:
                raise refusal
            arguments.append((option, given[option] if option in given else ast.parse(default, mode="eval").body))
        if positional:
            raise refusal
        return arguments

    def _argument(self, name: str, option: str, tree: Any) -> Closure:
        """Convert an operand of a call."""
        if option.startswith("*"):
            return self._tuple(tree, self.closure if option == "*arrays" else self._whole)
        kind = OPTION_TYPES.get(option)
        if kind in _EXAMPLES:
            return self._literal(name, option, tree)
        if isinstance(tree, ast.Constant) and tree.value is None:
            return lambda context: None
        if kind == "arrays":
            if not isinstance(tree, _LISTS) or not 1 <= len(tree.elts) <= _MAX_ITEMS:
                raise self.text.error(tree, f"{name} takes 1 to {_MAX_ITEMS} arrays in a list, as in {name}((a, b))")
            return self._tuple(tree.elts, self.closure)
        convert = {"whole numbers": self._wholes, "whole number": self._whole}.get(str(kind), self.closure)
        return convert(tree)

    def _tuple(self, trees: Sequence[ast.expr], convert: Callable[[ast.expr], Closure]) -> Closure:
        items = [convert(tree) for tree in trees]
        return lambda context: tuple(item(context) for item in items)

    def _literal(self, name: str, option: str, tree: ast.expr) -> Closure:
        kind = OPTION_TYPES[option]
        literal = tree.value if isinstance(tree, ast.Constant) else None
        if not isinstance(literal, str if kind == "text" else bool):
            raise self.text.error(tree, f"{option} of {name} is a {kind}, as in {option}={_EXAMPLES[kind]}")
        return lambda context: literal


def _of_kind(value: Any, kind: Kind) -> Any:
    """Return a value in the type of its kind: a size may be given as a real number."""
    return int(value) if kind == "number" else value


_LISTS = (ast.Tuple, ast.List)
_EXAMPLES = {"text": "'edge'", "boolean": "True"}


def _operand_kind(option: str) -> str:
    """Return the kind of an operand of a signature, for a rule."""
    if option in ("*arrays", "arrays"):
        return "arrays"
    return "option" if option.startswith("*") or option in OPTION_TYPES else "array"


__all__ = ["ARRAY_FUNCTIONS", "Array", "ArrayExpression", "Matmul", "ShapeOnly", "parse_array_expression"]

Array = NDArray[Any]
Matmul = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class ArrayExpression:
    """A parsed array expression.

    Attributes
    ----------
    text
        Text, on one line.
    names
        All arrays and scalars in it.
    """

    text: str
    names: frozenset[str]
    location: Location = field(repr=False, compare=False)
    closure: Closure = field(repr=False, compare=False)

    @property
    def canonical(self) -> str:
        """Text with normalized spaces and parentheses."""
        return canonical_text(self.text)

    def shape(self, env: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the shape of the value, where ``env`` has `ShapeOnly` in place of arrays.

        Raises
        ------
        SpecError
            As for `evaluate`.
        """
        found: tuple[int, ...] = self.evaluate(env).shape
        return found

    def evaluate(self, env: Mapping[str, Any], matmul: Matmul | None = None) -> Any:
        """Evaluate the expression.

        Parameters
        ----------
        env
            Array or number for each of ``names``, of any dtype. Arrays of CuPy are evaluated by CuPy, on their device.
        matmul
            Implementation of ``@`` for two matrices or stacks of matrices; None for that of the array library.

        Returns
        -------
        numpy.ndarray
            float64, complex128, int64, uint64 or bool, of the library of the arrays in ``env``; real numbers are
            float64, and whole numbers exact. Divisions by zero, overflows and logarithms of negative numbers give
            infinities and NaNs, as on the device. A `ShapeOnly` if one is in ``env``.

        Raises
        ------
        SpecError
            Shapes are not compatible, an index is out of bounds, or an array would be too large.
        """
        values = list(env.values())
        library: ModuleType = sys.modules["cupy"] if any(map(_is_on_device, values)) else np
        only_shapes = any(isinstance(value, ShapeOnly) for value in values)
        context = Context(env, library, matmul or library.matmul, only_shapes)
        try:
            with np.errstate(all="ignore"):
                result = self.closure(context)
        except ExpressionError as error:
            raise self.location.error(error.problem, column=error.column, expression=self.text) from None
        return result if is_array(result) else np.asarray(result)


def parse_array_expression(
    text: str,
    names: Iterable[str],
    kinds: Mapping[str, Kind] | None = None,
    location: Location = UNKNOWN_LOCATION,
    functions: Mapping[str, ArrayFunction] | None = None,
) -> ArrayExpression:
    """Parse and check an array expression, which may begin with assignments: ``t = x @ w; maximum(t, 0)``.

    Parameters
    ----------
    text
        The expression.
    names
        Arrays and scalars that the expression may use.
    kinds
        Kind of each name that scalar expressions may use: the condition of ``x if c else y``, bounds, shapes.
    location
        Location of the text, for messages.
    functions
        Functions in addition to those of the language, such as random sources of inputs.

    Raises
    ------
    SpecError
        The text is not in the language or uses an unknown name.
    """
    line_of_text = one_line(text)
    known = {**FUNCTIONS, **functions} if functions else FUNCTIONS
    parser = ArrayParser(ExpressionText(line_of_text), tuple(names), kinds or {}, known)
    try:
        closure = parser.program()
    except ExpressionError as error:
        raise location.error(error.problem, column=error.column, expression=line_of_text) from None
    return ArrayExpression(line_of_text, frozenset(parser.used), location, closure)


def _is_on_device(value: Any) -> bool:
    return hasattr(value, "__cuda_array_interface__")
