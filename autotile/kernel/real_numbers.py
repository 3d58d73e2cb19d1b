"""Arithmetic on real numbers (float64), for one configuration or for columns of many; results are finite.

``where`` selects the rows, as in `autotile.kernel.whole_numbers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from autotile.kernel.whole_numbers import Operand, Rows, refuse


def add(left: Operand, right: Operand, where: Rows) -> Operand:
    """``left + right``."""
    return _finite(np.add, where, left, right)


def subtract(left: Operand, right: Operand, where: Rows) -> Operand:
    """``left - right``."""
    return _finite(np.subtract, where, left, right)


def multiply(left: Operand, right: Operand, where: Rows) -> Operand:
    """``left * right``."""
    return _finite(np.multiply, where, left, right)


def divide(left: Operand, right: Operand, where: Rows) -> Operand:
    """``left / right``."""
    return _divided(np.divide, left, right, where)


def floor_divide(left: Operand, right: Operand, where: Rows) -> Operand:
    """``left // right``, rounded down."""
    return _divided(np.floor_divide, left, right, where)


def modulo(left: Operand, right: Operand, where: Rows) -> Operand:
    """``left % right``, with the sign of ``right``."""
    return _divided(np.mod, left, right, where)


def power(base: Operand, exponent: Operand, where: Rows) -> Operand:
    """``base ** exponent``."""
    refuse((base == 0) & (exponent < 0), where, "division by zero")
    return _finite(np.power, where, base, exponent)


def minimum(left: Operand, right: Operand, where: Rows) -> Operand:
    """``min(left, right)``."""
    return _finite(np.minimum, where, left, right)


def maximum(left: Operand, right: Operand, where: Rows) -> Operand:
    """``max(left, right)``."""
    return _finite(np.maximum, where, left, right)


def absolute(value: Operand, where: Rows) -> Operand:
    """``abs(value)``."""
    return abs(value)


def square_root(value: Operand, where: Rows) -> Operand:
    """``sqrt(value)``."""
    refuse(value < 0, where, "the square root of a negative number")
    return _finite(np.sqrt, where, value)


def log2(value: Operand, where: Rows) -> Operand:
    """``log2(value)``."""
    return _logarithm(np.log2, value, where)


def log(value: Operand, where: Rows) -> Operand:
    """``log(value)``, to base e."""
    return _logarithm(np.log, value, where)


def exponential(value: Operand, where: Rows) -> Operand:
    """``exp(value)``."""
    return _finite(np.exp, where, value)


def floor(value: Operand, where: Rows) -> Operand:
    """Return the largest whole number that is not above the value."""
    return _whole(np.floor, value, where)


def ceil(value: Operand, where: Rows) -> Operand:
    """Return the smallest whole number that is not below the value."""
    return _whole(np.ceil, value, where)


def nearest_whole(value: Operand, where: Rows) -> Operand:
    """``round(value)``: the nearest whole number, the even one of two equally near."""
    return _whole(np.rint, value, where)


def truncate(value: Operand, where: Rows) -> Operand:
    """``int(value)``: the whole number next to the value, toward zero."""
    return _whole(np.trunc, value, where)


def _divided(operation: Callable[..., Any], left: Operand, right: Operand, where: Rows) -> Operand:
    refuse(right == 0, where, "division by zero")
    return _finite(operation, where, left, np.where(right == 0, 1.0, right) if isinstance(right, np.ndarray) else right)


def _logarithm(operation: Callable[..., Any], value: Operand, where: Rows) -> Operand:
    refuse(value <= 0, where, "the logarithm of a number that is not above 0")
    return _finite(operation, where, value)


def _finite(operation: Callable[..., Any], where: Rows, *operands: Operand) -> Operand:
    """Apply an operation; the result is a Python number unless an operand is a column."""
    with np.errstate(all="ignore"):
        result = operation(*operands)
    refuse(~np.isfinite(result), where, "the result is not a finite number")
    return result if isinstance(result, np.ndarray) else float(result)


def _whole(operation: Callable[..., Any], value: Operand, where: Rows) -> Operand:
    rounded = operation(value)
    fits = (rounded >= -(2.0**63)) & (rounded < 2.0**63)
    refuse(~fits, where, "the result does not fit in 64 bits")
    return np.where(fits, rounded, 0).astype(np.int64) if isinstance(rounded, np.ndarray) else int(rounded)
