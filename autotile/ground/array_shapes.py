"""Arrays of which only the shape is known: an array expression is tried on them, and nothing is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

_CLIPPING = (np.maximum, np.minimum)
"""Operations that give finite values though an operand is infinite."""


class ShapeOnly:
    """Stands for a finite float64 array; NumPy's functions give the shape of their result, and refuse what it refuses.

    Parameters
    ----------
    shape
        Of the array.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def astype(self, dtype: Any, copy: bool = True) -> ShapeOnly:
        """The same: all is float64."""
        return self

    def __getitem__(self, index: Any) -> ShapeOnly:
        return self

    def __setitem__(self, index: Any, value: Any) -> None:
        """Nothing is stored."""

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *operands: Any, **options: Any) -> Any:
        if method != "__call__":
            return NotImplemented
        for operand in operands:
            if not isinstance(operand, ShapeOnly) and ufunc not in _CLIPPING and not np.isfinite(operand):
                raise ValueError(f"an operand is {operand}, so that the result is not finite")
        if ufunc is np.divide and not isinstance(operands[1], ShapeOnly) and operands[1] == 0:
            raise ValueError("the divisor is zero")
        if ufunc is np.matmul:
            return ShapeOnly(_product_shape(*(np.shape(operand) for operand in operands)))
        return ShapeOnly(np.broadcast_shapes(*(np.shape(operand) for operand in operands)))

    def __array_function__(self, function: Any, types: Any, arguments: tuple[Any, ...], options: Any) -> Any:
        known = _FUNCTIONS.get(function)
        return known(*arguments, **options) if known is not None else NotImplemented


def _reduced(array: ShapeOnly, axis: int | None = None) -> ShapeOnly:
    if axis is None:
        return ShapeOnly(())
    if not -array.ndim <= axis < array.ndim:
        raise ValueError(f"axis {axis} is out of bounds for an array of {array.ndim} axes")
    left = list(array.shape)
    del left[axis]
    return ShapeOnly(tuple(left))


def _swapped(array: ShapeOnly, first: int, second: int) -> ShapeOnly:
    shape = list(array.shape)
    shape[first], shape[second] = shape[second], shape[first]
    return ShapeOnly(tuple(shape))


def _product_shape(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of ``a @ b``; a vector is a row on the left and a column on the right."""
    if not a or not b:
        raise ValueError("a matrix product takes no numbers; use *")
    rows, columns = a[-2:-1], b[-1:] if len(b) > 1 else ()
    if a[-1] != b[-2 if len(b) > 1 else -1]:
        raise ValueError(f"{a[-1]} columns against {b[-2 if len(b) > 1 else -1]} rows")
    return (*np.broadcast_shapes(a[:-2], b[:-2]), *rows, *columns)


_FUNCTIONS: Mapping[Any, Callable[..., Any]] = {
    np.shape: lambda array: array.shape,
    np.ndim: lambda array: array.ndim,
    np.sum: _reduced,
    np.mean: _reduced,
    np.max: _reduced,
    np.swapaxes: _swapped,
    np.zeros_like: lambda array: array,
}
