"""Functions of array expressions: for each its signature, the shape of its result, and its computation.

A computation takes the array library, NumPy or CuPy, and operands whose shapes have been checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from autotile.kernel import array_shapes as shapes
from autotile.kernel.array_shapes import Shape

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
