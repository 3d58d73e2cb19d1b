"""Evaluation of array operations: operands, limits and results."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from autotile.kernel import array_shapes as shapes
from autotile.kernel.array_functions import arithmetic, bounded, check_indices, has_kind, numeric, power, whole
from autotile.kernel.array_shapes import ShapeOnly
from autotile.kernel.syntax import ExpressionText


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
    """Return what a rule takes for an operand: the shape of an array, the shapes of several, or an option itself."""
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
